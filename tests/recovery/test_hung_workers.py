"""Workers that hang: evidence first, then their end, unless they go on or nothing is to be done."""

from __future__ import annotations

import pytest
from scenario import GO_ON, HANGS, KILLED, Job, none, only

from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    Command,
    FinishJob,
    GatherEvidence,
    KillWorkers,
    StopWorkers,
    Tell,
    WakeAt,
)


def started(**policy: object) -> Job:
    job = Job(**policy)  # type: ignore[arg-type]
    job.start()
    return job


def wakes(commands: list[Command]) -> list[float]:
    return [command.at for command in commands if isinstance(command, WakeAt)]


@pytest.mark.parametrize(("kind", "act_at"), [(HangKind.DEADLOCKED, 230.0), (HangKind.AWAITED, 500.0)])
def test_what_may_end_by_itself_has_to_last(kind: HangKind, act_at: float) -> None:
    job = started(hang_patience_s=30.0)
    assert act_at in wakes(job.hung(1, at=200.0, kind=kind))
    assert job.evidence(1, at=200.4) == []
    assert job.time(203.0) == []
    follows = f"If that lasts, it is ended in {act_at - 205.0:.0f} s (--unicron-hang-patience)."
    assert job.time(205.0) == [Tell(reason=f"{HANGS} By now there has been no step for 5.1 s. {follows}")]
    assert job.time(act_at - 0.1) == []
    commands = job.time(act_at)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert only(commands, StopWorkers).reason == f"Nothing has moved for {act_at - 199.9:.0f} s: all workers stop."


def test_who_goes_on_is_let_go() -> None:
    job = started()
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    assert job.goes_on() == []  # nobody had heard of it
    assert job.time(230.0) == []
    assert job.state.incidents == 0
    job.hung(1, at=240.0, kind=HangKind.AWAITED)
    job.time(245.0)
    assert job.goes_on() == [Tell(reason=GO_ON)]
    assert job.state.hang is None


def test_another_fault_meanwhile_takes_those_who_hang_along() -> None:
    job = started(workers=3)
    job.hung(1, kind=HangKind.AWAITED)
    commands = job.exited(2, KILLED)
    assert only(commands, StopWorkers).local_ranks == (0, 1)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert job.state.hang is None


@pytest.mark.parametrize("code", [0, KILLED])
def test_who_ended_meanwhile_does_not_hang(code: int) -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    job.exited(1, code)
    assert none(job.evidence(1), KillWorkers)
    assert none(job.time(600.0), GatherEvidence)


def test_the_end_of_all_is_the_end_of_the_hang() -> None:
    job = started()
    job.hung(1, kind=HangKind.AWAITED)
    job.exited(1)
    only(job.exited(0), FinishJob)
    assert job.state.hang is None
