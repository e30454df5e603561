"""How fast the coordinator of several jobs answers the loss of a node, and what it costs, with a real etcd.

    python benchmarks/coordinator.py                               # three sizes; about fifteen minutes
    python benchmarks/coordinator.py --agents 4 --jobs 2 --losses 5

etcd and ``unicron coordinator`` are real, each a process of its own. The agents are in this process: what they decide
and write is real, but they have no children, and share a watch and connections; see docs/benchmark-coordinator.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from _coordinator_agents import Agents, Seen
from _coordinator_cases import needs_regrouping, specs, submission, working
from _coordinator_report import Result, machine_line, parts_table, steps_table, table
from _coordinator_steps import steps
from _exit_when_told import exit_when_told
from _report import describe_machine

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.rendezvous.records.cluster import LEADER
from unicron_elastic.rendezvous.records.plan import parse_node_status, parse_order
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.rendezvous.store.open import open_store
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

TIMED = Path(__file__).parent / "_coordinator_timed.py"
SETTLE_S = 300.0
IDLE_S = 20.0
POLL_S = 0.02
DWELLS_S = 14.0  # jobs rest for ten after they have moved
LOOKED_AT = 12  # jobs, one after the other, in which a node worth losing is looked for
AT_REST = 0.05  # of a core
MIB = 2**20


class BenchmarkError(Exception):
    """Something did not happen; the text says what."""


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time so far, in s, and the revision of etcd's data."""

    coordinator_s: float
    etcd_s: float
    revision: int


class Cluster:
    """etcd, the coordinator and the agents."""

    def __init__(self, etcd: EmbeddedEtcd, coordinator: subprocess.Popen[bytes], agents: Agents, store: Store) -> None:
        self.etcd, self.agents, self.store = etcd, agents, store
        self.coordinator = psutil.Process(coordinator.pid)
        self._etcd = psutil.Process(etcd.pid)
        self._leader_revision = 0

    def elect(self) -> None:
        """Waits until the coordinator leads."""
        ends_at = time.monotonic() + 30.0
        while (entry := self.store.read(LEADER).entry) is None:
            if time.monotonic() > ends_at:
                raise BenchmarkError("nobody coordinates")
            time.sleep(POLL_S)
        self._leader_revision = entry.revision

    def used(self) -> Used:
        """So far."""
        times = [each.cpu_times() for each in (self.coordinator, self._etcd)]
        spent = [each.user + each.system for each in times]
        return Used(spent[0], spent[1], self.store.read(LEADER).revision)

    def settle(self, since: int, timeout_s: float = SETTLE_S) -> float:
        """Until all is as planned; the moment of that."""
        ends_at = time.monotonic() + timeout_s
        while not (at := self.agents.settled_at(since)):
            if time.monotonic() > ends_at or self.agents.problems:
                problems = "; ".join(self.agents.problems[:3]) or f"not as planned after {timeout_s:g} s"
                raise BenchmarkError(problems)
            time.sleep(POLL_S)
        return at

    def rest(self, timeout_s: float = 20.0) -> None:
        """Until the coordinator does next to nothing: its table is built."""
        ends_at = time.monotonic() + timeout_s
        self.coordinator.cpu_percent()
        calm = 0
        while calm < 3 and time.monotonic() < ends_at:
            time.sleep(0.2)
            calm = calm + 1 if self.coordinator.cpu_percent() <= 100.0 * AT_REST else 0

    def lose(self, node: NodeStatus) -> float:
        """The moment of that."""
        return self.agents.lose(node.node_id, {LEADER: self._leader_revision})

    def etcd_rss_mib(self) -> float:
        """Of memory."""
        return float(self._etcd.memory_info().rss) / MIB

    def database_mib(self) -> tuple[float, float]:
        """Of the file, and what of it is in use."""
        with urllib.request.urlopen(f"{self.etcd.endpoint}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
        sizes = []
        for name in ("etcd_mvcc_db_total_size_in_bytes", "etcd_mvcc_db_total_size_in_use_in_bytes"):
            found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
            sizes.append(float(found.group(1)) / MIB if found else float("nan"))
        return sizes[0], sizes[1]


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    args = parse_arguments()
    sys.setswitchinterval(0.0005)  # agents are processes of their own elsewhere, and wait for no other one
    exit_when_told()
    machine = describe_machine()
    results = []
    for agents, jobs in zip(args.agents, args.jobs, strict=True):
        results.append(measure(agents, jobs, args))
        if args.json:
            told = {"machine": machine, "options": vars(args), "results": [asdict(each) for each in results]}
            args.json.write_text(json.dumps(told, indent=1, default=str) + "\n")
    print(table(results))
    print(f"\n{steps_table(results)}")
    if args.parts:
        print(f"\n{parts_table(results)}")
    print(f"\n{machine_line(machine, os.getloadavg())}")
    for each in results:
        for problem in each.problems:
            print(f"- {each.agents} agents: {problem}")


def measure(agents: int, jobs: int, args: argparse.Namespace) -> Result:
    """One size, from an empty store."""
    result = Result(agents, jobs)
    say(f"{agents} agents, {jobs} jobs")
    try:
        parts = args.parts and f"{args.parts}-{agents}"
        with running(parts, result, to_disk=args.to_disk) as cluster:
            cluster.elect()
            join(cluster, result)
            place(cluster, result, args.seed)
            idle(cluster, result)
            lose_and_return(cluster, result, args)
            finish(cluster, result)
        if parts:
            result.parts = parts_of(Path(parts), result.faults)
    except BenchmarkError as error:
        result.problems.append(str(error))
        say(f"FAILED: {error}")
    return result


@contextmanager
def running(parts: str, result: Result, *, to_disk: bool) -> Iterator[Cluster]:
    """A cluster with nothing in it."""
    with (
        tempfile.TemporaryDirectory(prefix="unicron-benchmark-") as folder,
        EmbeddedEtcd(data_dir=Path(folder) / "etcd" if to_disk else None) as etcd,
        tempfile.TemporaryFile() as errors,
    ):
        words = ["coordinator", "--endpoint", etcd.endpoint, "--address", "127.0.0.1", "--name", "coordinator"]
        program = [str(Path(sys.executable).parent / "unicron")]
        if parts:
            program = [sys.executable, str(TIMED), parts]
        coordinator = subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL, stderr=errors)
        try:
            address = StoreAddress.parse(etcd.endpoint)
            with open_store(address) as store, Agents(lambda: open_store(address, timeout_s=30.0)) as agents:
                yield Cluster(etcd, coordinator, agents, store)
                result.problems += agents.problems
        finally:
            coordinator.terminate()
            try:
                coordinator.wait(20.0)
            except subprocess.TimeoutExpired:
                coordinator.kill()
                coordinator.wait()
            errors.seek(0)
            wrong = [line for line in errors.read().decode(errors="replace").splitlines() if "rror" in line]
            result.problems += [f"the coordinator said: {line}" for line in wrong[:5]]


def join(cluster: Cluster, result: Result) -> None:
    """All agents come, and there is no job yet."""
    before, began, since = cluster.used(), time.monotonic(), len(cluster.agents.seen)
    cluster.agents.join([f"host{number:05}" for number in range(result.agents)], "a")
    result.add(join_s=cluster.settle(since) - began)
    cluster.rest()
    after = cluster.used()
    result.add(join_cpu_s=after.coordinator_s - before.coordinator_s)
    result.add(join_plans=count(cluster.agents.seen[since:], "plan"))
    say_last(result, "join_s", "join_cpu_s", "join_plans")


def place(cluster: Cluster, result: Result, seed: int) -> None:
    """All jobs come at once."""
    jobs = specs(result.agents, result.jobs, seed)
    before, began, since = cluster.used(), time.monotonic(), len(cluster.agents.seen)
    for spec in jobs:
        cluster.agents.submit(spec, submission(spec))
    submitted = time.monotonic()
    settled = cluster.settle(since)
    plans = [each.at for each in cluster.agents.seen[since:] if each.kind == "plan" and each.at >= submitted]
    if plans:
        result.add(place_published_ms=(plans[0] - began) * 1e3)
    result.add(place_s=settled - began)
    cluster.rest()
    after = cluster.used()
    result.add(place_cpu_s=after.coordinator_s - before.coordinator_s, place_etcd_cpu_s=after.etcd_s - before.etcd_s)
    result.add(place_revisions=after.revision - before.revision)
    say_last(result, "place_s", "place_cpu_s", "place_revisions")


def idle(cluster: Cluster, result: Result) -> None:
    """Nothing happens."""
    before, began = cluster.used(), time.monotonic()
    time.sleep(IDLE_S)
    after, passed_s = cluster.used(), time.monotonic() - began
    result.add(idle_cpu=100.0 * (after.coordinator_s - before.coordinator_s) / passed_s)
    result.add(idle_etcd_cpu=100.0 * (after.etcd_s - before.etcd_s) / passed_s)
    result.add(idle_revisions=after.revision - before.revision)
    memory = cluster.coordinator.memory_full_info()
    result.add(rss_mib=memory.rss / MIB, uss_mib=memory.uss / MIB)
    say_last(result, "idle_cpu", "idle_etcd_cpu", "rss_mib", "uss_mib")


def lose_and_return(cluster: Cluster, result: Result, args: argparse.Namespace) -> None:
    """One node after the other is lost and comes back on the same host."""
    choice = random.Random(args.seed)
    for number in range(args.losses):
        time.sleep(args.pause)
        node = victim(cluster, choice)
        cluster.rest()
        before, since = cluster.used(), len(cluster.agents.seen)
        lost_at = cluster.lose(node)
        settled_at = cluster.settle(since)
        cluster.rest()
        after, seen = cluster.used(), cluster.agents.seen[since:]
        found = loss(seen, lost_at, settled_at)
        found["coordinator_writes"] = revisions(seen, "plan", "orders", "jobs", "faults")
        found["agent_writes"] = (
            after.revision - before.revision - found["coordinator_writes"] - 1
        )  # but for its removal
        found["fault_cpu_ms"] = (after.coordinator_s - before.coordinator_s) * 1e3
        found["fault_etcd_cpu_ms"] = (after.etcd_s - before.etcd_s) * 1e3
        cluster.agents.forget(node.node_id)
        since, came_at = len(cluster.agents.seen), time.monotonic()
        cluster.agents.join([node.host], f"b{number}")
        found["back_ms"] = (cluster.settle(since) - came_at) * 1e3
        result.add(**found)
        result.faults.append({"job": node.job, "lost_at": lost_at, **found})
        cluster.rest()
        words = ("published_ms", "ordered_ms", "acting_ms", "settled_ms", "back_ms", "given_nodes")
        say(f"{number + 1}: " + ", ".join(f"{name} {found[name]:.4g}" for name in words if name in found))


def victim(cluster: Cluster, choice: random.Random) -> NodeStatus:
    """A working node whose loss makes others move; after a while, any."""
    ends_at = time.monotonic() + DWELLS_S
    while True:
        mirror = cluster.agents.mirror()
        jobs = sorted(mirror.jobs())
        choice.shuffle(jobs)
        if (node := needs_regrouping(mirror, jobs[:LOOKED_AT], time.time())) is not None:
            return node
        if time.monotonic() > ends_at:
            break
        time.sleep(1.0)
    snapshot = mirror.planning_snapshot(lambda _host: Health.OK)
    return next(node for job in jobs for node in working(snapshot, job))


def loss(seen: Sequence[Seen], lost_at: float, settled_at: float) -> dict[str, Any]:
    """What came after one, by what the watch told."""
    plans = [each for each in seen if each.kind == "plan"]
    orders = [each for each in seen if each.kind == "orders" and each.entry is not None]
    found: dict[str, Any] = {"plans": len(plans), "settled_ms": (settled_at - lost_at) * 1e3}
    if plans and plans[0].entry is not None:
        found["published_ms"] = (plans[0].at - lost_at) * 1e3
        found["plan_kib"] = len(plans[0].entry.value) / 1024
    told = [parse_order(each.entry) for each in orders if each.entry is not None]
    found["ordered_nodes"] = len({each.key for each in orders})
    found["given_nodes"] = sum(bool(each.source and each.target) for each in told)
    told_at = [each.at for each in seen if each.entry is not None and each.kind in ("orders", "jobs")]
    acting = list(_acting(seen))
    if told_at and acting:
        found["ordered_ms"] = (told_at[0] - lost_at) * 1e3
        found["acting_ms"] = (acting[0] - lost_at) * 1e3
        found["all_acting_ms"] = (acting[-1] - lost_at) * 1e3
    return found


def _acting(seen: Sequence[Seen]) -> Iterator[float]:
    """When each of the nodes that move first said that it leaves a job or joins one."""
    known = set[str]()
    for each in seen:
        if each.kind != "agents" or each.key in known or each.entry is None:
            continue
        if parse_node_status(each.entry).state in (NodeState.LEAVING, NodeState.JOINING):
            known.add(each.key)
            yield each.at


def finish(cluster: Cluster, result: Result) -> None:
    """Sizes in the end, and what the parts of a look take."""
    size, used = cluster.database_mib()
    result.add(db_mib=size, db_used_mib=used, etcd_rss_mib=cluster.etcd_rss_mib())
    result.add(end_rss_mib=cluster.coordinator.memory_info().rss / MIB)
    result.steps = steps(cluster.agents.mirror(), victim(cluster, random.Random(0)))


def parts_of(path: Path, faults: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By part, the milliseconds of the time from each loss to the first agent that acts, and of processor time.

    All else is waiting: for etcd to tell of changes, for other processes, and for the agent.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    planner = {thread for thread, part, *_ in lines if part.startswith("look")}
    names = dict.fromkeys(part for thread, part, *_ in lines if thread in planner)
    found: dict[str, list[tuple[float, float]]] = {}
    for fault in faults:
        if "acting_ms" not in fault:
            continue
        since, until = fault["lost_at"], fault["lost_at"] + fault["acting_ms"] / 1e3
        took = {part: [0.0, 0.0] for part in names}
        for thread, part, began, ended, own_s, own_cpu_s in lines:
            if thread in planner and since <= began and ended <= until:
                took[part][0] += own_s * 1e3
                took[part][1] += own_cpu_s * 1e3
        took["all else"] = [fault["acting_ms"] - sum(own_ms for own_ms, _ in took.values()), 0.0]
        for part, (own_ms, own_cpu_ms) in took.items():
            found.setdefault(part, []).append((own_ms, own_cpu_ms))
    return found


def count(seen: Sequence[Seen], kind: str) -> int:
    """Changes of this kind."""
    return sum(each.kind == kind for each in seen)


def revisions(seen: Sequence[Seen], *kinds: str) -> int:
    """How many commits changed these kinds of keys; an order that goes with its node's lease is none."""
    return len({each.revision for each in seen if each.kind in kinds and each.entry is not None})


def say_last(result: Result, *names: str) -> None:
    """What was measured, for who waits."""
    say(", ".join(f"{name} {result.values[name][-1]:.4g}" for name in names))


def say(text: str) -> None:
    """For who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 200, 2000], help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, nargs="+", default=[2, 16, 64], help="of each size (default: %(default)s)")
    parser.add_argument("--losses", type=int, default=20, help="of each size (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=6.0, metavar="S", help="before each loss, s (default: %(default)s)"
    )
    parser.add_argument("--to-disk", action="store_true", help="etcd forces each write to disk; else it does not")
    parser.add_argument("--seed", type=int, default=0, help="of jobs and losses (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    parser.add_argument(
        "--parts", default="", metavar="FILE", help="time the parts of the coordinator's work, into FILE-AGENTS"
    )
    args = parser.parse_args(arguments)
    if len(args.agents) != len(args.jobs) or min(args.agents) < 2 or min(args.jobs) < 1 or args.losses < 2:
        parser.error("--agents and --jobs need as many numbers each, at least 2 and 1; --losses must be at least 2")
    return args


if __name__ == "__main__":
    main()
