"""No loop of ours starts processes without limit, whatever makes it one: starts of workers are counted and slowed down.

The first few within a minute come at once, as ever; each further one comes later than the one before. A worker that is
replaced again and again, and never makes a step, is answered at the next severity: its node leaves the job, or the
others of this node train on without it. Where none of them trains, all workers begin again, which counts, and fails
when no restart is left. Restarts of all that count have their own limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unicron_elastic.faults import Failure, Fault, Severity, Status, classify
from unicron_elastic.recovery.commands import Command, LeaveJob, StartWorkers, Tell, WakeAt
from unicron_elastic.recovery.node import SUSPECT_S
from unicron_elastic.recovery.state import JobState, Phase, Start, Worker, has_anyone_parted, is_over

WINDOW_S = 60.0
AT_ONCE = 5  # starts of one worker within the window
LATER_S = 1.0  # so long after the last one comes the next, and twice as long after that the one after it
LATEST_S = 30.0
FRUITLESS_MAX = 10  # starts of one worker in a row, in none of which it has made a step
_KEPT = 16  # of each worker; more than AT_ONCE and the delays let come within the window


def started(state: JobState, local_ranks: Iterable[int], at: float) -> JobState:
    """Count a start of each of these workers."""
    starts = state.starts
    for local_rank in local_ranks:
        own = [each for each in starts if each.local_rank == local_rank][1 - _KEPT :]
        others = [each for each in starts if each.local_rank != local_rank]
        starts = (*others, *own, Start(at=at, local_rank=local_rank))
    return replace(state, starts=starts)


def stepped(state: JobState, local_rank: int) -> JobState:
    """Book that a worker has made a step: what was started for that was not in vain."""
    if not _fruitless(state, local_rank):
        return state
    starts = (replace(each, is_fruitful=True) if each.local_rank == local_rank else each for each in state.starts)
    return replace(state, starts=tuple(starts))


def may_start_at(state: JobState, local_ranks: Iterable[int], at: float) -> float:
    """Return when the next of these workers may be started together: ``at``, or later if there were many starts."""
    return max((_next_start(state, local_rank, at) for local_rank in local_ranks), default=at)


def why_later(state: JobState, local_ranks: Iterable[int], at: float) -> str:
    """Return how often the one of these workers was started that was started most, as the end of a sentence."""
    most = max((len(_lately(state, local_rank, at)) for local_rank in local_ranks), default=0)
    return f"after {most} starts within {WINDOW_S:g} s"


def overrun(state: JobState, at: float) -> Fault | None:
    """Return what stands for a worker that is lost, and would be started once more after too many starts in vain."""
    if state.phase is not Phase.RUNNING or state.leaves or has_anyone_parted(state) or is_over(state):
        return None
    for worker in state.workers:
        starts = _fruitless(state, worker.local_rank)
        is_waited_for = worker.is_lost and worker.exit_code is not None and not worker.is_given_up
        if is_waited_for and len(starts) >= FRUITLESS_MAX:
            return _fault(worker, starts, at)
    return None


def pace(state: JobState, used_before: int, commands: list[Command], at: float) -> tuple[JobState, list[Command]]:
    """Put off a start of all workers that does not count as a restart, if there were many; all else is as it was."""
    start = next((command for command in commands if isinstance(command, StartWorkers)), None)
    local_ranks = [worker.local_rank for worker in state.workers]
    if start is None or start.restarts_used > used_before:
        return state, commands
    if (state.is_left_out or state.came_late) and all(
        len(_fruitless(state, each)) >= FRUITLESS_MAX for each in local_ranks
    ):
        reason = (
            f"The workers of this node were started {FRUITLESS_MAX} times without a step, and others go on without it."
        )
        leaves = LeaveJob(cause=None, reason=f"{reason} This node leaves the job.", quarantine_s=SUSPECT_S)
        state = replace(state, phase=Phase.FINISHED, incident=None)
        return state, [leaves if command is start else command for command in commands]
    start_at = may_start_at(state, local_ranks, at)
    if start_at <= at:
        return state, commands
    wait_s = start_at - at
    said = Tell(reason=f"{start.reason} They start in {wait_s:.0f} s, {why_later(state, local_ranks, at)}.")
    held = [command for command in commands if command is not start]
    return replace(state, start=start, start_at=start_at), [*held, said, WakeAt(at=start_at)]


def start_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Start the workers whose start was put off, if it is time."""
    if state.start is None or state.start_at is None or at < state.start_at:
        return state, []
    return replace(state, start=None, start_at=None), [state.start]


def _next_start(state: JobState, local_rank: int, at: float) -> float:
    lately = _lately(state, local_rank, at)
    if len(lately) < AT_ONCE:
        return at
    return max(at, lately[-1].at + min(LATER_S * 2.0 ** (len(lately) - AT_ONCE), LATEST_S))


def _lately(state: JobState, local_rank: int, at: float) -> list[Start]:
    return [each for each in state.starts if each.local_rank == local_rank and at - each.at < WINDOW_S]


def _fruitless(state: JobState, local_rank: int) -> list[Start]:
    """Return the starts of a worker since it last made a step."""
    return [each for each in state.starts if each.local_rank == local_rank and not each.is_fruitful]


def _fault(worker: Worker, starts: list[Start], at: float) -> Fault:
    """Return a fault of the worst severity, which leaves nothing but to end the node's part, or to begin again."""
    failure = Failure(at=at, rank=worker.rank, local_rank=worker.local_rank, pid=worker.pid, exit_code=worker.exit_code)
    ended = "The last of these processes was ended here."
    if worker.exit_code and not worker.was_killed:
        ended = f"The last time {classify(failure).reason}"
    often = (
        f"rank {worker.rank} was started {len(starts)} times within {at - starts[0].at:.0f} s, and never made a step."
    )
    return Fault(
        failure=failure,
        status=Status.EXITED_ABNORMALLY,
        severity=Severity.SEV1,
        is_consequence=False,
        reason=f"{often} {ended}",
    )
