"""Hours of two jobs on four simulated hosts that break at random: does anything leak, drift, stand or stay open?

    python benchmarks/soak.py run FOLDER --minutes 75          # needs root: hosts are network namespaces
    python benchmarks/soak.py report FOLDER                    # at any time, also while it runs

Everything is real but the speed of the devices: etcd, a coordinator, agents, ``unicron-run``, workers that train in the
reproducible mode and mostly wait. What breaks when is drawn from ``--seed``. Beside each job the undisturbed run of it
goes along, alone, for its losses. See docs/benchmark-soak.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from _report import describe_machine
from _soak_chaos import Chaos
from _soak_cluster import HOSTS, JOBS, Cluster
from _soak_report import lines
from _soak_steps import last_moment, last_step

READY_S = 120.0
QUIET_S = 60.0  # after the last fault, until all must be well
AFTER_S = 75.0  # after the jobs were cancelled: a job's keys have a lease of 60 s
STUCK_S = 120.0  # without a step of a job, while there are hosts


@dataclass(frozen=True)
class Settings:
    """Of a run."""

    began_at: float  # Unix seconds
    monotonic_s: float  # CLOCK_MONOTONIC at that moment, in which ledgers count
    minutes: float
    seed: int
    mtbf_s: float
    device_ms: float
    sample_s: float


class Soak:
    """One run, which writes down all that it sees while it goes on."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.is_over = False
        self._stood: set[str] = set()

    def run(self) -> None:
        """To the end, or until SIGTERM or SIGINT."""
        write(self.folder / "settings.json", asdict(self.settings) | {"machine": describe_machine()})
        with Cluster(self.folder, self.settings.device_ms) as cluster:
            for spec in JOBS:
                cluster.submit(spec)
            self.wait_until_all_train(cluster)
            self.sample(cluster, "beginning")
            chaos = Chaos(cluster, self.settings.seed, self.settings.mtbf_s, self.folder / "events.jsonl")
            chaos.start()
            self.watch(cluster, "chaos", self.settings.began_at + 60 * self.settings.minutes)
            chaos.stop()
            self.is_over = False
            self.watch(cluster, "quiet", time.time() + QUIET_S)
            print(cluster.command("jobs"), cluster.command("nodes"), flush=True)
            for spec in JOBS:
                print(cluster.command("cancel", spec.name, "--reason", "the soak is over"), flush=True)
                (self.folder / spec.name / "over").touch()
            self.watch(cluster, "after", time.time() + AFTER_S)
            for problem in chaos.problems:
                self.tell(f"the soak itself: {problem}")

    def watch(self, cluster: Cluster, phase: str, until: float) -> None:
        """Sample until then."""
        while time.time() < until and not self.is_over:
            began = time.time()
            try:
                self.sample(cluster, phase)
            except Exception as error:  # such as a host that is taken away meanwhile
                self.tell(f"no sample: {error!r}")
            while (left := min(began + self.settings.sample_s, until) - time.time()) > 0 and not self.is_over:
                time.sleep(min(left, 1.0))

    def sample(self, cluster: Cluster, phase: str) -> None:
        """Write one down, and tell at once what should not be."""
        sample = {**cluster.sample(), "phase": phase}
        sample["load"] = os.getloadavg()[0]
        sample["own_cpu_s"] = time.process_time()
        sample["steps"] = {spec.name: last_step(self.folder / spec.name) for spec in JOBS}
        write(self.folder / "samples.jsonl", sample)
        for spec in JOBS if phase != "after" else ():
            stood_s = time.time() - last_moment(self.folder / spec.name)
            if stood_s > STUCK_S and spec.name not in self._stood:
                self._stood.add(spec.name)
                self.tell(f"{spec.name} has made no step for {stood_s:.0f} s\n{cluster.command('jobs')}")
            elif stood_s < STUCK_S:
                self._stood.discard(spec.name)
            if sample["phases"].get(spec.name) not in ("running", "submitted"):
                self.tell(f"{spec.name} is {sample['phases'].get(spec.name)}")

    def wait_until_all_train(self, cluster: Cluster) -> None:
        """Raises TimeoutError."""
        end = time.time() + READY_S
        while not (
            len(cluster.sample()["working"]) == len(HOSTS)
            and all(last_step(self.folder / spec.name) >= 0 for spec in JOBS)
        ):
            if time.time() > end:
                raise TimeoutError(f"not all hosts train within {READY_S:.0f} s; see {self.folder}")
            time.sleep(1.0)

    def tell(self, problem: str) -> None:
        """Now, and in the report."""
        print(f"{time.strftime('%H:%M:%S')} {problem}", flush=True)
        write(self.folder / "problems.jsonl", {"at": time.time(), "problem": problem})


def write(path: Path, what: object) -> None:
    """As one line at the end of a file."""
    with path.open("a") as file:
        print(json.dumps(what), file=file)


def main() -> None:
    """Run, or tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("do", choices=("run", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mtbf", type=float, default=35.0, metavar="S", help="mean seconds between two faults")
    parser.add_argument("--device-ms", type=float, default=80.0, help="of one micro-batch")
    parser.add_argument("--sample-s", type=float, default=15.0, help="between two samples")
    parser.add_argument("--first-minutes", type=float, default=inf, help="of a run, to report")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.do == "report":
        for line in lines(folder, args.first_minutes):
            print(line)
        return
    folder.mkdir(parents=True)
    now = (time.time(), time.monotonic())
    soak = Soak(folder, Settings(*now, args.minutes, args.seed, args.mtbf, args.device_ms, args.sample_s))

    def end(_number: int, _frame: object) -> None:
        soak.is_over = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    soak.run()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
