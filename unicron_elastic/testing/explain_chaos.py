"""A plan in plain words, for ``unicron chaos check`` and for what a struck worker says. Pure."""

from __future__ import annotations

from math import inf

from unicron_elastic.testing.chaos_plan import PHASED, ChaosFault, ChaosKind, ChaosPhase, ChaosPlan, How, RandomFaults

NEEDS_TEST_LIBRARY = "needs the test library that stands in for NVML"

_MOMENTS = {
    ChaosPhase.FORWARD: "as the model's forward call begins",
    ChaosPhase.BACKWARD: "as the backward pass begins",
    ChaosPhase.BEFORE_REDUCE: "before the reduction of gradients begins",
    ChaosPhase.DURING_REDUCE: "while gradients are being reduced",
    ChaosPhase.AFTER_REDUCE: "when the reduction of gradients is done",
    ChaosPhase.OPTIMIZER: "before the optimizer changes the weights",
}
_TIMES = {
    ChaosPhase.FORWARD: "forward call",
    ChaosPhase.BACKWARD: "backward pass",
    ChaosPhase.BEFORE_REDUCE: "reduction",
    ChaosPhase.DURING_REDUCE: "reduction",
    ChaosPhase.AFTER_REDUCE: "reduction",
    ChaosPhase.OPTIMIZER: "optimizer",
}


def explain(plan: ChaosPlan) -> list[str]:
    """One sentence for each part of the plan, in its order."""
    return [*map(_explain_fault, plan.faults), *map(_explain_random, plan.random)]


def deed(fault: ChaosFault) -> str:
    """What the worker does, as the rest of a sentence that begins with it."""
    for_how_long = "for ever" if fault.seconds == inf else f"for {fault.seconds:g} s"
    limit = "without a limit" if fault.limit_mb == inf else f"up to {fault.limit_mb:g} MB"
    added = "burning CPU" if fault.how is How.CPU else "sleeping"
    lasting = "from then on" if fault.steps is None else f"for {_count(fault.steps, 'step')}"
    return {
        ChaosKind.KILL: "kills itself (SIGKILL)",
        ChaosKind.SEGV: "reads from address 0 (SIGSEGV)",
        ChaosKind.ABORT: "aborts (SIGABRT)",
        ChaosKind.EXIT: f"exits with code {fault.code}",
        ChaosKind.EXCEPTION: f"raises RuntimeError({fault.text!r})",
        ChaosKind.HANG: "stops as a whole (SIGSTOP)",
        ChaosKind.HANG_GIL: f"sleeps {for_how_long} holding Python's lock, so that none of its threads can run",
        ChaosKind.SLEEP: f"sleeps {for_how_long} in its main thread",
        ChaosKind.SKIP: "leaves out its next reduction",
        ChaosKind.SLOW: f"takes {fault.factor:g} times as long for each step, {added}, {lasting}",
        ChaosKind.LEAK: f"keeps {fault.mb_per_step:g} MB more of host memory after each step, {limit}",
        ChaosKind.DISK: f"fills {fault.folder} with a file that goes when the worker goes, {limit}",
        ChaosKind.XID: f"sees XID {fault.xid} from its GPU ({NEEDS_TEST_LIBRARY})",
        ChaosKind.ECC: f"sees an uncorrectable memory error from its GPU ({NEEDS_TEST_LIBRARY})",
    }[fault.kind]


def _explain_fault(fault: ChaosFault) -> str:
    who = "Every rank" if fault.rank is None else f"Rank {fault.rank}"
    return f"{who} {deed(fault)} {_when(fault)}, {_generation(fault.restart)}."


def _when(fault: ChaosFault) -> str:
    if fault.after is not None:
        return f"{fault.after:g} s after it started"
    if fault.kind in (ChaosKind.SLOW, ChaosKind.LEAK):
        return f"(beginning with step {fault.step})"
    if fault.kind not in PHASED:
        return f"in step {fault.step}"
    which = "" if fault.nth == 1 else f" ({_TIMES[fault.phase]} number {fault.nth} of that step)"
    return f"in step {fault.step}, {_MOMENTS[fault.phase]}{which}"


def _generation(restart: int | None) -> str:
    if restart is None:
        return "after each restart anew"
    return "in the first generation only" if restart == 0 else f"only after restart {restart}"


def _explain_random(random: RandomFaults) -> str:
    kinds = " or ".join(kind.value for kind in dict.fromkeys(random.kinds))
    generation = "" if random.restart is None else f", {_generation(random.restart)}"
    return (
        f"A random rank does {kinds} at random moments, every {random.mtbf:g} s on average "
        f"(seed {random.seed}){generation}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
