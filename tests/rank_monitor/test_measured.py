"""What is learned from what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

from unicron_elastic.worker.rank_monitor.data import HeartbeatTimeouts, SectionTimeouts
from unicron_elastic.worker.rank_monitor.measured import Measured


@pytest.fixture
def measured() -> Measured:
    made = Measured(5.0, 0.0, ["one"])
    made.opened("two")
    made.outside_until(2.0)
    made.closed("two", 1.0, 3.0, is_last=False)
    made.closed("one", 4.0, 6.0, is_last=True)
    made.outside_until(9.0)
    return made


def test_heartbeats_want_two() -> None:
    measured = Measured(5.0, 10.0, [])
    assert measured.heartbeat_timeouts(HeartbeatTimeouts()) is None
    measured.heartbeat(14.0)
    assert measured.heartbeat_timeouts(HeartbeatTimeouts()) is None
    for at in (15.0, 18.0, 19.0):
        measured.heartbeat(at)
    assert measured.heartbeat_timeouts(HeartbeatTimeouts(1.0, 1.0, False)) == HeartbeatTimeouts(20.0, 15.0, True)


def test_what_was_learned_before_counts_half() -> None:
    measured = Measured(5.0, 0.0, [])
    measured.heartbeat(2.0)
    measured.heartbeat(3.0)
    assert measured.heartbeat_timeouts(HeartbeatTimeouts(20.0, 15.0, True)) == HeartbeatTimeouts(15.0, 10.0, True)


def test_all_sections(measured: Measured) -> None:
    learned = measured.section_timeouts(None, True, SectionTimeouts())
    assert learned == SectionTimeouts({"one": 20.0, "two": 5.0}, 15.0, {"one", "two"}, True)
    assert learned.were_calculated
    assert learned.are_valid


def test_some_sections(measured: Measured) -> None:
    learned = measured.section_timeouts(["two"], False, SectionTimeouts({"one": 9.0, "two": 7.0}, None))
    assert learned == SectionTimeouts({"one": 9.0, "two": 5.0}, None, {"two"}, False)
    assert not learned.were_calculated
    assert not learned.are_valid


def test_no_section_but_the_time_outside(measured: Measured) -> None:
    present = SectionTimeouts({"old": 3.0}, 5.0, {"old"}, True)
    assert measured.section_timeouts([], True, present) == SectionTimeouts({"old": 3.0}, 10.0, {"old"}, True)


def test_learned_sections_are_averaged_and_configured_ones_replaced(measured: Measured) -> None:
    learned = measured.section_timeouts(None, False, SectionTimeouts({"one": 10.0, "two": 100.0}, 1.0, {"one"}))
    assert learned == SectionTimeouts({"one": 15.0, "two": 5.0}, 1.0, {"one", "two"})


def test_the_longest_of_all_ranks_counts(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(rows: list[Any], own: Any) -> None:
        rows[:] = [own, ({"two": 30.0, "three": 1.0}, ["three", "two"])]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    measured.share()
    learned = measured.section_timeouts(None, True, SectionTimeouts())
    assert learned is not None
    assert learned.section == {"one": 20.0, "two": 150.0, "three": 5.0}
