"""A process that holds many agents without workers: rendezvous handlers, each with a thread that meets the others.

``_rendezvous_groups`` starts several of these and speaks with them in lines of JSON: a request on stdin, one answer on
stdout. Moments are CLOCK_MONOTONIC in ns, which all processes of a machine share. Both back ends are used in the same
way, through torch's interface; what differs is how an agent goes: ``leave`` is ours, and c10d's can only fall silent.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unicron_elastic.rendezvous.job.round_watch import RoundListener
from unicron_elastic.rendezvous.store import etcd as etcd_store  # noqa: F401 - what a handler imports when it is made, as torch is
from unicron_elastic.rendezvous.torch.create_handler import create_handler
from unicron_elastic.rendezvous.torch.handler import ClusterRendezvous

ADDRESS = "127.0.0.1"
STORE_TIMEOUT_S = 60.0


class SimulatedAgent:
    """One node's handler, and what came of its latest round."""

    def __init__(self, number: int, parameters: RendezvousParameters) -> None:
        self.number = number
        self._parameters = parameters
        self._handler: RendezvousHandler | None = None
        self._store: Any = None
        self._result: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._is_lost_heard = threading.Event()

    def begin(self, start: threading.Event) -> None:
        """Meets the others in a thread, from ``start`` on."""
        self._run(lambda: self._meet(start))

    def begin_again(self, start: threading.Event) -> None:
        """Meets the others again, once it is told of a loss.

        With c10d it is told at ``start``, as by the failure of its own worker: nothing else tells it of a lost node.
        """
        told = start
        if isinstance(self._handler, ClusterRendezvous):
            told = self._is_lost_heard = threading.Event()
            self._handler.watch_nodes(RoundListener(on_fault=lambda _reason: self._is_lost_heard.set()))
        self._run(lambda: self._meet(told))

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Rank, world and moment of the round, or an error."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return {"agent": self.number, **(self._result or {"error": f"in no round after {timeout_s:g} s"})}

    def check_store(self, world: int) -> str:
        """What is wrong with the round's store, or "": the key of the agent with the next rank must be in it."""
        try:
            neighbour = (self._result["rank"] + 1) % world
            found = self._store.get(f"benchmark/{neighbour}")
        except Exception as error:
            return f"agent {self.number}: {error!r}"
        return "" if found == b"here" else f"agent {self.number}: rank {neighbour} said {found!r}"

    def go(self) -> None:
        """Goes as suddenly as its back end allows, and ends nothing for the others."""
        if isinstance(self._handler, ClusterRendezvous):
            self._handler.leave()
        elif self._handler is not None:
            self._handler._stop_heartbeats()
        self._handler = self._store = None

    def _run(self, work: Callable[[], None]) -> None:
        self._result = {}
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _meet(self, start: threading.Event) -> None:
        start.wait()
        try:
            if self._handler is None:
                is_ours = self._parameters.backend == "unicron"
                self._handler = (
                    create_handler(self._parameters) if is_ours else get_rendezvous_handler(self._parameters)
                )
            found = self._handler.next_rendezvous()
            at_ns = time.monotonic_ns()
            self._store = found.store
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
            self._store.set(f"benchmark/{found.rank}", "here")
            self._result = {"rank": found.rank, "world": found.world_size, "at_ns": at_ns}
        except Exception as error:
            self._result = {"error": repr(error)}


class AgentProcess:
    """What the requests do."""

    def __init__(self) -> None:
        self._agents: dict[int, SimulatedAgent] = {}
        self._served: list[TCPStore] = []
        self._used_s = 0.0

    def serve(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Hosts the store of the c10d back end."""
        store = TCPStore(ADDRESS, 0, None, True, wait_for_workers=False, multi_tenant=True)
        self._served.append(store)
        return {"port": store.port}

    def form(self, request: dict[str, Any]) -> dict[str, Any]:
        """Makes agents and lets them meet from the moment ``at_ns`` on."""
        self._agents = {number: self._agent(number, request) for number in request["agents"]}
        return self._timed(request, [agent.begin for agent in self._agents.values()], lambda: None)

    def again(self, request: dict[str, Any]) -> dict[str, Any]:
        """One agent, ``gone``, goes at ``at_ns``, wherever it is; those of this process meet again."""
        gone = self._agents.pop(request["gone"], None)
        begins = [agent.begin_again for agent in self._agents.values()]
        return self._timed(request, begins, lambda: None if gone is None else gone.go())

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whether all agents can use their round's store."""
        problems = [agent.check_store(request["world"]) for agent in self._agents.values()]
        return {"problems": [problem for problem in problems if problem]}

    def disband(self, _request: dict[str, Any]) -> dict[str, Any]:
        """All agents go."""
        leaving = [threading.Thread(target=agent.go) for agent in self._agents.values()]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        self._agents.clear()
        return {}

    def _agent(self, number: int, request: dict[str, Any]) -> SimulatedAgent:
        parameters = RendezvousParameters(
            backend=request["backend"],
            endpoint=request["endpoint"],
            run_id=request["run_id"],
            min_nodes=request["min_nodes"],
            max_nodes=request["max_nodes"],
            local_addr=ADDRESS,
            **request["conf"],
        )
        return SimulatedAgent(number, parameters)

    def _timed(
        self,
        request: dict[str, Any],
        begins: Sequence[Callable[[threading.Event], None]],
        at_start: Callable[[], None],
    ) -> dict[str, Any]:
        start = threading.Event()
        for begin in begins:
            begin(start)
        time.sleep(max(0.0, (request["at_ns"] - time.monotonic_ns()) / 1e9))
        late_ms = (time.monotonic_ns() - request["at_ns"]) / 1e6
        used_s = time.process_time()
        start.set()
        at_start()
        ends_at = time.monotonic() + request["timeout_s"]
        results = [agent.result(max(0.0, ends_at - time.monotonic())) for agent in self._agents.values()]
        return {"results": results, "cpu_s": time.process_time() - used_s, "late_ms": late_ms}


def main() -> None:
    """Answers requests until stdin ends."""
    process = AgentProcess()
    answer = sys.stdout
    sys.stdout = sys.stderr
    print("{}", file=answer, flush=True)  # torch is imported
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(process, request["do"])(request)), file=answer, flush=True)


if __name__ == "__main__":
    main()
