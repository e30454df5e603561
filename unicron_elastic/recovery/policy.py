"""When a job is restarted and when it is not: the accounting of restarts, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.faults import Failure, RootCause, Severity, signature

__all__ = ["Policy", "Repeats", "Verdict", "count_repeats", "judge"]

DO_NOT_RESTART_EXIT_CODE = 93  # nvidia-resiliency-ext's convention for "do not requeue"
# Signals a program raises by its own fault. SIGKILL and SIGTERM come from outside and prove no bug in the script.
_OWN_FAULT_EXIT_CODES = frozenset({-4, -6, -7, -8, -11})  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user asked for."""

    max_restarts: int = 0
    stop_timeout_s: float = 30.0  # SIGTERM -> SIGKILL, torchrun's --shutdown-timeout
    teardown_timeout_s: float = 5.0  # how long a worker that raised may take to end by itself
    same_failure_limit: int = 3  # 0: never stop early
    reset_after_steps: int = 0  # 0: the count of restarts is never reset
    no_restart_exit_codes: frozenset[int] = frozenset({DO_NOT_RESTART_EXIT_CODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same failure at the same step, how many times in a row."""

    signature: str
    step: int | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to restart, with the job's count after it, and why."""

    restart: bool
    restarts_used: int
    reason: str


def count_repeats(previous: Repeats | None, cause: RootCause) -> Repeats | None:
    """How often this failure has come at this step in a row; None for one that proves no bug in the script."""
    failure = cause.fault.failure
    if cause.fault.severity is not Severity.SEV2 or not _is_own_fault(failure):
        return None
    name = signature(failure)
    if previous is not None and (previous.signature, previous.step) == (name, failure.step):
        return Repeats(signature=name, step=failure.step, count=previous.count + 1)
    return Repeats(signature=name, step=failure.step, count=1)


def judge(policy: Policy, restarts_used: int, repeats: Repeats | None, failures: tuple[Failure, ...]) -> Verdict:
    """Decides between a restart and the end of the job after ``failures``, of which one is the root cause.

    Exit codes that mean "do not restart" come first, then the user's ``--max-restarts``, then a failure that
    repeats without progress.
    """
    if policy.reset_after_steps and max((f.step or 0 for f in failures), default=0) >= policy.reset_after_steps:
        restarts_used = 0
    final = next((f for f in failures if f.exit_code in policy.no_restart_exit_codes), None)
    if final is not None:
        return Verdict(
            restart=False,
            restarts_used=restarts_used,
            reason=f"No restart: rank {final.rank} exited with code {final.exit_code}, which means do not restart.",
        )
    if restarts_used >= policy.max_restarts:
        used = f"all {policy.max_restarts} restarts are used" if policy.max_restarts else "--max-restarts is 0"
        return Verdict(restart=False, restarts_used=restarts_used, reason=f"No restart: {used}.")
    if repeats is not None and policy.same_failure_limit and repeats.count >= policy.same_failure_limit:
        where = "before the first step" if not repeats.step else f"after {repeats.step} steps"
        return Verdict(
            restart=False,
            restarts_used=restarts_used,
            reason=f"No restart: the same failure came {repeats.count} times in a row {where}, without progress.",
        )
    return Verdict(
        restart=True,
        restarts_used=restarts_used + 1,
        reason=f"Restart {restarts_used + 1} of {policy.max_restarts}.",
    )


def _is_own_fault(failure: Failure) -> bool:
    if failure.exception_type is not None:
        return True
    code = failure.exit_code
    return code is not None and (code > 0 or code in _OWN_FAULT_EXIT_CODES)
