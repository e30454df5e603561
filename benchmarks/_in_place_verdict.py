"""Whether a case of the matrix of tier 2 went as it has to, and its numbers: pure, from logs and ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from _in_place_cases import MICRO_BATCHES, STEPS, Case
from _in_place_logs import Agreement, ProcessLog

__all__ = ["Reference", "Verdict", "judge", "reference_of"]

MOST_APART = 1e-5  # in default mode, relative


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: the loss of each step, as bits, and the parameters at the end, as bytes."""

    losses: Mapping[int, str]
    log: ProcessLog


@dataclass
class Verdict:
    """``problems`` are sentences; none: passed. The times are ms since the first fault; None if it did not come."""

    problems: list[str] = field(default_factory=list)
    recomputed: int | None = None  # from the ledger
    survivors_step_ms: float | None = None
    newcomer_steps_ms: float | None = None
    loss_apart: float = 0.0  # largest relative difference from the undisturbed run
    parameters_apart: float = 0.0  # L2 norm of the difference, relative to the norm


def reference_of(logs: Sequence[ProcessLog], exit_codes: Sequence[int | None]) -> Reference:
    """From an undisturbed launch. Raises ValueError if it was not one."""
    if any(exit_codes) or None in exit_codes or any(log.end is None or len(log.losses) < STEPS for log in logs):
        raise ValueError(f"the undisturbed job did not end as it should: exit codes {exit_codes}")
    if len({(log.end, *log.losses.values()) for log in logs}) > 1:
        raise ValueError("the ranks of the undisturbed job do not agree on losses and parameters")
    return Reference(logs[0].losses, logs[0])


def judge(
    case: Case,
    logs: Sequence[ProcessLog],
    records: Sequence[dict[str, Any]],
    exit_codes: Sequence[int | None],
    reference: Reference,
) -> Verdict:
    """Of one launch."""
    verdict = Verdict()
    problems = verdict.problems
    if any(code != 0 for code in exit_codes):
        problems.append(f"the job ended with {', '.join(map(str, exit_codes))} and not with 0")
    problems += _processes(case, logs)
    verdict.loss_apart, verdict.parameters_apart = _apart(logs, reference)
    problems += _differences(case, logs, reference, verdict)
    problems += _work(case, logs)
    verdict.recomputed, more = _recomputed(case, logs, records)
    problems += more
    if struck := [at for log in logs for at, _ in log.struck]:
        first = min(struck)
        closed = [record["first_step_at"] for record in records if record.get("first_step_at") is not None]
        verdict.survivors_step_ms = closed[0] * 1e3 - first / 1e6 if closed else None
        newcomers = [min(log.stepped_ns.values()) for log in logs if log.life and log.stepped_ns]
        verdict.newcomer_steps_ms = (max(newcomers) - first) / 1e6 if newcomers else None
    return verdict


def _processes(case: Case, logs: Sequence[ProcessLog]) -> Iterator[str]:
    """Every strike was done, and no process but the struck ones was begun anew."""
    struck = sum(len(log.struck) for log in logs)
    if struck != len(case.strikes):
        yield f"{struck} of {len(case.strikes)} faults were done"
    for slot in range(case.ranks):
        processes = sum(log.slot == slot for log in logs)
        if processes > 1 + case.ends[slot]:
            yield f"place {slot} had {processes} processes, {case.ends[slot]} of which were struck"


def _apart(logs: Sequence[ProcessLog], reference: Reference) -> tuple[float, float]:
    """The largest relative differences of losses and of parameters, over all processes."""
    losses = [
        abs(float.fromhex(bits) - wanted) / max(abs(wanted), 1e-12)
        for log in logs
        for step, bits in log.losses.items()
        if (wanted := float.fromhex(reference.losses[step])) is not None
    ]
    wanted = reference.log.parameters
    norm = sqrt(sum(each * each for each in wanted))
    parameters = [
        sqrt(sum((one - other) ** 2 for one, other in zip(log.parameters, wanted, strict=True))) / norm
        for log in logs
        if log.end is not None and log.end != reference.log.end
    ]
    return max(losses, default=0.0), max(parameters, default=0.0)


def _differences(case: Case, logs: Sequence[ProcessLog], reference: Reference, verdict: Verdict) -> Iterator[str]:
    """From the undisturbed run: none at all in reproducible mode, and hardly any in default mode."""
    ended = [log for log in logs if log.end is not None]
    if not ended:
        yield "no process came to the end of the training"
        return
    made = {step for log in logs for step in log.losses}
    if missing := sorted(set(range(STEPS)) - made):
        yield f"nobody made step {missing[0]}"
    if len({log.end for log in ended}) > 1:
        yield "the parameters at the end are not the same on all ranks"
    if case.mode == "reproducible":
        wrong = [step for log in logs for step, bits in log.losses.items() if bits != reference.losses[step]]
        if wrong:
            yield f"the loss of step {min(wrong)} is not bitwise that of the undisturbed run"
        if any(log.end != reference.log.end for log in ended):
            yield "the parameters at the end are not bitwise those of the undisturbed run"
    elif max(verdict.loss_apart, verdict.parameters_apart) > MOST_APART:
        yield (
            f"losses are {verdict.loss_apart:.1e} from those of the undisturbed run, and the parameters at the end "
            f"{verdict.parameters_apart:.1e}"
        )


def _work(case: Case, logs: Sequence[ProcessLog]) -> Iterator[str]:
    """No process computed a micro-batch twice; every one was computed, and none twice without a loss."""
    for log in logs:
        twice = [each for each, count in Counter(log.micro_batches).items() if count > 1]
        if twice:
            yield f"place {log.slot} computed micro-batch {twice[0][1]} of step {twice[0][0]} twice"
    lives = [log for log in logs if not log.struck or case.kind == "sever"]
    again = Counter(each for log in lives for each in log.micro_batches)
    if repeated := [each for each, count in again.items() if count > 1]:
        yield f"micro-batch {repeated[0][1]} of step {repeated[0][0]} was computed by two processes that live"


def _recomputed(
    case: Case, logs: Sequence[ProcessLog], records: Sequence[dict[str, Any]]
) -> tuple[int | None, list[str]]:
    """What the ledger says, and what is wrong with that."""
    told = [record["micro_batches_recomputed"] for record in records]
    known = [each for each in told if each is not None]
    met = [each for log in logs for each in log.agreements if not _is_grown(each, case, logs)]
    begun = {
        (each.world, each.ordinal) for each in met if each.has_begun
    }  # else it is dealt, and nothing of it is lost
    given = {(each.world, each.ordinal): _lost(each) for each in met}
    lost = [each for key, each in sorted(given.items()) if each and key in begun]
    late = {each.world for each in met if len({said.state for said in each.said}) > 1}
    of_late = [each for (world, _), each in sorted(given.items()) if world in late]
    problems = []
    if case.kind == "exit-0":  # the end of a member that ends by itself is no incident
        return None, problems
    if not records:
        return None, ["the ledger has no incident"]
    # The second is lost in the same step: what was dealt to it is dealt once more, and is one micro-batch all the same.
    expected = len(frozenset().union(*lost)) if case.phase.startswith("second-in") else sum(map(len, lost))
    if known and sum(known) != expected:
        problems.append(f"the ledger says {sum(known)} micro-batches were recomputed, and it were {expected}")
    is_nobody_left = case.ranks == case.nodes  # on the node that keeps the ledger
    if not known and not (case.phase in ("last-step", "end") or is_nobody_left):
        problems.append("the ledger does not say how many micro-batches were recomputed")
    if case.kind == "sever" and lost:
        problems.append(f"nobody was lost, but {sorted(lost[0])} were dealt anew")
    if len(case.strikes) == len(case.lost):
        problems += _deal(case, lost, of_late, is_dealt=any(given.values()))
    return sum(known) if known else None, problems


def _deal(
    case: Case, lost: Sequence[frozenset[int]], of_late: Sequence[frozenset[int]], *, is_dealt: bool
) -> Iterator[str]:
    """After one fault: what is dealt anew is what the lost ranks had, if it was needed at all.

    ``of_late``: and what one had not begun that has made the step before late, with the sums of another. ``is_dealt``:
    something was, perhaps to ranks that had not begun the step when others were lost in it.
    """
    theirs = {
        index
        for slot in case.lost
        for index in range(slot * MICRO_BATCHES // case.ranks, (slot + 1) * MICRO_BATCHES // case.ranks)
    }
    for each in lost:
        if each != theirs and not (theirs < each and each in of_late):
            yield f"{sorted(each)} were dealt anew, and the lost ranks had {sorted(theirs)}"
    if case.must_recompute and not is_dealt:
        yield f"{sorted(theirs)} were not dealt anew, although nobody could have the reduced gradients"


def _is_grown(agreement: Agreement, case: Case, logs: Sequence[ProcessLog]) -> bool:
    """Whether somebody has joined: who begins a step with a newcomer is dealt micro-batches that nobody has had yet."""
    sizes = {each.world: len(each.said) for log in logs for each in log.agreements}
    before = max((world for world in sizes if world < agreement.world), default=None)
    return len(agreement.said) > (case.ranks if before is None else sizes[before])


def _lost(agreement: Agreement) -> frozenset[int]:
    """The micro-batches that nobody has any more and somebody needs."""
    said = agreement.said
    held = frozenset().union(*(each.held for each in said))
    if not held or len({each.state for each in said}) > 1:
        return frozenset()
    if _is_reduced(agreement):
        return frozenset()
    return frozenset(range(MICRO_BATCHES)) - held


def _is_reduced(agreement: Agreement) -> bool:
    """Whether every bucket of the job is complete on some member."""
    done = frozenset().union(*(each.done for each in agreement.said))
    return len(done) == agreement.buckets
