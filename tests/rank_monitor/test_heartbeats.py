"""Heartbeats on the page: steps if nobody else counts them, signs of life if somebody does."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import pytest
import torch
from fake_agent import Agent
from torch.optim import optimizer as torch_optimizer

from unicron_elastic import phase
from unicron_elastic.worker.link import AGENT, HEARTBEATS_WAITED_FOR
from unicron_elastic.worker.notices import FirstStep
from unicron_elastic.worker.pulse import TRAIN
from unicron_elastic.worker.step_count import count_steps


@pytest.fixture(autouse=True)
def _plain_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_post_hooks", OrderedDict())


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_they_are_steps_where_nobody_counts_any(agent: Agent) -> None:
    for _ in range(HEARTBEATS_WAITED_FOR):
        AGENT.beat()
    assert agent.read().step == 0
    assert agent.heard() == []
    for _ in range(3):
        AGENT.beat()
    assert agent.read().step == 3
    assert agent.heard() == [FirstStep(step=1).message()]


def test_they_count_no_step_twice(agent: Agent) -> None:
    count_steps(agent.pulse, lambda _: None)
    optimizer = an_optimizer()
    for step in range(1, 20):
        AGENT.beat()  # before the optimizer, as in NVIDIA's example
        optimizer.step()
        assert agent.read().step == step
    for _ in range(9):  # an evaluation
        AGENT.beat()
    assert agent.read().step == 19


def test_they_give_what_is_done_now_its_time_anew(agent: Agent) -> None:
    count_steps(agent.pulse, lambda _: None)
    AGENT.beat()
    an_optimizer().step()
    with phase("evaluation"):
        before = agent.read()
        AGENT.beat()
        after = agent.read()
        assert after.phase == "evaluation"
        assert (after.phase_since or 0) > (before.phase_since or 0)
    AGENT.beat()
    assert agent.phase == TRAIN
    assert (agent.read().phase_since or 0) > (after.phase_since or 0)


def test_an_optimizer_that_steps_later_takes_over(agent: Agent) -> None:
    count_steps(agent.pulse, lambda _: None)
    for _ in range(HEARTBEATS_WAITED_FOR + 8):
        AGENT.beat()
    assert agent.read().step == 8
    optimizer = an_optimizer()
    for step in (1, 2):
        optimizer.step()
        AGENT.beat()
        assert agent.read().step == step


def test_a_thread_that_beats_through_a_hang_is_not_heard(agent: Agent) -> None:
    def beat() -> None:
        for _ in range(HEARTBEATS_WAITED_FOR + 8):
            AGENT.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    thread.join()
    assert agent.read().step == 0


def test_a_child_of_the_script_is_not_heard(agent: Agent) -> None:
    AGENT.beat()
    pid = os.fork()
    if pid == 0:
        for _ in range(HEARTBEATS_WAITED_FOR + 8):
            AGENT.beat()
        os._exit(1 if AGENT.say(FirstStep(step=1)) else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert agent.read().step == 0
    assert agent.heard() == []


def test_an_agent_that_is_gone_disturbs_nobody(agent: Agent) -> None:
    agent.control.close()
    assert AGENT.say(FirstStep(step=1)) is False
    for _ in range(HEARTBEATS_WAITED_FOR + 1):
        AGENT.beat()
    assert agent.read().step == 1
