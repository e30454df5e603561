"""Two jobs on four simulated hosts: one is lost, the plan moves another, and it comes back. One command shows it all:

    python examples/two_jobs/run.py

It starts an etcd, four agents that stand for hosts, and submits two jobs: "chat", whose FLOPs are worth twice as much
as those of "code". Each second it prints the cluster's WAF (weighted achieved FLOP/s) and who works where; then it
kills one host of chat, and starts it again. At the end it writes a picture, waf.svg.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from waf import Job, integral, picture, series

from unicron_elastic.base.extras import why_missing

try:
    from unicron_elastic.planning.coordinate.node_status import NodeState
    from unicron_elastic.rendezvous.plan.mirror import PlanMirror
    from unicron_elastic.rendezvous.records.plan_keys import PLAN
    from unicron_elastic.rendezvous.store.address import StoreAddress
    from unicron_elastic.rendezvous.store.open import open_store
    from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
except ImportError as error:
    if why_missing(error) is None:
        raise
    sys.exit(f"run.py: {why_missing(error)}.")

HERE = Path(__file__).parent
HOSTS = ("a", "b", "c", "d")
DEVICE_MS = 40.0
MICRO_BATCHES = {"chat": 8, "code": 12}
WEIGHTS = {"chat": 2.0, "code": 1.0}
NODES = {"chat": "1:2", "code": "1:4"}
MICRO_BATCH_FLOPS = 6 * 172_416 * 8.0  # as train.py counts them
FIRST_STEPS_S = 90.0


class Cluster:
    """An etcd, and agents on this machine that stand for hosts."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "UNICRON_ETCD_ENDPOINT": endpoint}
        self.endpoint = endpoint
        self.store = open_store(StoreAddress.parse(endpoint))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        """Start the host's agent."""
        env = {**self.env, "UNICRON_NODE_NAME": host, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(
                [_command("unicron"), "agent", "--address", "127.0.0.1"], env=env, stdout=log, stderr=log
            )

    def lose(self, host: str) -> None:
        """Kill the host's agent, and with it everything that runs there."""
        self.agents[host].kill()
        self.agents.pop(host).wait()

    def submit(self, name: str, weight: float, nodes: str, micro_batches: int, steps: int) -> Job:
        """Submit a job and leave it running."""
        log = self.folder / name
        log.mkdir()
        script = [str(HERE / "train.py"), "--steps", str(steps), "--micro-batches", str(micro_batches)]
        script += ["--device-ms", str(DEVICE_MS), "--times", str(log)]
        # Each lost node counts as a restart, as it does under torchrun.
        options = ["--cluster", self.endpoint, "--detach", "--rdzv-id", name, "--weight", str(weight)]
        options += ["--max-restarts", "100"]
        subprocess.run(
            [_command("unicron-run"), *options, "--nnodes", nodes, *script], env=self.env, check=True, cwd=self.folder
        )
        return Job(name, weight, MICRO_BATCH_FLOPS * micro_batches, log)

    def working(self) -> dict[str, list[str]]:
        """Which hosts work for which job; `unicron nodes` shows it as well."""
        found: dict[str, list[str]] = {}
        for node in self.seen().nodes.values():
            if node.state is NodeState.WORKING:
                found.setdefault(node.job, []).append(node.host)
        return {job: sorted(hosts) for job, hosts in found.items()}

    def reason(self) -> str:
        """Of the published plan, "" if it moves nobody; `unicron plan` shows it as well."""
        published = self.seen().published
        return "" if published is None or not published.plan.moves else published.reason

    def close(self) -> None:
        """End all agents."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait()
        self.store.close()

    def seen(self) -> PlanMirror:
        """Everything that is planned by, as it is now."""
        return PlanMirror(self.store.read_prefix(PLAN))


def _command(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


class Show:
    """A line a second, and a word when something happens."""

    def __init__(self, cluster: Cluster, jobs: list[Job]) -> None:
        self.cluster, self.jobs = cluster, jobs
        self.began_at = time.time()
        self.events: list[tuple[float, str]] = []
        self._reason = ""

    def say(self, words: str) -> None:
        """Note an event."""
        self.events.append((time.time() - self.began_at, words))
        print(f"\n>>> {words}", flush=True)

    def look(self, seconds: float) -> None:
        """Print for so long."""
        end = time.time() + seconds
        while (now := time.time()) < end:
            time.sleep(max(0.0, 1.0 - now % 1.0))
            now = time.time()
            waf = integral(self.jobs, now - 2.0, now) / 2.0 / 1e9
            working = self.cluster.working()
            who = "   ".join(f"{job.name}: {' '.join(working.get(job.name, ['-']))}" for job in self.jobs)
            print(f"{now - self.began_at:5.0f} s  WAF {waf:5.2f} GFLOP/s  {'#' * int(waf * 10):<24} {who}", flush=True)
            if (reason := self.cluster.reason()) not in ("", self._reason):
                self._reason = reason
                print(f"         plan: {reason}", flush=True)


def main() -> None:
    """Run the whole story; about two minutes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("two_jobs"), help="for logs and the picture")
    parser.add_argument("--seconds", type=float, default=20.0, help="between two events")
    args = parser.parse_args()
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        cluster = Cluster(etcd.endpoint, folder)
        stack.callback(cluster.close)
        for host in HOSTS:
            cluster.start(host)
        names = list(WEIGHTS)
        jobs = [cluster.submit(name, WEIGHTS[name], NODES[name], MICRO_BATCHES[name], 10**6) for name in names]
        show = Show(cluster, jobs)
        show.say("four hosts, two jobs")
        end = time.time() + FIRST_STEPS_S
        while sum(map(len, cluster.working().values())) < len(HOSTS) and time.time() < end:
            show.look(1.0)
        show.look(args.seconds)
        lost = cluster.working()["chat"][-1]
        cluster.lose(lost)
        show.say(f"host {lost} of chat is lost")
        show.look(args.seconds)
        cluster.start(lost)
        show.say(f"host {lost} is back")
        show.look(1.5 * args.seconds)
        rates = series(jobs, show.began_at, time.time())
        picture(rates, show.events, folder / "waf.svg")
        print(f"\nThe picture is in {folder / 'waf.svg'}; what each host did in {folder}/*.log.")


if __name__ == "__main__":
    main()
