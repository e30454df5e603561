"""Who takes part in the comparison of peers: what is started for each, on one node or on two, with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _launchers import TORCHRUN
from _recovery_competitors import Command, Job, free_port

SCRIPTS = Path(__file__).parent / "peers"
FAULTS = ("kill", "exception", "hang", "node")
RANKS = 2
FRESH_STORE = dict(TORCHRUN.environment)  # without it torchrun's restarts fail on gloo
TUNED_TIMEOUT = ("--timeout-s=10",)
# DLRover kills every process of the machine that looks like an orphaned worker, whoever's it is: so it sees no others.
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh")


@dataclass(frozen=True)
class Start(Command):
    """A process to start. ``node``: whose agent it is; ``port``: where it must answer before the next one starts."""

    node: int | None = None
    port: int | None = None


@dataclass(frozen=True)
class Peer:
    """One column of the table. ``settings`` says in words what differs from the tool's defaults."""

    name: str
    tool: str
    script: str
    settings: str
    faults: tuple[str, ...] = FAULTS
    options: tuple[str, ...] = ()  # of the launcher, always
    node_options: tuple[str, ...] = ()  # of the launcher, where there are several nodes
    lighthouse: tuple[str, ...] = ()  # of torchft's
    script_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    not_replaced: tuple[str, ...] = ("node",)  # faults after which the world stays smaller

    @property
    def lighthouse_options(self) -> tuple[str, ...]:
        """As torchft's README starts it, and what this peer says."""
        return ("--min_replicas=1", *self.lighthouse)


def peers() -> list[Peer]:
    """All of them, in the order of the table."""
    without_exception = tuple(fault for fault in FAULTS if fault != "exception")
    return [
        Peer("torchrun", "torchrun", "train_torchrun.py", "none", without_exception),
        Peer(
            "torchrun, tuned",
            "torchrun",
            "train_torchrun.py",
            "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`; collectives give up after 10 s; nodes: "
            "`last_call_timeout=1,keep_alive_interval=1`",
            node_options=("--rdzv-conf=last_call_timeout=1,keep_alive_interval=1",),
            script_options=TUNED_TIMEOUT,
            environment=FRESH_STORE,
        ),
        Peer(
            "torchft",
            "torchft",
            "train_torchft.py",
            "those of its README and example: join time-out 10 s, tick 100 ms, collectives give up after 5 s, manager "
            "after 10 s; heartbeat time-out 5 s (default)",
            without_exception,
            lighthouse=("--quorum_tick_ms=100", "--join_timeout_ms=10000"),
            script_options=("--timeout-s=5",),
            not_replaced=("hang", "node"),
        ),
        Peer(
            "torchft, tuned",
            "torchft",
            "train_torchft.py",
            "heartbeat time-out 500 ms, join time-out 1 s, tick 10 ms; time-outs of collectives and manager as above",
            lighthouse=("--quorum_tick_ms=10", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=500"),
            script_options=("--timeout-s=5",),
            not_replaced=("hang", "node"),
        ),
        Peer(
            "ft_launcher",
            "nvrx",
            "train_torchrun.py",
            "none; one spare node for the lost one",
            without_exception,
            not_replaced=(),
        ),
        Peer(
            "ft_launcher, tuned",
            "nvrx",
            "train_nvrx.py",
            "heartbeats, with time-outs calculated by its own `calculate_and_set_hb_timeouts` after ten steps; "
            "`--monitor-interval=0.1` (default 0.3), `--ft-workload-check-interval=0.5` (default 5); collectives give "
            "up after 10 s; one spare node",
            options=("--monitor-interval=0.1", "--ft-workload-check-interval=0.5"),
            script_options=TUNED_TIMEOUT,
            not_replaced=(),
        ),
        Peer("dlrover-run", "dlrover", "train_torchrun.py", "none", without_exception),
        Peer(
            "dlrover-run, tuned",
            "dlrover",
            "train_dlrover.py",
            "Flash Checkpoint: each step into memory, each tenth to storage; `--save-at-breakpoint`; collectives give "
            "up after 10 s; nodes: `lastcall_timeout=1` (default 60)",
            options=("--save-at-breakpoint",),
            node_options=("--rdzv-conf=lastcall_timeout=1",),
            script_options=TUNED_TIMEOUT,
        ),
        Peer("unicron-run", "unicron", "train_torchrun.py", "none"),
        Peer("unicron-run, tier 2", "unicron", "train_unicron.py", "none"),
    ]


@dataclass(frozen=True)
class Bound:
    """A peer with its programs and the number of nodes: what ``RunningJob`` starts."""

    peer: Peer
    programs: Path  # the folder of its console scripts
    is_several_nodes: bool

    @property
    def name(self) -> str:
        """Of the peer."""
        return self.peer.name

    @property
    def replaces(self) -> bool:
        """Not asked here; ``Peer.not_replaced`` says it for each fault."""
        return False

    def problem(self) -> str | None:
        """Whether it is installed."""
        python = self.programs / "python"
        return None if python.exists() else f"{python} does not exist"

    def replacement(self, job: Job, slot: int) -> None:
        """Each launcher sees to its own."""

    def commands(self, job: Job) -> list[Command]:
        """What is started, in this order."""
        if self.peer.tool == "torchft":
            return list(self._replicas(job))
        return list(self._nodes(job) if self.is_several_nodes else self._one_node(job))

    def _one_node(self, job: Job) -> Iterator[Start]:
        own = (f"--nproc-per-node={RANKS}", "--max-restarts=3", *self._logs(job, 0), *self.peer.options)
        meeting: tuple[str, ...] = ("--standalone",)
        environment = self._environment(job)
        if self.peer.tool == "nvrx":
            meeting = ("--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
        if self.peer.tool == "dlrover":  # its own start of the master does not fit this torch: see the page
            meeting = ("--nnodes=1",)
            master = self._dlrover_master(1)
            yield master
            environment |= self._dlrover_node(job, master, 0, 1)
        yield Start(self._words(job, *meeting, *own), environment, node=0)

    def _nodes(self, job: Job) -> Iterator[Start]:
        """Two agents with a rank each, and what they meet by; a third in reserve where nobody goes on with fewer."""
        port = free_port()
        master = None
        backend: tuple[str, ...] = ("--rdzv-id=peers", f"--rdzv-endpoint=127.0.0.1:{port}")
        nodes = "1:2"
        match self.peer.tool:
            case "unicron":
                words = (str(self.programs / "unicron"), "etcd", "--port", str(port))
                yield Start(words, port=port)
                backend += ("--rdzv-backend=unicron",)
            case "dlrover":
                master = self._dlrover_master(2)
                yield master
                backend = ()
            case _:
                backend += ("--rdzv-backend=c10d",)
        if self.peer.tool == "nvrx":
            nodes = "2:3"
        count = 3 if self.peer.tool == "nvrx" else 2
        own = (f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", *backend, *self.peer.options)
        for node in range(count):
            mine = {"PEERS_FIRST_SLOT": str(node)}
            if master is not None:
                mine |= self._dlrover_node(job, master, node, count)
            # ft_launcher refuses two nodes of one address.
            address = (f"--local-addr=127.0.0.{node + 1}",) if self.peer.tool == "nvrx" else ()
            words = self._words(job, *own, *address, *self.peer.node_options, *self._logs(job, node))
            # The first one holds the store of c10d: it is not the node that is lost.
            is_store = node == 0 and self.peer.tool in ("torchrun", "nvrx")
            yield Start(words, {**self._environment(job), **mine}, node=node, port=port if is_store else None)

    def _dlrover_master(self, nodes: int) -> Start:
        port = free_port()
        own = ("--platform=local", f"--node_num={nodes}", "--job_name=peers", f"--port={port}")
        words = (*ALONE, str(self.programs / "python"), "-m", "dlrover.python.master.main", *own)
        return Start(words, port=port)

    def _dlrover_node(self, job: Job, master: Start, node: int, nodes: int) -> dict[str, str]:
        named = {"NODE_RANK": str(node), "NODE_ID": str(node), "WORKER_RANK": str(node), "NODE_NUM": str(nodes)}
        named["ELASTIC_JOB_NAME"] = f"{job.folder.name}-{node}"  # by which it names its shared memory
        return {"DLROVER_MASTER_ADDR": f"127.0.0.1:{master.port}", **named}

    def _replicas(self, job: Job) -> Iterator[Start]:
        """The lighthouse, then each replica with a launcher of its own: that is also what a node is to torchft."""
        port = free_port()
        program = str(self.programs / "torchft_lighthouse")
        yield Start((program, f"--bind=127.0.0.1:{port}", *self.peer.lighthouse_options), port=port)
        for replica in range(RANKS):
            own = ("--standalone", "--nproc-per-node=1", "--max-restarts=3", *self._logs(job, replica))
            mine = {
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                "REPLICA_GROUP_ID": str(replica),
                "NUM_REPLICA_GROUPS": str(RANKS),
                "PEERS_FIRST_SLOT": str(replica),
            }
            yield Start(self._words(job, *own), {**self._environment(job), **mine}, node=replica)

    def _words(self, job: Job, *options: str) -> tuple[str, ...]:
        program = {"nvrx": "ft_launcher", "dlrover": "dlrover-run", "unicron": "unicron-run"}
        path = self.programs / program.get(self.peer.tool, "torchrun")
        script = str(SCRIPTS / self.peer.script)
        alone = ALONE if self.peer.tool == "dlrover" else ()
        return (*alone, str(path), *options, script, *job.options, *self.peer.script_options)

    def _environment(self, job: Job) -> dict[str, str]:
        # ft_launcher leaves its sockets in the temporary folder; the job's own is cleared away.
        own = {"TMPDIR": str(job.folder)} if self.peer.tool == "nvrx" else {}
        return {**self.peer.environment, **own}

    def _logs(self, job: Job, node: int) -> tuple[str, ...]:
        return (f"--log-dir={job.folder / 'logs' / str(node)}",)
