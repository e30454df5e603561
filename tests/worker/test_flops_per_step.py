"""The script's word on the FLOPs of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

import unicron_elastic
from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.message import Odd, heard
from unicron_elastic.worker.notices import FlopsPerStep


@pytest.fixture
def agent() -> Iterator[Channel]:
    ours, theirs = Channel.pair()
    ours.settimeout(0)
    fd = theirs.fileno()
    theirs.detach()
    control = Control(fd)
    AGENT.connect(control, None)
    yield ours
    AGENT.connect(None, None)
    control.close()
    ours.close()


@pytest.mark.parametrize("value", [3, 1.5e15, np.float32(2.0), np.int64(7), Fraction(1, 2)])
def test_the_agent_hears_it(agent: Channel, value: float) -> None:
    unicron_elastic.flops_per_step(value)
    assert agent.hear([FlopsPerStep]) == FlopsPerStep(flops=float(value))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1e15", b"1", None, [], 10**400, 1j])
def test_what_is_no_positive_number_is_told_to_the_script(agent: Channel, value: float) -> None:
    with pytest.raises(ValueError, match="positive number"):
        unicron_elastic.flops_per_step(value)
    with pytest.raises(BlockingIOError):
        agent.receive()


def test_without_an_agent_it_does_nothing() -> None:
    unicron_elastic.flops_per_step(1e15)


def test_an_agent_that_is_gone_is_no_error(agent: Channel) -> None:
    agent.close()
    unicron_elastic.flops_per_step(1e15)


@pytest.mark.parametrize("told", [None, math.nan, math.inf, "1", True, 10**400])
def test_what_no_worker_of_ours_says_is_refused(told: object) -> None:
    assert heard({"is": "FlopsPerStep", "flops": told}, [FlopsPerStep]) == Odd("FlopsPerStep.flops is not a number")
