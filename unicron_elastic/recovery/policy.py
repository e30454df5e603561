"""When a job is restarted and when it is not: the accounting of restarts, as pure functions.

The ladder of severities (the Unicron paper, "error handling"): what did not help is not tried for ever.

A SEV3 fault is retried, and after too many retries answered as SEV2; a SEV2 fault restarts its process, and after
too many restarts is answered as SEV1: the node is isolated. What is counted is this node's root causes within a
window of time: a worker that fails once a day is no reason to distrust its node.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unicron_elastic.base.text import chained_exceptions
from unicron_elastic.faults import Failure, Fault, RootCause, Severity, Status, signature
from unicron_elastic.planning.model.configurations import Configuration

DO_NOT_RESTART_EXIT_CODE = 93  # nvidia-resiliency-ext's convention for "do not requeue"
EARLY_LIMIT = 2  # of the same exception before the first step: what is no chance comes again at once
# What Python finds in a script by itself, and finds again each time. No other ImportError: a node may lack a library.
_CERTAIN = frozenset({"SyntaxError", "IndentationError", "TabError", "NameError", "ModuleNotFoundError"})
_REFUSED = "unicron_elastic.WrongUseError"  # what our own run refuses, whichever micro-batch or rank it strikes
# What Python raises of the same code and the same values each time. By name: a subclass, as of a library that reads
# half a reply, may tell of something outside of the script, and so may all that is not named here: RuntimeError is said
# of shapes and of connections.
_OWN_MISTAKES = _CERTAIN | frozenset(
    {
        *("UnboundLocalError", "ImportError", "AttributeError", "TypeError", "ValueError", "AssertionError"),
        *("LookupError", "IndexError", "KeyError", "ArithmeticError", "ZeroDivisionError", "OverflowError"),
        *("NotImplementedError", "RecursionError"),
        _REFUSED,
    }
)
# Signals a program raises by its own fault. SIGKILL and SIGTERM come from outside and prove no bug in the script.
_OWN_FAULT_EXIT_CODES = frozenset({-4, -6, -7, -8, -11})  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user asked for."""

    max_restarts: int = 0
    stop_timeout_s: float = 30.0  # SIGTERM -> SIGKILL, torchrun's --shutdown-timeout
    teardown_timeout_s: float = 5.0  # how long a worker that raised may take to end by itself
    ending_timeout_s: float = 1.0  # how long one whose interpreter shuts down
    same_failure_limit: int = 3  # 0: never stop early
    reset_after_steps: int = 0  # 0: the count of restarts is never reset
    no_restart_exit_codes: frozenset[int] = frozenset({DO_NOT_RESTART_EXIT_CODE})
    acts_on_hangs: bool = True  # False: they are told and recorded, and nothing is done
    hang_patience_s: float = 30.0  # how long a deadlock must last; ten times as long what may be a wait for data
    hang_tell_s: float = 5.0  # how long a hang lasts of which people hear, if it may end by itself
    idle_tell_s: float = 60.0  # the same, if nobody waits for who hangs
    evidence_timeout_s: float = 3.0  # how long the evidence on a hang is waited for
    isolates: bool = True  # False: a sick node is told and recorded, and stays
    retries: int = 3  # of SEV3 faults of one worker within the window, before they are answered as SEV2
    isolate_after: int = 3  # SEV2 faults of one worker within the window, twice as many of all; 0: never
    attempts_window_s: float = 3600.0
    configurations: Mapping[int, Configuration] = field(default_factory=dict)  # of the job, by number of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same failure at the same step, how many times in a row without progress."""

    signature: str
    step: int | None  # None: unknown
    count: int
    was_saved: bool = False  # the last of these generations wrote a checkpoint
    longest_s: float = 0.0  # that any of them has lived
    certain: str = ""  # the kind of exception, if it comes again each time
    is_early: bool = False  # it came before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of how far a generation came, beside its steps, which are counted from where it began."""

    lived_s: float = 0.0
    has_saved: bool | None = None  # None: unknown, as a worker of another node may have
    has_restored: bool | None = None  # None: unknown, as without the in-band parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to restart, with the job's count after it, and why.

    ``isolate``: instead, this node leaves the job. ``severity`` is the rung of the ladder on which that was decided,
    None where nothing but the count decided.
    """

    restart: bool
    restarts_used: int
    reason: str
    isolate: bool = False
    severity: Severity | None = None

    @property
    def action(self) -> str:
        """Name the action as incidents do."""
        return "isolate" if self.isolate else ("restart" if self.restart else "fail")


UNKNOWN_S = 60.0  # a script whose steps are unknown, and that lived so long, may have come anywhere
LONGER = 1.5  # so many times as long as any before it has one lived that came further


def count_repeats(previous: Repeats | None, cause: RootCause, life: Life | None = None) -> Repeats | None:
    """How often this failure has come at this step in a row without progress; None if it cannot be said to repeat.

    It must prove a bug in the script: an exception of a kind that is the script's own mistake, and then the same one,
    at the same place, with the same text; of what our run refuses, numbers do not matter. What comes from outside, as
    connections and memory do, may be gone the next time, and an exit code alone does not tell two failures from one.
    Progress is the job's, not the process's: one that began from a checkpoint which the one before it wrote has come
    further after as many steps.
    """
    failure, life = cause.fault.failure, life or Life()
    if not may_be_the_scripts(cause.fault, life) or not _is_own_mistake(failure):
        return None
    first = Repeats(
        signature=signature(failure, is_exact=failure.exception_type != _REFUSED),
        step=failure.step,
        count=1,
        was_saved=life.has_saved is not False,
        longest_s=life.lived_s,
        certain=_certain(failure, life),
        is_early=_is_early(failure, life),
    )
    if previous is None or (previous.signature, previous.step) != (first.signature, first.step):
        return first
    if _came_further(previous, failure.step, life):
        return first
    return replace(first, count=previous.count + 1, longest_s=max(previous.longest_s, life.lived_s))


def may_be_the_scripts(fault: Fault, life: Life) -> bool:
    """Whether the script may have caused it, and enough is known to tell it from another failure."""
    failure = fault.failure
    if fault.severity is not Severity.SEV2 or not _is_own_fault(failure):
        return False
    if not failure.step and failure.exception_type is None:
        return False
    return failure.step is not None or (life.has_restored is not None and life.lived_s < UNKNOWN_S)


def _is_own_mistake(failure: Failure) -> bool:
    """Whether the exception, and each that it was raised in answer to, is of a kind that the script makes itself."""
    chain = [kind for kind, _ in chained_exceptions(failure.stack or "")]
    return failure.exception_type in _OWN_MISTAKES and _OWN_MISTAKES.issuperset(chain)


def _certain(failure: Failure, life: Life) -> str:
    """Return the kind of an exception that a script raises each time it starts; "" if it need not."""
    kind = failure.exception_type
    is_misspelt = kind == "ImportError" and (failure.message or "").startswith("cannot import name ")
    return kind if kind and (kind in _CERTAIN or is_misspelt) and _is_early(failure, life) else ""


def _is_early(failure: Failure, life: Life) -> bool:
    return failure.exception_type is not None and not failure.step and life.lived_s < UNKNOWN_S


def _came_further(previous: Repeats, step: int | None, life: Life) -> bool:
    """Whether a generation that ended as the one before it has come further all the same."""
    if previous.was_saved and life.has_restored and step != 0:
        return True
    return step is None and life.lived_s > LONGER * previous.longest_s + 1.0


def restarts_after_progress(policy: Policy, restarts_used: int, steps: Iterable[int | None]) -> int:
    """The restarts that still count after a generation whose workers did ``steps``.

    All nodes ask this of all their workers, failed or not: the job's count is the greatest that any of them knows, so
    it is forgotten only if every node forgets it.
    """
    done = max((step or 0 for step in steps), default=0)
    return 0 if policy.reset_after_steps and done >= policy.reset_after_steps else restarts_used


def why_none_left(policy: Policy, restarts_used: int) -> str | None:
    """Why there is no restart left, as a sentence; None if there is one."""
    if restarts_used < policy.max_restarts:
        return None
    if policy.max_restarts == 0:
        return "No restart: --max-restarts is 0."
    which = "the only restart is" if policy.max_restarts == 1 else f"all {policy.max_restarts} restarts are"
    return f"No restart: {which} used."


def judge(policy: Policy, restarts_used: int, repeats: Repeats | None, failures: tuple[Failure, ...]) -> Verdict:
    """Decides between a restart and the end of the job after ``failures``, of which one is the root cause.

    Exit codes that mean "do not restart" come first, then the user's ``--max-restarts``, then a failure that
    repeats without progress.
    """
    why_not = why_final(policy, failures) or why_none_left(policy, restarts_used) or _why_hopeless(policy, repeats)
    if why_not is not None:
        return Verdict(restart=False, restarts_used=restarts_used, reason=why_not)
    return restart(policy, restarts_used)


def restart(policy: Policy, restarts_used: int) -> Verdict:
    """One more restart, of which there must be one left."""
    return Verdict(
        restart=True,
        restarts_used=restarts_used + 1,
        reason=f"Restart {restarts_used + 1} of {policy.max_restarts}.",
    )


def why_final(policy: Policy, failures: tuple[Failure, ...]) -> str | None:
    """Why the job is to end, as a sentence, if an exit code says so; else None."""
    final = next((f for f in failures if f.exit_code in policy.no_restart_exit_codes), None)
    if final is None:
        return None
    return (
        f"No restart: rank {final.rank} exited with code {final.exit_code}, by which a script asks not to be restarted."
    )


def _why_hopeless(policy: Policy, repeats: Repeats | None) -> str | None:
    if repeats is None or not policy.same_failure_limit:
        return None
    if repeats.certain:
        return f"No restart: {repeats.certain} before the first step comes again each time."
    limit = min(policy.same_failure_limit, EARLY_LIMIT) if repeats.is_early else policy.same_failure_limit
    if repeats.count < limit:
        return None
    where = {None: "", 0: " before the first step", 1: " after 1 step"}.get(
        repeats.step, f" after {repeats.step} steps"
    )
    times = {1: "once", 2: "twice in a row"}.get(repeats.count, f"{repeats.count} times in a row")
    return f"No restart: the same failure came {times}{where}, without progress."


def _is_own_fault(failure: Failure) -> bool:
    if failure.exception_type is not None:
        return True
    code = failure.exit_code
    return code is not None and (code > 0 or code in _OWN_FAULT_EXIT_CODES)


ODD_REPLICA = "OddReplicaError"  # the exception of a rank whose state is not that of most
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
    if fault.is_consequence or was_aborted or not fault.blames_worker:
        return False
    return fault.status not in _SCRIPTS_OWN or _is_odd(fault.failure)


def _is_odd(failure: Failure) -> bool:
    """Whether all others, who run the same script, have come to another state: that is what this node has to itself."""
    return (failure.exception_type or "").rpartition(".")[2] == ODD_REPLICA


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
