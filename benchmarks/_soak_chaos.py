"""What breaks when, drawn from a seed as ``unicron chaos`` draws it, and done to the cluster."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from _soak_cluster import COORDINATOR, HOSTS, JOBS, SPARED, Cluster, kill

from unicron_elastic.testing.chaos_processes import send

__all__ = ["KINDS", "WHAT", "Chaos", "Drawn", "Struck", "draw"]

# How often each kind is drawn, relative to one another.
KINDS = {
    "kill": 8,
    "raise": 5,
    "all": 2,
    "hang": 3,
    "stand": 2,
    "slow": 2,
    "lose": 4,
    "agent": 2,
    "coordinator": 2,
    "cut": 1,
}
WHAT = {
    "kill": "worker: SIGKILL",
    "raise": "worker: exception",
    "all": "all workers of a job: exception at once",
    "hang": "worker: SIGSTOP",
    "stand": "worker: stands still",
    "slow": "worker: 1.6 times as slow for 20 s",
    "lose": "host loses its power",
    "agent": "agent: SIGKILL",
    "coordinator": "who coordinates: SIGKILL",
    "cut": "host is unplugged",
}
SIGNALS: dict[str, int] = {
    "kill": signal.SIGKILL,
    "raise": signal.SIGUSR1,
    "all": signal.SIGUSR1,
    "hang": signal.SIGSTOP,
    "stand": signal.SIGRTMIN + 1,
    "slow": signal.SIGUSR2,
}
AWAY_S = (5.0, 25.0)  # of a host without power
CUT_S = (2.0, 8.0)
AGAIN_S = (0.5, 4.0)  # until an agent or a coordinator is started again, as a service manager does it
LEAST_S = 0.1  # between two faults


@dataclass(frozen=True, slots=True)
class Drawn:
    """A fault to come: seconds after the one before, what, which of those that could be struck, for how long."""

    after_s: float
    kind: str
    whom: float  # 0 to 1
    away: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was made. ``at``: Unix seconds. ``job``: that worked there, "" for none."""

    at: float
    kind: str
    host: str
    job: str
    pid: int = 0
    back_after_s: float = 0.0


def draw(seed: int, mtbf_s: float) -> Iterator[Drawn]:
    """Without end; the same for the same seed."""
    chance = random.Random(f"soak/{seed}")
    while True:
        after_s = max(LEAST_S, chance.expovariate(1.0 / mtbf_s))
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        yield Drawn(after_s, kind, chance.random(), chance.random())


class Chaos:
    """Strikes in a thread of its own until ``stop``."""

    def __init__(self, cluster: Cluster, seed: int, mtbf_s: float, events: Path) -> None:
        self.cluster, self.events = cluster, events
        self._drawn = draw(seed, mtbf_s)
        self._is_over = threading.Event()
        self._down: dict[str, threading.Thread] = {}  # host: who brings it back
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.struck = 0
        self.problems: list[str] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """No more faults; returns when all that is away is back."""
        self._is_over.set()
        self._thread.join()
        for thread in list(self._down.values()):
            thread.join()

    def _run(self) -> None:
        for drawn in self._drawn:
            if self._is_over.wait(drawn.after_s):
                return
            try:
                struck = self._strike(drawn)
            except Exception as error:  # what the harness cannot do is told, and the soak goes on
                self.problems.append(f"{drawn.kind}: {error!r}")
                struck = None
            if struck is not None:
                self.struck += 1
                with self.events.open("a") as file:
                    print(json.dumps(asdict(struck)), file=file)

    def _strike(self, drawn: Drawn) -> Struck | None:
        """None if there is nobody to strike."""
        if drawn.kind in SIGNALS:
            return self._signal(drawn)
        if drawn.kind == "coordinator":
            return self._coordinator(drawn)
        candidates = [host for host in HOSTS if host != SPARED and host not in self._down]
        if self._down or not candidates:
            return None  # one host at a time, so that no job loses all of its memory by rule
        host = candidates[int(drawn.whom * len(candidates))]
        at, job = time.time(), self._job_of(host)
        if drawn.kind == "lose":
            away_s = _between(AWAY_S, drawn.away)
            self.cluster.power_off(host)
            self._later(host, away_s, lambda: self._power_on(host))
        elif drawn.kind == "cut":
            away_s = _between(CUT_S, drawn.away)
            self.cluster.hosts[host].cut()
            self._later(host, away_s, self.cluster.hosts[host].restore)
        else:
            away_s = _between(AGAIN_S, drawn.away)
            kill(self.cluster.agents[host])
            self._later(host, away_s, lambda: self.cluster.start_agent(host))
        return Struck(at, drawn.kind, host, job, back_after_s=away_s)

    def _signal(self, drawn: Drawn) -> Struck | None:
        job = JOBS[int(drawn.away * len(JOBS))].name
        found = [(host, worker) for host, worker in self.cluster.workers(job) if host != SPARED]
        if not found:
            return None
        first = int(drawn.whom * len(found))
        chosen = found[first:] + found[:first] if drawn.kind == "all" else found[first : first + 1]
        at, struck = time.time(), list[Struck]()
        for host, worker in chosen:
            with contextlib.suppress(ProcessLookupError):
                send(worker, cast("signal.Signals", SIGNALS[drawn.kind]))  # real-time ones have no name there
                struck.append(Struck(at, drawn.kind, host, job, worker.pid))
        return struck[0] if struck else None

    def _coordinator(self, drawn: Drawn) -> Struck | None:
        leader, away_s = self.cluster.leader(), _between(AGAIN_S, drawn.away)
        if leader in ("", SPARED) or leader in self._down:
            return None
        at = time.time()
        if leader == COORDINATOR:
            kill(self.cluster.others[COORDINATOR])
            self._later(COORDINATOR, away_s, self.cluster.start_coordinator)
            return Struck(at, drawn.kind, COORDINATOR, "", back_after_s=away_s)
        job = self._job_of(leader)
        kill(self.cluster.agents[leader])
        self._later(leader, away_s, lambda: self.cluster.start_agent(leader))
        return Struck(at, drawn.kind, leader, job, back_after_s=away_s)

    def _power_on(self, host: str) -> None:
        self.cluster.hosts[host].power_on()
        self.cluster.start_agent(host)

    def _later(self, name: str, seconds: float, bring_back: Callable[[], None]) -> None:
        def wait() -> None:
            time.sleep(seconds)
            try:
                bring_back()
            except Exception as error:
                self.problems.append(f"{name} cannot be brought back: {error!r}")
            self._down.pop(name, None)

        self._down[name] = threading.Thread(target=wait, daemon=True)
        self._down[name].start()

    def _job_of(self, host: str) -> str:
        return next((worker.run_id for where, worker in self.cluster.workers() if where == host), "")


def _between(bounds: tuple[float, float], where: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * where
