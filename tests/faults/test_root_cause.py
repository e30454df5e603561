"""Which rank failed first, in cause."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.faults import Failure, Fault, Severity, Status, classify, root_cause

GLOO_CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44696"
GLOO_TIMEOUT = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


def _fault(rank: int, at: float, **known: Any) -> Fault:
    return classify(Failure(at=at, rank=rank, local_rank=rank, pid=100 + rank, **known))


def _closed(rank: int, at: float) -> Fault:
    return _fault(rank, at, exception_type="RuntimeError", message=GLOO_CLOSED)


def _timed_out(rank: int, at: float) -> Fault:
    return _fault(rank, at, exception_type="RuntimeError", message=GLOO_TIMEOUT)


def test_killed_rank_is_the_root_though_its_neighbours_reported_earlier() -> None:
    killed = _fault(1, 10.030, exit_code=-9, step=120)
    faults = [_closed(2, 10.025), killed, _timed_out(3, 14.0), _closed(0, 10.018)]
    found = root_cause(faults)
    assert found.fault is killed
    assert [fault.failure.rank for fault in found.consequences] == [0, 2, 3]
    assert found.reason == (
        "rank 1 failed first: it was killed by signal 9 (SIGKILL) after 120 steps; 3 other ranks followed: "
        "2x connection refused or reset (ranks 0, 2), 1x collective time-out (rank 3)."
    )


def test_earliest_cause_wins_among_several() -> None:
    late = _fault(0, 2.0, exception_type="KeyError", message="'x'")
    early = _fault(5, 1.0, exception_type="ValueError", message="bad")
    assert root_cause([late, early]).fault is early


def test_without_a_cause_the_earliest_report_is_shown_as_such() -> None:
    found = root_cause([_timed_out(2, 5.1), _timed_out(0, 5.0)])
    assert found.fault.failure.rank == 0
    assert found.reason == (
        "no rank here failed by itself; rank 0 reported first: it raised RuntimeError: Timed out waiting 4000ms for "
        "recv operation to complete; 1 other rank followed: 1x collective time-out (rank 2)."
    )


def test_exit_after_a_reported_consequence_is_not_a_cause() -> None:
    # Rank 0 reports a closed connection and exits with 1; the agent hears later that rank 1's node is gone.
    reported, left = _closed(0, 1.0), _fault(0, 1.2, exit_code=1)
    root = _fault(1, 1.5, exit_code=-11)
    found = root_cause([left, reported, root])
    assert found.fault is root
    assert found.consequences == (reported, left)
    assert found.reason.endswith("; 1 other rank followed: 1x connection refused or reset (rank 0).")


def test_the_root_does_not_follow_itself() -> None:
    found = root_cause([_fault(2, 1.0, exception_type="KeyError", message="'x'"), _fault(2, 1.1, exit_code=1)])
    assert len(found.consequences) == 1
    assert found.reason == "rank 2 raised KeyError: 'x'."


def test_one_fault_alone() -> None:
    found = root_cause([_fault(4, 1.0, exit_code=3)])
    assert found.consequences == ()
    assert found.reason == "rank 4 exited with code 3."


def test_ties_go_to_the_lower_rank() -> None:
    faults = [_fault(rank, 1.0, exit_code=1) for rank in (3, 1, 2)]
    assert root_cause(faults).fault.failure.rank == 1


def test_ranks_are_joined_and_bounded() -> None:
    cause = _fault(8, 1.0, exit_code=1)
    few = root_cause([cause, *(_closed(rank, 2.0) for rank in (0, 1, 2, 3, 9, 10, 12))])
    assert few.reason.endswith("7x connection refused or reset (ranks 0-3, 9, 10, 12).")
    many = root_cause([cause, *(_closed(rank, 2.0) for rank in range(0, 4000, 2) if rank != 8)])
    assert "1999x connection refused or reset (ranks 0, 2, 4" in many.reason
    assert many.reason.endswith("…).")
    assert len(many.reason) < 300


def test_no_faults_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one fault"):
        root_cause([])


@st.composite
def _faults(draw: st.DrawFn) -> list[Fault]:
    return draw(
        st.lists(
            st.builds(
                lambda rank, at, is_consequence: Fault(
                    failure=Failure(at=at, rank=rank, local_rank=0, pid=1),
                    status=Status.TASK_HANG,
                    severity=Severity.SEV2,
                    is_consequence=is_consequence,
                    reason=f"rank {rank} failed.",
                ),
                st.integers(0, 5),
                st.integers(0, 3).map(float),
                st.booleans(),
            ),
            min_size=1,
            max_size=12,
            unique_by=lambda fault: (fault.failure.rank, fault.failure.at),
        )
    )


@given(_faults(), st.randoms(use_true_random=False))
def test_order_of_reports_does_not_matter_and_nothing_is_lost(faults: list[Fault], order: random.Random) -> None:
    shuffled = list(faults)
    order.shuffle(shuffled)
    found = root_cause(faults)
    assert root_cause(shuffled) == found
    assert sorted(map(id, (found.fault, *found.consequences))) == sorted(map(id, faults))
    times = [(fault.failure.at, fault.failure.rank) for fault in found.consequences]
    assert times == sorted(times)


@given(_faults())
def test_root_is_the_earliest_own_fault(faults: list[Fault]) -> None:
    root = root_cause(faults).fault
    first: dict[int, Fault] = {}
    for fault in sorted(faults, key=lambda fault: fault.failure.at):
        first.setdefault(fault.failure.rank, fault)
    own = [fault for fault in first.values() if not fault.is_consequence]
    assert root.is_consequence == (not own)
    assert root.failure.at == min(fault.failure.at for fault in own or faults)
