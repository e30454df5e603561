"""What the planner earns with six jobs on 128 GPUs, beside equal shares, shares by weight and shares by model size.

    python benchmarks/multi_task.py

Prints Markdown; takes seconds and no GPU. Rates come from the throughput model without any measurement, so these are
figures of a model. ``_multi_task_cases`` says what is taken from where, ``_multi_task_shares`` how shares are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from _multi_task_cases import CASES, NODE_GPUS, Job, Variant, cluster_of, jobs_of, placed
from _multi_task_shares import SHARES, Counts, ours, ours_all_run, useful, waf

from unicron_elastic.planning.allocate.cluster import NodesJoined, NodesLost
from unicron_elastic.planning.allocate.plan import Plan
from unicron_elastic.planning.allocate.plan_table import applied, plan_for

MAIN = Variant()
VARIANTS = {
    "as above": MAIN,
    "whole nodes": Variant(unit_gpus=NODE_GPUS),
    "uneven shares of the batch": Variant(uneven=True),
    "a GPU is as fast in every job": Variant(is_linear=True),
    "all weights 1": Variant(is_weighted=False),
}
PETA = 1e15


class Divided(NamedTuple):
    """The divisions of one case, by name of the policy: "ours", "all run", and the shares."""

    jobs: list[Job]
    counts: dict[str, Counts]

    def waf(self, policy: str) -> float:
        """In weighted FLOP/s."""
        return waf(self.jobs, self.counts[policy])

    def ratio(self, policy: str, of: str = "ours") -> str:
        """How many times as much ``of`` earns."""
        other = self.waf(policy)
        return f"{self.waf(of) / other:.2f}" if other else "all wait"


class Fault(NamedTuple):
    """A node of the largest job is lost, and comes back."""

    victim: str
    lost: Plan
    back: Plan
    waf_alone_flops: float  # if nothing but the victim changes


def divided(case: str, variant: Variant, *, hands_out_rest: bool = True) -> Divided:
    """All policies in one case."""
    jobs = jobs_of(case, variant)
    shares = {name: share(jobs, hands_out_rest=hands_out_rest) for name, share in SHARES.items()}
    return Divided(jobs, {"ours": ours(jobs), "all run": ours_all_run(jobs), **shares})


def faulted(case: str, variant: Variant = MAIN) -> Fault:
    """What the planner does when the task with most GPUs loses a node of 8, and when 8 GPUs join again."""
    jobs = jobs_of(case, variant)
    before = placed(cluster_of(jobs), ours(jobs))
    victim = max(before.tasks, key=lambda task: task.nodes)
    event = NodesLost((victim.name,) * NODE_GPUS)
    lost = plan_for(before, event)
    after = applied(before, event, lost)
    alone = {task.name: task.nodes for task in before.tasks}
    alone[victim.name] = useful(victim, victim.nodes - NODE_GPUS)[-1]
    return Fault(victim.name, lost, plan_for(after, NodesJoined(NODE_GPUS)), waf(jobs, alone))


def lines() -> Iterator[str]:
    """All tables."""
    yield from _earned()
    yield ""
    yield from _counts()
    yield ""
    yield from _ablations()
    yield ""
    yield from _faults()


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield f"|{'---|' * len(cells)}"


def _earned() -> Iterator[str]:
    yield from _head("WAF, PFLOP/s", "ours", "ours, all run", *SHARES, *(f"ours / {name}" for name in SHARES))
    for case in CASES:
        found = divided(case, MAIN)
        wafs = [f"{found.waf(policy) / PETA:.2f}" for policy in found.counts]
        yield _row(case, *wafs, *map(found.ratio, SHARES))


def _counts() -> Iterator[str]:
    yield from _head("GPUs of jobs 1 to 6", "ours", "ours, all run", *SHARES)
    for case in CASES:
        found = divided(case, MAIN)
        yield _row(case, *(", ".join(map(str, counts.values())) for counts in found.counts.values()))


def _ablations() -> Iterator[str]:
    yield from _head("ours / equal, / weighted, / by size", *(f"case {case[0]}" for case in CASES))
    for name, variant in VARIANTS.items():
        yield _row(name, *(_ratios(divided(case, variant)) for case in CASES))
    idle = partial(divided, variant=MAIN, hands_out_rest=False)
    yield _row("shares leave the rest idle", *(_ratios(idle(case)) for case in CASES))
    yield _row("ours, with all jobs running", *(_ratios(divided(case, MAIN), "all run") for case in CASES))
    yield from _grain()


def _ratios(found: Divided, of: str = "ours") -> str:
    return " / ".join(found.ratio(name, of) for name in SHARES)


def _grain() -> Iterator[str]:
    """Our own WAF in whole nodes against that in GPUs."""
    cells = []
    for case in CASES:
        fine, coarse = divided(case, MAIN), divided(case, VARIANTS["whole nodes"])
        cells.append(f"{coarse.waf('ours') / fine.waf('ours'):.3f}")
    yield _row("*ours in whole nodes / ours in GPUs*", *cells)


def _faults() -> Iterator[str]:
    yield from _head(
        "a node is lost, and comes back",
        "WAF before",
        "with it lost",
        "if only that job shrinks",
        "penalty, s of WAF",
        "back",
        "penalty, s of WAF",
    )
    for case in CASES:
        found = faulted(case)
        before = found.lost.waf_before_flops
        yield _row(
            case,
            f"{before / PETA:.2f}",
            f"{found.lost.waf_after_flops / PETA:.2f}",
            f"{found.waf_alone_flops / PETA:.2f}",
            f"{found.lost.lost_flop / before:.0f}",
            f"{found.back.waf_after_flops / PETA:.2f}",
            f"{found.back.lost_flop / before:.0f}",
        )
    yield ""
    for case in CASES:
        found = faulted(case)
        yield f"- Case {case[0]}: {found.lost.reason} Then: {found.back.reason}"


def main() -> None:
    """Prints all tables."""
    for line in lines():
        print(line)


if __name__ == "__main__":
    main()
