"""Ending the workers of a generation: who is told to stop, who ends by itself, and for how long that is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unicron_elastic.recovery.commands import Command, KillWorkers, StopWorkers, WakeAt
from unicron_elastic.recovery.hangs import kill_hung
from unicron_elastic.recovery.state import JobState, Phase, Worker, named


def stop(state: JobState, at: float, reason: str, *, is_anyone_gone: bool = True) -> tuple[JobState, list[Command]]:
    """Tells all workers to stop but those who end by themselves, and ends at once those who hang."""
    policy = state.policy
    to_stop = tuple(w.local_rank for w in state.running if not _is_ending(w, at, _shutdown_s(state)))
    kill_at = at + policy.stop_timeout_s
    teardown_at = _teardown_at(state, to_stop, at)
    state = replace(state.told_to_stop(to_stop, at), phase=Phase.STOPPING, kill_at=kill_at, teardown_at=teardown_at)
    state = replace(state, broke=None, replace_at=None)
    told = StopWorkers(local_ranks=to_stop, reason=reason, is_anyone_gone=is_anyone_gone)
    commands: list[Command] = [told, WakeAt(at=kill_at)]
    if teardown_at is not None:
        commands.append(WakeAt(at=teardown_at))
    state, kills = kill_hung(state)
    return state, [*commands, *kills]


def summon(state: JobState, at: float, reason: str, *, counts: bool) -> tuple[JobState, list[Command]]:
    """Stops a healthy generation because another node failed or wants to join."""
    if state.phase is Phase.STOPPING and counts and not (state.counts_as_restart or state.is_left_out):
        return replace(state, summons=reason, counts_as_restart=True), []  # a fault weighs more than a newcomer
    if state.phase is not Phase.RUNNING:
        return state, []
    state = replace(state, summons=reason, counts_as_restart=counts)
    return stop(state, at, reason, is_anyone_gone=counts)


def end_at_once(state: JobState, at: float, reason: str) -> tuple[JobState, list[Command]]:
    """Kill all workers, which have nothing left to save: others train on without them."""
    local_ranks = tuple(worker.local_rank for worker in state.running)
    killed = (replace(w, was_killed=True) if w.local_rank in local_ranks else w for w in state.workers)
    kill_at = at + state.policy.stop_timeout_s
    state = replace(state, workers=tuple(killed), phase=Phase.STOPPING, kill_at=kill_at, teardown_at=None)
    state = replace(state.told_to_stop(local_ranks, at), hang=None, broke=None, replace_at=None)
    return state, [KillWorkers(local_ranks=local_ranks, reason=reason)]


def _is_ending(worker: Worker, at: float, shutdown_s: float) -> bool:
    """Whether it ends by itself: who was seen to long ago does not come to an end."""
    if worker.raised is not None:
        return True
    return worker.ending_at is not None and at - worker.ending_at <= shutdown_s


def _shutdown_s(state: JobState) -> float:
    """Return how long an interpreter may shut down.

    While all that is known are consequences, as of a connection that a peer has closed, its exit code alone may tell
    the cause: on a loaded host it comes late.
    """
    is_cause_known = not state.faults or not all(fault.is_consequence for fault in state.faults)
    return state.policy.ending_timeout_s if is_cause_known else state.policy.teardown_timeout_s


def _teardown_at(state: JobState, told: tuple[int, ...], stop_at: float) -> float | None:
    """When the first of those who end by themselves, and so were not told to stop, is told all the same."""
    policy = state.policy
    left = [worker for worker in state.running if worker.local_rank not in told]
    if not left:
        return None
    if any(worker.raised is None for worker in left):
        return stop_at + min(_shutdown_s(state), policy.stop_timeout_s / 2)
    return stop_at + min(policy.teardown_timeout_s, policy.stop_timeout_s)


def end_of_teardown(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Ends those who had their time: an interpreter that shuts down has less of it than one that handles an error."""
    quick = [w.local_rank for w in state.running if w.told_to_stop_at is None and w.raised is None]
    policy = state.policy
    teardown_at = (
        None if state.kill_at is None else _teardown_at(state, _told(state), state.kill_at - policy.stop_timeout_s)
    )
    if teardown_at is not None and at < teardown_at:  # the quick ones have ended meanwhile
        return replace(state, teardown_at=teardown_at), [WakeAt(at=teardown_at)]
    given_s = _shutdown_s(state) if quick else policy.teardown_timeout_s
    due = quick or list(not_told(state))
    return stop_ending(state, at, f"The {given_s:g} s for an end of its own are over.", due)


def stop_ending(state: JobState, at: float, why: str, due: Sequence[int]) -> tuple[JobState, list[Command]]:
    """Ends those of ``due``, who were left to end by themselves when all others were told to stop."""
    ending, kill_at = tuple(due), state.kill_at
    if not ending or kill_at is None:
        return state, []
    state = state.told_to_stop(ending, at)
    state = replace(state, teardown_at=_teardown_at(state, _told(state), kill_at - state.policy.stop_timeout_s))
    reason = f"{why} SIGTERM to {named(ending).lower()} in teardown."
    commands: list[Command] = [StopWorkers(local_ranks=ending, reason=reason)]
    return state, commands if state.teardown_at is None else [*commands, WakeAt(at=state.teardown_at)]


def not_told(state: JobState) -> tuple[int, ...]:
    """Return who still runs and was not told to stop."""
    return tuple(w.local_rank for w in state.running if w.told_to_stop_at is None)


def _told(state: JobState) -> tuple[int, ...]:
    return tuple(w.local_rank for w in state.running if w.told_to_stop_at is not None)
