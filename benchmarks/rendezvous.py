"""How fast nodes meet, over etcd and over torchrun's c10d, and what that costs when one of them comes or goes.

    python benchmarks/rendezvous.py                                # everything; about fifteen minutes
    python benchmarks/rendezvous.py --quick                        # each once or twice, small numbers
    python benchmarks/rendezvous.py --only forming idle --json result.json

The first scenario has no agents: it is the decisions alone. The next three have agents without workers: nothing but
torch's rendezvous handlers, both back ends in the same processes. The others are jobs of three agents with a worker
each, under unicron-run and under torchrun, which has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts
fail on gloo, and, but for one launch of each scenario, last_call_timeout=1,keep_alive_interval=1 in --rdzv-conf. Runs
alternate between the two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from _exit_when_told import exit_when_told
from _launchers import TORCHRUN, UNICRON, Launcher
from _rendezvous_decisions import deciding
from _rendezvous_groups import C10D, OURS, AgentPool, again, forming, idle
from _rendezvous_hosts import power_off, why_no_power_off
from _rendezvous_jobs import NAMES, Job, Meeting, join, loss
from _rendezvous_report import failures, progress, table, write_json
from _report import describe_machine
from _scenarios import Run

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

T = TypeVar("T")

SCENARIOS = ("deciding", "forming", "idle", "again", "join", "agent-killed", "power-off")
BY_DEFAULT = Launcher("torchrun-default", TORCHRUN.program, TORCHRUN.environment)  # with its own time limits
FORM_S = 60.0
JOB_S = 60.0
BY_DEFAULT_JOB_S = 150.0  # it waits for 30 s, twice
IDLE_WINDOW_S = 20.0


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    args = parse_arguments()
    # Without this, a termination would skip the clean-up of what is in progress.
    exit_when_told()
    machine = describe_machine()
    print(machine, file=sys.stderr)
    runs = []
    for run in measure(args):
        runs.append(run)
        print(progress(run), file=sys.stderr, flush=True)
        if args.json:
            write_json(args.json, runs, vars(args), machine)  # after every run: an aborted benchmark leaves its data
    sys.stderr.flush()
    print(table(runs))
    if any(run.problem for run in runs):
        print(f"\n{failures(runs)}")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """All scenarios that are wanted, one after the other."""
    if "deciding" in args.only:
        yield from (deciding(nodes, k) for nodes in args.deciding_nodes for k in range(args.n))
    if "forming" in args.only:
        yield from measure_forming(args)
    if "idle" in args.only:
        yield from in_pool([partial(idle, nodes=n, repetition=0, window_s=IDLE_WINDOW_S) for n in args.idle_nodes])
    if "again" in args.only:
        pairs = _alternating((OURS, C10D), args.n)
        yield from in_pool([partial(again, backend=b, nodes=args.again_nodes, repetition=k) for b, k in pairs])
    for scenario in ("join", "agent-killed"):
        if scenario in args.only:
            yield from measure_jobs(scenario, args)
    if "power-off" in args.only:
        yield from measure_power_off(args)


def measure_forming(args: argparse.Namespace) -> Iterator[Run]:
    """Both back ends up to ``args.nodes``, then ours alone as far as it goes."""
    for nodes in args.nodes:
        pairs = _alternating((OURS, C10D), args.n)
        yield from in_pool([partial(forming, backend=b, nodes=nodes, repetition=k, timeout_s=FORM_S) for b, k in pairs])
    for nodes in args.large_nodes:
        runs = list(in_pool([partial(forming, backend=OURS, nodes=nodes, repetition=0, timeout_s=FORM_S)]))
        yield from runs
        if any(run.problem for run in runs):
            return


def measure_jobs(scenario: str, args: argparse.Namespace) -> Iterator[Run]:
    """A node comes, or is killed: first one on which nothing depends, then the coordinator, or host of c10d's store.

    torchrun's job does not survive the latter, so it is shown that once.
    """
    pairs = [*_alternating((UNICRON, TORCHRUN), args.n), (BY_DEFAULT, 0)]
    with EmbeddedEtcd() as etcd:
        if scenario == "join":
            for launcher, repetition in pairs:
                yield _job(scenario, launcher, repetition, etcd, join)
            return
        for launcher, repetition in pairs:
            yield _job(scenario, launcher, repetition, etcd, partial(loss, of_coordinator=False))
        for launcher, repetition in [*((UNICRON, k) for k in range(args.n)), (TORCHRUN, 0)]:
            yield _job("coordinator killed", launcher, repetition, etcd, partial(loss, of_coordinator=True))


def measure_power_off(args: argparse.Namespace) -> Iterator[Run]:
    """torchrun takes part once: nobody tells its workers that a peer is silent."""
    if why_not := why_no_power_off():
        print(f"power-off is left out: {why_not}.", file=sys.stderr)
        return
    for repetition in range(args.n):
        for of_coordinator in (False, True):
            yield power_off(UNICRON, repetition, JOB_S, of_coordinator=of_coordinator)
    yield power_off(TORCHRUN, 0, JOB_S, of_coordinator=False)


def in_pool(todo: Sequence[Callable[[AgentPool], Run]]) -> Iterator[Run]:
    """Does everything in one pool of agents; after a failure, in a new one."""
    left = list(todo)
    while left:
        with AgentPool() as pool:
            while left:
                run = left.pop(0)(pool)
                yield run
                if run.problem:
                    break


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare rendezvous over etcd and over torchrun's c10d.")
    parser.add_argument("-n", type=int, default=5, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="(default: all)")
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64], help="(default: %(default)s)")
    parser.add_argument(
        "--large-nodes", type=int, nargs="*", default=[128, 256, 512], help="unicron alone (default: %(default)s)"
    )
    parser.add_argument(
        "--deciding-nodes", type=int, nargs="*", default=[64, 1000, 4000, 12500], help="(default: %(default)s)"
    )
    parser.add_argument("--idle-nodes", type=int, nargs="*", default=[4, 16, 64], help="(default: %(default)s)")
    parser.add_argument("--again-nodes", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    parser.add_argument("--quick", action="store_true", help="1 run of each kind, 2 and 16 nodes")
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(n=1, nodes=[2, 16], large_nodes=[], idle_nodes=[16], deciding_nodes=[64, 1000])
        args = parser.parse_args(arguments)  # so that what was given along with --quick still counts
    numbers = [2, args.again_nodes, *args.nodes, *args.large_nodes, *args.idle_nodes, *args.deciding_nodes]
    if args.n < 1 or min(numbers) < 2:
        parser.error("-n must be at least 1, and every number of nodes at least 2")
    for launcher in (UNICRON, TORCHRUN):
        if not launcher.path.exists():
            parser.error(f"{launcher.path} does not exist")
    return args


def _job(scenario: str, launcher: Launcher, repetition: int, etcd: EmbeddedEtcd, do: Callable[[Job, Run], None]) -> Run:
    run = Run(scenario, launcher.name, len(NAMES), repetition)
    is_tuned = launcher is not BY_DEFAULT
    meeting = Meeting(etcd.endpoint, "127.0.0.1", is_tuned=is_tuned)
    with Job(launcher, meeting, "2:3", JOB_S if is_tuned else BY_DEFAULT_JOB_S) as job:
        do(job, run)
    return run


def _alternating(both: tuple[T, T], times: int) -> list[tuple[T, int]]:
    """Each of them so many times, with the number of the repetition, in turn the one and the other first."""
    return [(each, k) for k in range(times) for each in (both if k % 2 == 0 else both[::-1])]


if __name__ == "__main__":
    main()
