"""The ladder of severities (the Unicron paper, "error handling"): what did not help is not tried for ever.

A SEV3 fault is retried, and after too many retries answered as SEV2; a SEV2 fault restarts its process, and after too
many restarts is answered as SEV1: the node is isolated. What is counted is this node's root causes within a window of
time: a worker that fails once a day is no reason to distrust its node.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from unicron_elastic.faults import Fault, Severity, Status
from unicron_elastic.recovery.policy import Policy

# Of these the script is suspected, not the node: on any other node the same would happen. What the list leaves out may
# be a script's fault too (an illegal memory access often is); who repeats it at the same step fails before, see judge.
_SCRIPTS_OWN = frozenset(
    {
        Status.OTHER_SOFTWARE_ERROR,
        Status.EXITED_ABNORMALLY,
        Status.OUT_OF_GPU_MEMORY,
        Status.OUT_OF_HOST_MEMORY,
        Status.STOPPED_BY_REQUEST,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One fault whose root cause was a worker of this node, and the severity at which it was answered."""

    at: float
    local_rank: int
    severity: Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The severity at which a fault is to be answered; ``reason`` says why it is worse than the fault's own, or ""."""

    severity: Severity
    reason: str = ""


def climb(attempts: tuple[Attempt, ...], fault: Fault, at: float, policy: Policy) -> tuple[tuple[Attempt, ...], Rung]:
    """The attempts within the window, this one with them, and the rung on which the last of them stands."""
    recent = tuple(each for each in attempts if at - each.at <= policy.attempts_window_s)
    rung = Rung(severity=fault.severity)
    if not _speaks_against_node(fault):
        return recent, rung
    local_rank = fault.failure.local_rank
    if rung.severity is Severity.SEV3:
        before = (each for each in recent if each.local_rank == local_rank and each.severity is Severity.SEV3)
        rung = _after_retries(len(list(before)), policy)
    attempt = Attempt(at=at, local_rank=local_rank, severity=rung.severity)
    recent = (*recent, attempt)
    if rung.severity is Severity.SEV2 and policy.isolate_after:
        rung = _after_restarts(recent, local_rank, policy) or rung
    return recent, rung


def _speaks_against_node(fault: Fault) -> bool:
    # torch's watchdog aborts healthy processes all over the job when one of them did not come to a collective.
    was_aborted = fault.status is Status.KILLED_BY_SIGNAL and fault.failure.exit_code == -signal.SIGABRT
    return fault.blames_worker and not (fault.status in _SCRIPTS_OWN or fault.is_consequence or was_aborted)


def _after_retries(before: int, policy: Policy) -> Rung:
    if before < policy.retries:
        return Rung(severity=Severity.SEV3)
    times = "once" if policy.retries == 1 else f"{policy.retries} times"
    return Rung(severity=Severity.SEV2, reason=f"It was tried again {times} within {_window(policy)}.")


def _after_restarts(recent: tuple[Attempt, ...], local_rank: int, policy: Policy) -> Rung | None:
    """The failures of one worker weigh twice as much as those of different ones."""
    all_failures = [each for each in recent if each.severity is Severity.SEV2]
    of_worker = sum(each.local_rank == local_rank for each in all_failures)
    if of_worker >= policy.isolate_after:
        who, count = f"Worker {local_rank} has failed", of_worker
    elif len(all_failures) >= 2 * policy.isolate_after:
        who, count = "The workers of this node have failed", len(all_failures)
    else:
        return None
    times = "once" if count == 1 else f"{count} times"
    return Rung(severity=Severity.SEV1, reason=f"{who} {times} within {_window(policy)}.")


def _window(policy: Policy) -> str:
    return f"{policy.attempts_window_s / 60:g} min"
