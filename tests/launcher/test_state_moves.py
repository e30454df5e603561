"""Where workers that began again had their state from, in the incident for which they had to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_incident_picture import INCIDENT

from unicron_elastic.launcher.view.incidents.state_moves import StateMove, StateMoves, state_move

MOVE = StateMove(at=103.0, took_s=0.5, bytes=1000, source="n1 (TCP)")


def test_a_move_belongs_to_the_newest_incident_and_is_recorded_again():
    moves = StateMoves()
    assert moves.recorded(INCIDENT) == INCIDENT
    found = moves.moved(MOVE)
    assert found is not None
    assert (found.number, found.state_at, found.state_s, found.state_bytes, found.state_from) == (
        2, 103.0, 0.5, 1000, "n1 (TCP)",
    )  # fmt: skip


def test_what_the_state_machine_records_later_keeps_it():
    moves = StateMoves()
    moves.recorded(INCIDENT)
    moves.moved(MOVE)
    assert moves.recorded(INCIDENT).state_bytes == 1000


def test_several_workers_of_a_node_are_one_move():
    moves = StateMoves()
    moves.recorded(INCIDENT)
    moves.moved(MOVE)
    found = moves.moved(StateMove(at=103.25, took_s=0.5, bytes=500, source="n3 (memory)"))
    assert found is not None
    assert (found.state_at, found.state_s, found.state_bytes) == (103.25, 0.75, 1500)
    assert found.state_from == "n1 (TCP); n3 (memory)"


@pytest.mark.parametrize(
    "move",
    [
        StateMove(at=100.1, took_s=0.5, bytes=1, source=""),  # began before the fault
        StateMove(at=5000.0, took_s=0.5, bytes=1, source=""),  # much later
    ],
)
def test_what_has_nothing_to_do_with_it_is_left_out(move):
    moves = StateMoves()
    assert moves.moved(move) is None  # the first start
    moves.recorded(INCIDENT)
    assert moves.moved(move) is None


def test_the_next_incident_begins_anew():
    moves = StateMoves()
    moves.recorded(INCIDENT)
    moves.moved(MOVE)
    assert moves.recorded(replace(INCIDENT, number=3)).state_at is None
    assert moves.recorded(INCIDENT).number == 2


def test_a_move_is_read_with_bounds():
    sources = ["a\x1b (TCP)", "b (TCP)", "b (TCP)"]
    assert state_move(0.1, 10, sources, 7.0) == StateMove(at=7.0, took_s=0.1, bytes=10, source="a (TCP), b (TCP)")


@pytest.mark.parametrize(("took_s", "count"), [(0.1, -1), (0.1, 2**70), (-1.0, 10), (float("nan"), 10)])
def test_what_no_worker_says_is_refused(took_s, count):
    with pytest.raises(ValueError, match="must be"):
        state_move(took_s, count, ["a"], 7.0)
