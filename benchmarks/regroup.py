"""Two jobs on four simulated hosts, regrouped by the plan, beside "each job keeps its nodes" and "equal shares".

    python benchmarks/regroup.py

Everything is real but the speed of the devices: etcd, agents, ``unicron-run`` workers that train (examples/two_jobs),
SIGKILL. All three policies are carried out by the same planner: the other two by limits on how many nodes a job may
have, set with ``unicron jobs set`` at each event as an operator would. One run of each policy goes through the same
events: a host is lost, it comes back, a job finishes, another is submitted. WAF (weighted achieved FLOP/s) is counted
from the steps that the training processes wrote down, over the same number of seconds. Prints Markdown; six minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from _exit_when_told import exit_when_told
from _report import describe_machine

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_jobs"
sys.path.insert(0, str(EXAMPLE))

from run import Cluster  # noqa: E402
from waf import Job, integral, made_at  # noqa: E402

from unicron_elastic.planning.coordinate.node_status import NodeState  # noqa: E402
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd  # noqa: E402

HOSTS = ("a", "b", "c", "d")
PHASE_S = 14.0
READY_S = 120.0
LONG = 10**6  # steps
CHAT_STEPS = 430  # about three phases on two nodes, if they last PHASE_S
BASE, CHAT, EVAL = "base", "chat", "eval"


@dataclass(frozen=True)
class Spec:
    """A job of the story: weight, bounds, micro-batches of a step."""

    name: str
    weight: float
    nodes: str
    micro_batches: int
    steps: int = LONG


JOBS = (Spec(BASE, 1.0, "1:4", 12), Spec(CHAT, 2.0, "1:2", 4, CHAT_STEPS))
LATER = Spec(EVAL, 3.0, "1:3", 6)


@dataclass
class Outcome:
    """What one policy made of the story."""

    policy: str
    waf: float = 0.0  # weighted FLOP/s over the whole story
    phases: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    counts: dict[str, str] = field(default_factory=dict)  # nodes of each job at the end of each phase


# How many nodes each job may have, by the jobs that run and the number of hosts. None: as its own spec says.
Limits = Callable[[list[str], int], dict[str, int] | None]


def ours(_running: list[str], _hosts: int) -> None:
    """The plan decides."""


def keeps(running: list[str], _hosts: int) -> dict[str, int]:
    """Each job has at most the nodes that it began with: half of the cluster."""
    return dict.fromkeys(running, len(HOSTS) // 2)


def equal(running: list[str], hosts: int) -> dict[str, int]:
    """As even as can be; what is over goes to who was submitted first."""
    share, over = divmod(hosts, len(running))
    return {job: share + (place < over) for place, job in enumerate(running)}


POLICIES: dict[str, Limits] = {"the plan": ours, "each job keeps its nodes": keeps, "equal shares": equal}


class Story:
    """One run of the events under one policy."""

    def __init__(self, cluster: Cluster, policy: str, phase_s: float) -> None:
        self.cluster, self.limits, self.phase_s = cluster, POLICIES[policy], phase_s
        self.outcome = Outcome(policy)
        self.jobs: dict[str, Job] = {}
        self.most: dict[str, int] = {}
        self.began_at = 0.0

    def tell(self) -> Outcome:
        """Go through it."""
        for host in HOSTS:
            self.cluster.start(host)
        for spec in JOBS:
            self.submit(replace(spec, steps=round(spec.steps * max(1.0, self.phase_s / PHASE_S))))
        self.limit()
        self.until(lambda: self.working() == len(HOSTS) and all(map(made_at, self.jobs.values())), "four hosts train")
        self.began_at = time.time()
        self.phase("four hosts")
        lost = self.cluster.working()[CHAT][-1]
        self.cluster.lose(lost)
        self.limit(len(HOSTS) - 1)
        self.phase("one is lost")
        self.cluster.start(lost)
        self.limit()
        self.phase("it is back")
        self.limit(running=[BASE])  # chat has had its steps, or will soon
        self.phase("chat finishes")
        self.submit(LATER)
        self.limit(running=[BASE, EVAL])
        self.phase("eval is submitted")
        self.phase("and trains")
        self.outcome.waf = integral(list(self.jobs.values()), self.began_at, time.time()) / (
            time.time() - self.began_at
        )
        self.outcome.steps = {name: len(made_at(job)) for name, job in self.jobs.items()}
        return self.outcome

    def submit(self, spec: Spec) -> None:
        """Submit a job."""
        self.jobs[spec.name] = self.cluster.submit(spec.name, spec.weight, spec.nodes, spec.micro_batches, spec.steps)
        self.most[spec.name] = int(spec.nodes.partition(":")[2])

    def limit(self, hosts: int = len(HOSTS), running: list[str] | None = None) -> None:
        """Have the policy's limits set, as an operator does."""
        found = self.limits([spec.name for spec in JOBS] if running is None else running, hosts)
        for job, nodes in (found or {}).items():
            # The first job is held at its number, or its nodes would go to who earns more with them.
            option = "--pin" if job == BASE else "--max-nodes"
            command = ["jobs", "set", job, option, str(max(1, min(nodes, self.most[job])))]
            subprocess.run(
                [str(Path(sys.executable).parent / "unicron"), *command],
                env=self.cluster.env,
                check=True,
                capture_output=True,
            )

    def phase(self, name: str) -> None:
        """Let it go on for a while, until the same moment under each policy."""
        begin = self.began_at + self.phase_s * len(self.outcome.phases)
        end = begin + self.phase_s
        time.sleep(max(0.0, end - time.time()))
        self.outcome.phases[name] = integral(list(self.jobs.values()), begin, end) / self.phase_s
        working = self.cluster.working()
        self.outcome.counts[name] = ", ".join(f"{job} {len(working.get(job, []))}" for job in self.jobs)
        print(f"{self.outcome.policy}: {name}: {self.outcome.counts[name]}", file=sys.stderr, flush=True)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        end = time.time() + READY_S
        while not condition():
            if time.time() > end:
                raise TimeoutError(f"{what}: not within {READY_S:.0f} s; see {self.cluster.folder}")
            time.sleep(0.1)

    def working(self) -> int:
        """How many hosts train."""
        return sum(node.state is NodeState.WORKING for node in self.cluster.seen().nodes.values())


def run(policy: str, folder: Path, phase_s: float = PHASE_S) -> Outcome:
    """The story under one policy, with an etcd and agents of its own."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        cluster = Cluster(etcd.endpoint, folder)
        stack.callback(cluster.close)
        return Story(cluster, policy, phase_s).tell()


def main() -> None:
    """Print the table."""
    exit_when_told()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="runs of each policy, in turns")
    parser.add_argument("--phase-s", type=float, default=PHASE_S)
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="unicron-regroup-") as top:
        for number in range(args.rounds):
            for policy in POLICIES:
                folder = Path(top, f"{number}-{policy.replace(' ', '-')}")
                folder.mkdir()
                outcomes.append(run(policy, folder, args.phase_s))
    print(", ".join(f"{what}: {value}" for what, value in describe_machine().items()), end="\n\n")
    phases = list(outcomes[0].phases)
    print(f"| policy | {' | '.join(phases)} | WAF over all, GFLOP/s | the plan's / this |")
    print(f"|---|{'---|' * (len(phases) + 2)}")
    for place, outcome in enumerate(outcomes):
        best = outcomes[place - place % len(POLICIES)]
        cells = [f"{outcome.phases[name] / 1e9:.2f} ({outcome.counts[name]})" for name in phases]
        ratio = best.waf / outcome.waf
        print(f"| {outcome.policy} | {' | '.join(cells)} | {outcome.waf / 1e9:.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
