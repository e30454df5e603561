"""Groups of agents without workers: forming, idling, and meeting again, on etcd and on c10d.

The agents are threads in a few processes that have torch imported, the same ones for both back ends. Each has a
connection of its own to the back end's server, which runs before the clock starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from _rendezvous_jobs import TUNED_C10D
from _rendezvous_names import without_name_server
from _scenarios import Run

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import StoreError
from unicron_elastic.rendezvous.store.open import open_store
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

AGENTS = Path(__file__).parent / "_rendezvous_agents.py"
OURS, C10D = "unicron", "c10d"
PROCESSES = 4
HEAD_START_S = 0.3  # from the order until the moment it names: all processes must have read it
GRACE_S = 20.0  # for an answer after its own time limit
SETTLE_S = 2.0  # what a new round entails is over
TUNED = {C10D: TUNED_C10D}
COUNTERS = {
    "proposals": r"etcd_server_proposals_committed_total",
    "lease_keepalives": r'grpc_server_msg_received_total{.*grpc_method="LeaseKeepAlive".*}',
    "transactions": r'grpc_server_msg_received_total{.*grpc_method="Txn".*}',
    "ranges": r'grpc_server_msg_received_total{.*grpc_method="Range".*}',
    "watch_requests": r'grpc_server_msg_received_total{.*grpc_method="Watch".*}',
}


class GroupError(Exception):
    """A group did not do what it should have done; the text says what."""


class AgentPool:
    """The servers of both back ends, and processes that hold agents; as a context manager, it ends all."""

    def __init__(self, processes: int = PROCESSES) -> None:
        self._count = processes
        self._processes: list[subprocess.Popen[str]] = []
        self.etcd = EmbeddedEtcd()
        self._c10d_port = 0

    def __enter__(self) -> AgentPool:
        try:
            self.etcd.start()
            self._start_processes()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def form(
        self, backend: str, nodes: int, min_nodes: int, timeout_s: float, conf: Mapping[str, str] | None = None
    ) -> Round:
        """All agents meet, from nothing; the moment is that of the order. Raises GroupError."""
        endpoint = self.etcd.endpoint if backend == OURS else f"127.0.0.1:{self._c10d_port}"
        is_host = {"is_host": "0"} if backend == C10D else {}
        order = {
            "do": "form",
            "backend": backend,
            "endpoint": endpoint,
            "run_id": uuid.uuid4().hex,
            "min_nodes": min_nodes,
            "max_nodes": nodes,
            "conf": {**is_host, **(conf or {})},
            "timeout_s": timeout_s,
        }
        parts = [[n for n in range(nodes) if n % self._count == k] for k in range(self._count)]
        return self._round(order, [{"agents": part} for part in parts], nodes)

    def again(self, gone: int, left: int, timeout_s: float) -> Round:
        """One agent goes, and the others meet; the moment is that of the loss. Raises GroupError."""
        return self._round({"do": "again", "gone": gone, "timeout_s": timeout_s}, [{}] * self._count, left)

    def disband(self) -> None:
        """All agents go. Raises GroupError."""
        self._ask([{"do": "disband"}] * self._count, GRACE_S)

    def etcd_counts(self) -> dict[str, float]:
        """What etcd counts, the revision of its data, and the processor time that it has used, in s."""
        with urllib.request.urlopen(f"{self.etcd.endpoint}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        counts = {name: _sum_of(lines, pattern) for name, pattern in COUNTERS.items()}
        store = open_store(StoreAddress.parse(self.etcd.endpoint))
        try:
            counts["revision"] = float(store.read("benchmark").revision)
        finally:
            store.close()
        used = psutil.Process(self.etcd.pid).cpu_times()
        return {**counts, "etcd_cpu_s": used.user + used.system}

    def agents_cpu_s(self) -> float:
        """The processor time that the agents' processes have used, in s."""
        times = (psutil.Process(process.pid).cpu_times() for process in self._processes[: self._count])
        return sum(used.user + used.system for used in times)

    def _round(self, order: dict[str, Any], parts: list[dict[str, Any]], nodes: int) -> Round:
        at_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
        requests = [{**order, **part, "at_ns": at_ns} for part in parts]
        answers = self._ask(requests, HEAD_START_S + float(order["timeout_s"]) + GRACE_S)
        results = [result for answer in answers for result in answer["results"]]
        found = Round(results, at_ns, sum(answer["cpu_s"] for answer in answers))
        found.check(nodes)
        problems = self._ask([{"do": "check", "world": nodes}] * self._count, GRACE_S + 60.0)
        if wrong := [problem for answer in problems for problem in answer["problems"]]:
            raise GroupError(f"the round's store is not usable: {wrong[0]}")
        return found

    def _start_processes(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_NODE_NAME": "benchmark"}
        for _ in range(self._count + 1):  # the last one hosts c10d's store
            self._processes.append(
                subprocess.Popen(
                    [*without_name_server(), sys.executable, str(AGENTS)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self._processes:
            _read_answer(process, time.monotonic() + 60.0)
        self._c10d_port = self._ask([{"do": "serve"}], GRACE_S, self._processes[-1:])[0]["port"]

    def _ask(
        self, requests: list[dict[str, Any]], timeout_s: float, of: list[subprocess.Popen[str]] | None = None
    ) -> list[dict[str, Any]]:
        ends_at = time.monotonic() + timeout_s
        processes = self._processes[: self._count] if of is None else of
        for process, request in zip(processes, requests, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return [_read_answer(process, ends_at) for process in processes]

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.etcd.stop()


class Round:
    """What came of a round: who has which rank, and when the last one had it."""

    def __init__(self, results: list[dict[str, Any]], at_ns: int, cpu_s: float) -> None:
        self._results = results
        self._at_ns = at_ns
        self.cpu_s = cpu_s

    def check(self, nodes: int) -> None:
        """Raises GroupError unless all agents have ranks of their own in one world of ``nodes``."""
        if errors := [f"agent {each['agent']}: {each['error']}" for each in self._results if "error" in each]:
            raise GroupError(f"{len(errors)} of {len(self._results)} agents are in no round, such as {errors[0]}")
        ranks = sorted(each["rank"] for each in self._results)
        worlds = {each["world"] for each in self._results}
        if ranks != list(range(nodes)) or worlds != {nodes}:
            raise GroupError(f"{nodes} agents should have one rank each, and have {ranks} in worlds of {worlds}")

    @property
    def took_ms(self) -> float:
        """From the order to the last agent's return."""
        return (max(int(each["at_ns"]) for each in self._results) - self._at_ns) / 1e6

    @property
    def first_ms(self) -> float:
        """From the order to the first agent's return."""
        return (min(int(each["at_ns"]) for each in self._results) - self._at_ns) / 1e6


def forming(pool: AgentPool, backend: str, nodes: int, repetition: int, timeout_s: float) -> Run:
    """``nodes`` agents come at the same moment, and all must be there: nobody waits for a last call."""
    run = Run("forming", backend, nodes, repetition)
    with _problems(run, pool):
        before = pool.etcd_counts()
        found = pool.form(backend, nodes, nodes, timeout_s)
        run.values = {"formed_ms": found.took_ms, "first_formed_ms": found.first_ms}
        run.values["agent_cpu_ms"] = found.cpu_s * 1e3 / nodes
        if backend == OURS:
            after = pool.etcd_counts()
            run.values["etcd_cpu_ms"] = (after["etcd_cpu_s"] - before["etcd_cpu_s"]) * 1e3
            run.values["proposals_per_node"] = (after["proposals"] - before["proposals"]) / nodes
    return run


def idle(pool: AgentPool, nodes: int, repetition: int, window_s: float) -> Run:
    """What a group costs etcd while nothing happens, per node and second."""
    run = Run("idle", OURS, nodes, repetition)
    with _problems(run, pool):
        pool.form(OURS, nodes, nodes, timeout_s=60.0)
        time.sleep(SETTLE_S)
        before, cpu_before_s, since = pool.etcd_counts(), pool.agents_cpu_s(), time.monotonic()
        time.sleep(window_s)
        after, cpu_after_s, took_s = pool.etcd_counts(), pool.agents_cpu_s(), time.monotonic() - since
        rates = {name: (after[name] - before[name]) / nodes / took_s for name in before}
        run.values = {f"{name}_per_node_s": rates[name] for name in ("revision", *COUNTERS)}
        run.values["etcd_cpu_percent"] = 100 * rates["etcd_cpu_s"] * nodes
        run.values["agent_cpu_percent"] = 100 * (cpu_after_s - cpu_before_s) / nodes / took_s
    return run


def again(pool: AgentPool, backend: str, nodes: int, repetition: int) -> Run:
    """One of ``nodes`` agents goes, and the others meet again.

    Ours leaves, so that its lease is gone at once, and the others hear of that. c10d's falls silent, as it has no way
    to leave, and the others are told by the benchmark.
    """
    run = Run("again", backend, nodes, repetition)
    with _problems(run, pool):
        pool.form(backend, nodes, nodes - 1, timeout_s=60.0, conf=TUNED.get(backend))
        time.sleep(SETTLE_S)
        found = pool.again(gone=repetition % nodes, left=nodes - 1, timeout_s=60.0)
        run.values = {"formed_ms": found.took_ms}
    return run


@contextlib.contextmanager
def _problems(run: Run, pool: AgentPool) -> Iterator[None]:
    """A failure is a result like any other; the pool is of no use after it."""
    try:
        yield
        pool.disband()
    except (GroupError, StoreError, OSError, psutil.Error) as error:  # of the agents, or of the server
        run.problem = str(error)


def _sum_of(lines: list[str], pattern: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern + r"[ {]|" + pattern + "$", line))


def _read_answer(process: subprocess.Popen[str], ends_at: float) -> dict[str, Any]:
    """One line of JSON. Raises GroupError if there is none in time."""
    assert process.stdout is not None
    # A process answers with one line to one request, so that nothing can wait in the buffer of the stream.
    readable, _, _ = select.select([process.stdout], [], [], max(0.0, ends_at - time.monotonic()))
    line = process.stdout.readline() if readable else ""
    if not line:
        raise GroupError("a process of agents " + ("has ended" if readable else "does not answer"))
    answer: dict[str, Any] = json.loads(line)
    return answer
