"""Every reader of bytes from a socket, a store or a file, with what it raises for what is wrong, and valid input."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from unicron_elastic.base import ledger
from unicron_elastic.base.incident import Incident
from unicron_elastic.base.quarantine import Quarantined, to_document
from unicron_elastic.base.world import World
from unicron_elastic.detection.remote_ranks import NodeReport, parse_report, report_text
from unicron_elastic.detection.sample import GroupPosition, RankSample
from unicron_elastic.launcher.agent.core import failures, quarantine_file
from unicron_elastic.launcher.agent.core.worker_messages import WorkerMessages
from unicron_elastic.launcher.agent.process import whereabouts
from unicron_elastic.launcher.common.shelf_messages import SHELF_MESSAGES, FilesGiven
from unicron_elastic.launcher.node import submission
from unicron_elastic.launcher.view.cluster import what_if
from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.metrics.samples_text import parse_samples
from unicron_elastic.planning.allocate.plan import Plan
from unicron_elastic.planning.coordinate.node_status import NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobStatus
from unicron_elastic.planning.model.configured import parse_configurations
from unicron_elastic.planning.model.jobs import parse_job
from unicron_elastic.planning.model.measured import MeasuredJob
from unicron_elastic.rendezvous.cluster import heartbeat_wire
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello, Lines, Nonces, WireError
from unicron_elastic.rendezvous.records import cluster as cluster_records
from unicron_elastic.rendezvous.records import job as job_records
from unicron_elastic.rendezvous.records import news, plan_keys
from unicron_elastic.rendezvous.records import plan as plan_records
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.simulation.history import replay
from unicron_elastic.simulation.study import scenario_file as scenario_parse
from unicron_elastic.state.layout import Layout, flatten
from unicron_elastic.state.pull import wire as state_wire
from unicron_elastic.state.pull.distance import Address
from unicron_elastic.state.snapshot import exchange as snapshot_exchange
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.storage import manifest as storage_manifest
from unicron_elastic.testing import parse_chaos
from unicron_elastic.worker.helper_tasks import (
    KEEPER_ANSWERS,
    KEEPER_TASKS,
    WARM_ANSWERS,
    WARM_TASKS,
    HeldWarm,
    Launch,
    ProcessEnded,
    Remember,
    StartProcess,
    SweepAll,
    TakeUp,
    WarmUp,
)
from unicron_elastic.worker.instructions import (
    INSTRUCTIONS,
    AskPosition,
    BePatient,
    Instruction,
    Invitation,
    MakeSnapshot,
    NewWorld,
    RemoteSnapshot,
    ServeState,
    SnapshotOffers,
)
from unicron_elastic.worker.message import Kind, Message, Odd, heard
from unicron_elastic.worker.notices import (
    NOTICES,
    Broke,
    ControlWanted,
    Entered,
    FirstStep,
    FlopsPerStep,
    GroupCounts,
    LatestCollectives,
    Left,
    Parted,
    Position,
    Raised,
    Ready,
    Restored,
    Saving,
    SectionLimits,
    SectionOverdue,
    Served,
    SnapshotMade,
    SnapshotsWanted,
    StateTaken,
    WentOn,
)
from unicron_elastic.worker.rank_monitor.config import FaultToleranceConfig
from unicron_elastic.worker.worlds import Link

__all__ = ["PARSERS", "Parser"]


@dataclass(frozen=True)
class Parser:
    """``errors`` are those that its module names for wrong input. ``where``: the module, by its file."""

    name: str
    where: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (ValueError,)
    took_max_s: float = 2.0  # of processor time; most take a hundredth of it

    def complaint(self, data: bytes) -> str:
        """What it says of wrong input; "" if it takes it. Raises whatever else it raises."""
        try:
            self.read(data)
        except self.errors as error:
            return str(error) or type(error).__name__
        return ""


SECRET = "5e" * 32
HEADER = Header(
    step=7, lineage=1, rank=0, world_size=2, is_replicated=True, has_own_parts=True, is_for_peer=False, layout_bytes=10,
    layout_sum="0" * 32, data_at=8192, data_bytes=64, data_sum="0" * 32,
)  # fmt: skip
ADDRESS = Address("host", "boot", 7, ("10.0.0.1", 4711), "name", "rack-1", "snapshot").to_dict()
WORLD = {
    "number": 2, "members": [["a", "n1", 0], ["b", "n2", 0]], "store": "10.0.0.1:4711", "reason": "A node came.",
    "restarts_used": 1,
}  # fmt: skip
INCIDENT = Incident(
    number=1, run_id="run", job="train.py", host="n1", time="2026-01-01T00:00:00.000+00:00", generation=1, rank=0,
    status="killed by signal", severity=2, method="process supervision", reason="rank 0 was killed.", action="restart",
    decision="Restart 1 of 3.", restarts_used=1, max_restarts=3, occurred_at=1.0, noticed_at=1.5, first_step_at=9.0,
)  # fmt: skip
SPEC = {
    "name": "chat", "command": ["python", "train.py"], "directory": "/home", "env": {"A": "b"}, "nproc_per_node": 4,
    "min_nodes": 1, "max_nodes": 8, "weight": 1.5,
}  # fmt: skip
MEASURED = {
    "is_global_batch_fixed": True, "steps": [], "now": None, "grow_s": [], "shrink_s": [], "replace_s": [],
}  # fmt: skip


def _json(told: Any) -> bytes:
    return json.dumps(told).encode()


def _text(data: bytes) -> str:
    """As it comes from the environment or a command line."""
    return os.fsdecode(data)


def _entry(key: str, data: bytes) -> Entry:
    return Entry(key=key, value=data, revision=5, created=5, lease_id=None)


def _of_entry(parse: Callable[[Entry], object], key: str) -> Callable[[bytes], object]:
    return lambda data: parse(_entry(key, data))


def _in_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """Writes what is read to a file first, of memory where there is such a folder."""

    def call(data: bytes) -> object:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            return read(path)

    return call


def _with_its_checksum(data: bytes) -> bytes:
    """A page of a snapshot of which only what is inside is wrong: a script may write that as well."""
    length, crc = len(data).to_bytes(4, "little"), zlib.crc32(data).to_bytes(4, "little")
    return b"unisnap1" + length + crc + data


# -- what workers say ------------------------------------------------------------------------------------------------

WORKER_MESSAGES: tuple[dict[str, Any], ...] = (
    *(
        said.message()
        for said in (
            Position(
                question=1,
                groups=(GroupCounts(name="g", begun=3, ended=2, op="all_reduce"),),
                uses_gpu=True,
                is_at_prompt=False,
            ),
            LatestCollectives(first=1, at_us=(1, 2, 3), ops=("all_reduce",), op=(0, 0, 0)),
            Served(newcomer=1, address={"tcp": ["a", 1]}),
            SnapshotMade(slot=1, is_for_peer=True),
            SnapshotsWanted(rank=0, world_size=2),
            FirstStep(step=1, stack_fd=5),
            SectionLimits(
                first_heartbeat_s=None, heartbeat_s=1.0, out_of_section_s=None, sections_s={"train": 1.5, "save": None}
            ),
            FlopsPerStep(flops=1e15),
            Saving(will_save=True),
            SectionOverdue(section="save", open_s=3.0, limit_s=2.0),
            ControlWanted(action="restart", description="x"),
            Entered(),
            Entered(replica_size=2),
            Ready(state=3),
            Left(),
            Broke(world=2, error="RuntimeError: Connection reset by peer"),
            WentOn(world=2, reused=3, recomputed=4, regrouped_ns=5),
            Parted(),
            Parted(world=2),
            Restored(step=7, sentence="Goes on from step 7.", bytes_taken=8, took_s=0.1, sources=("a",)),
            StateTaken(bytes_taken=8, took_s=0.1, sources=("a",)),
            Raised(is_final=True, at_ns=5, exception={"type": "E", "message": "m", "stack": "s", "location": None}),
        )
    ),
)


INSTRUCTED: tuple[Instruction, ...] = (
    NewWorld(world=World.from_message(WORLD), name="a"),
    Invitation(sources=({"tcp": ["a", 1]},), key="ab"),
    BePatient(patience_s=30.0),
    ServeState(newcomer=1, key="ab"),
    AskPosition(question=1),
    SnapshotOffers(
        slots=(0, None), remote=(RemoteSnapshot(header=asdict(HEADER), address=ADDRESS, key="ab"),), is_restart=True
    ),
    MakeSnapshot(),
)
LAUNCH = Launch(argv=("a",), env={"A": "b"}, preload="c", streams=("d",), standing={"umask": "0022"})
ON_HOST: tuple[Message, ...] = (
    StartProcess(number=1, argv=("a", "b"), env={"A": "b"}, cwd="/", targets=(3,), ignored_signals=(1,)),
    SweepAll(number=2, keep=(7, 8)),
    Remember(token="t", paths=("/a",), farewell="x"),
    WarmUp(launch=LAUNCH, sets=("B",)),
    TakeUp(launch=LAUNCH, sets=("B",), mark="m"),
    HeldWarm(since=1.5, warm=7, code="c", has_learned=True),
    ProcessEnded(pid=7, exit_code=-9, at_ns=5),
    FilesGiven(places=((0, 1), (1, 2))),
)


@contextmanager
def _agent() -> Iterator[tuple[WorkerMessages, Any]]:
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=0, local_rank=0, id=1)])
    said: list[object] = []
    messages = WorkerMessages(
        1,
        group,
        "n1",
        post=said.append,
        say=said.append,
        say_once=lambda *told: said.append(told),
        why_killed=lambda _code, _at: "",  # type: ignore[arg-type]
    )
    worker = MagicMock(local_rank=0, reading=lambda: None)
    worker.answered.side_effect = whereabouts.groups_of
    worker.answered_arrivals.side_effect = whereabouts.arrivals_of
    yield messages, worker


def _heard(data: bytes, kinds: Sequence[type[Kind]]) -> Kind:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("no message") from None
    if not isinstance(message, dict):
        raise ValueError("no message")
    said = heard(message, kinds)
    if isinstance(said, Odd):
        raise ValueError(said.why)
    return said


def _hear(data: bytes) -> None:
    """A message of a worker, from its channel to the events that the agent makes of it."""
    with _agent() as (messages, worker):
        messages.said(worker, _heard(data, NOTICES))


def _hear_agent(data: bytes) -> None:
    """A message of the agent, from its channel to the training loop."""
    Link(MagicMock(), lambda: None).heard(_heard(data, INSTRUCTIONS))


def _hear_on_host(data: bytes) -> None:
    """A message between the agent and its helpers, or that of its node."""
    kinds: tuple[type[Message], ...] = (*KEEPER_TASKS, *KEEPER_ANSWERS, *WARM_TASKS, *WARM_ANSWERS, *SHELF_MESSAGES)
    _heard(data, kinds)


# -- lists -----------------------------------------------------------------------------------------------------------


def _lines(data: bytes) -> None:
    lines = Lines()
    for start in range(0, len(data), 1000):
        list(lines.take(data[start : start + 1000]))


def _ledger(path: Path) -> None:
    _, problems = ledger.read_ledger(path)
    if problems:
        raise ValueError(problems[0])


def _error_file(path: Path) -> None:
    failures.recorded_exception(str(path))


def _plan() -> Published:
    spec = parse_job(SPEC)
    job = JobStatus(spec=spec, rates_flops=(0.0, 1e12, 2e12))
    nodes = tuple(NodeStatus(node_id=f"n{place}", host=f"n{place}") for place in range(3))
    return propose(ClusterSnapshot(nodes=nodes, jobs=(job,)), 1e9)


def _layout() -> bytes:
    return flatten({"w": torch.zeros(3, 2), "n": [1, 2.5, None, "x"]})[0].to_json().encode()


def _records() -> Iterator[Parser]:
    """What is in etcd, and what another node writes to the store of a round."""
    quarantined = Quarantined(node="n1", reason="ECC", since=1.0, until=None, by="ada")
    node = {
        "node_id": "n1", "host": "n1", "label": "", "state": "idle", "job": "", "towards": "",
        "refusals": [["chat", 1.0]],
    }  # fmt: skip
    told_news = {
        "at_unix_s": 1.0, "step": 5, "step_s": 0.5, "stepped_unix_s": 1.0, "world": 2, "nodes": 1, "workers": 2,
        "restarts_used": 0, "max_restarts": 3, "is_incident_open": False,
    }  # fmt: skip
    agent = {"node_id": "n1", "host": "n1", "job": "j", "label": "", "pid": 1, "is_spare": False, "address": "n1:1"}
    leader = {"node_id": "n1", "host": "n1", "address": "n1:1", "is_dedicated": True, "since_unix_s": 1.0}
    spec = dict.fromkeys(cluster_records._NUMBERS, 1)
    job = _json({**spec, "argv": ["x"], "cwd": "/", "env": {"A": "b"}})
    rows: list[tuple[str, Any, str, bytes]] = [
        ("agent", cluster_records.parse_node, cluster_records.node_key("n1"), _json(agent)),
        ("leader", cluster_records.parse_leader, "k", _json(leader)),
        ("quarantined", cluster_records.parse_quarantined, cluster_records.quarantine_key("n1"),
         cluster_records.quarantine_text(quarantined)),
        ("roster", cluster_records.parse_roster, cluster_records.roster_key("n1"), cluster_records.roster_text(
            cluster_records.RosterRecord(host="n1", node_id="n1/1", reason="It is silent.", lost_unix_s=1.0))),
        ("job", cluster_records.parse_spec, "k", job),
        ("member", job_records.parse_member, "k", job_records.member_text(
            JobMember(node_id="n1", host="n1", label="", joined=5, waits_for=0))),
        ("round", job_records.parse_round, "k", job_records.round_text(Round(number=1, places=(Place("n1", "n1"),)))),
        ("lost", job_records.parse_lost, "k", job_records.lost_text("n1", "It is silent.", has_ended=True)),
        ("departing", job_records.parse_departing, "k", job_records.departing_text("n1", "It is sick.")),
        ("node status", plan_records.parse_node_status, plan_keys.status_key("n1"), _json(node)),
        ("order", plan_records.parse_order, "k", _json({"source": "", "target": "chat", "plan": 5, "reason": "r"})),
        ("planned job", plan_records.parse_spec, plan_keys.PlannedJobKeys("chat").spec, _json(SPEC)),
        ("phase", plan_records.parse_phase, "k", _json(
            {"phase": "finished", "reason": "r", "nodes": 1, "exit_code": 0, "signal": 15})),
        ("rates", plan_records.parse_rates, "k", plan_records.rates_text((0.0, 1e12))),
        ("faults", plan_records.parse_faults, "k", _json({"faults": 1, "node_s": 2.5})),
        ("published", plan_records.parse_published, "k", _plan().to_json().encode()),
        ("news", news.parse_job_news, "k", _json(told_news)),
        ("incidents", news.parse_incidents, news.incidents_key("n1"), news.incidents_text([INCIDENT])),
    ]  # fmt: skip
    for name, parse, key, seed in rows:
        yield Parser(f"record-{name.replace(' ', '-')}", parse.__module__, _of_entry(parse, key), (seed,))


def _of_sockets() -> Iterator[Parser]:
    nonces = Nonces("c", "n")
    hello, _ = Hello("n1", "n1", "job").line(SECRET, {"nonce": "c"})
    wire = "rendezvous/cluster/heartbeat_wire.py"
    wrong = (WireError,)
    told = heartbeat_wire.welcome(SECRET, nonces, 0.25)
    yield Parser("hello", wire, lambda data: Hello.parse(heartbeat_wire.read(data), SECRET, "c"), (hello,), wrong)
    yield Parser(
        "challenge", wire, lambda data: Hello("n1", "n1", "j").line(SECRET, heartbeat_wire.read(data)),
        (_json({"nonce": "c"}),), wrong,
    )  # fmt: skip
    yield Parser(
        "welcome", wire, lambda data: heartbeat_wire.read_welcome(heartbeat_wire.read(data), SECRET, nonces),
        (told, _json({"refused": "no"})), wrong,
    )  # fmt: skip
    sealed = heartbeat_wire.sealed_line({"a": 1}, heartbeat_wire.seal_of(SECRET, nonces, is_coordinator=False))
    yield Parser(
        "sealed-line", wire,
        lambda data: heartbeat_wire.read_sealed(
            data, heartbeat_wire.seal_of(SECRET, nonces, is_coordinator=True)), (sealed[:-1],), wrong,
    )  # fmt: skip
    yield Parser("lines", wire, _lines, (b"\n\n{}\n" + sealed,), wrong)
    yield Parser(
        "state-frame",
        "unicron_elastic/state/pull/wire.py",
        state_wire.read,
        (_json({"do": "hold"}),),
        (state_wire.PullWireError,),
    )
    yield Parser(
        "state-layout", "unicron_elastic/state/layout.py", lambda data: Layout.parse(_text(data)), (_layout(),)
    )
    yield Parser("state-address", "unicron_elastic/state/pull/distance.py", _parse_address, (_json(ADDRESS),))
    yield Parser(
        "remote-snapshot", "unicron_elastic/state/snapshot/exchange.py",
        snapshot_exchange.parse_remotes,
        (_json([{"header": asdict(HEADER), "address": ADDRESS, "key": "ab" * 32}]),),
    )  # fmt: skip
    yield Parser(
        "snapshot-header", "unicron_elastic/state/snapshot/file.py",
        lambda data: Header.parse(_with_its_checksum(data)), (_json(asdict(HEADER)),),
    )  # fmt: skip
    yield Parser("snapshot-page", "unicron_elastic/state/snapshot/header.py", Header.parse, (HEADER.pack(),))
    yield Parser("worker", "launcher/agent/core/worker_messages.py", _hear, tuple(map(_json, WORKER_MESSAGES)))
    told = tuple(_json(each.message()) for each in INSTRUCTED)
    yield Parser("instruction", "unicron_elastic/worker/worlds.py", _hear_agent, told)
    on_host = tuple(_json(each.message()) for each in ON_HOST)
    yield Parser("helper", "unicron_elastic/worker/message.py", _hear_on_host, on_host)
    yield Parser("world", "unicron_elastic/base/world.py", World.parse, (_json(WORLD),))
    rank = RankSample(rank=0, step=3, groups=(GroupPosition(name="g", begun=3, ended=2),))
    yield Parser(
        "report-of-ranks", "unicron_elastic/detection/remote_ranks.py", parse_report,
        (report_text(NodeReport(asked=1, node="n1", at=1.0, ranks=(rank,))).encode(),),
    )  # fmt: skip
    samples = (b'[["unicron_step", ["job"], 5]]', b"[]")
    yield Parser("metrics-of-a-job", "unicron_elastic/metrics/samples_text.py", parse_samples, samples)


def _parse_address(data: bytes) -> Address:
    return Address.parse(state_wire.read(data))


def _of_files() -> Iterator[Parser]:
    record = _json(INCIDENT.to_json())
    entry = Quarantined(node="n1", reason="ECC", since=1.0, until=2.0, by="ada")
    csv = b"# nodes: 3\n# duration_s: 100\nat_s,event,node,kind,repair_s\n1,fault,1,link flapping,\n5,leave,2,,\n"
    bamboo = b"0,add,a\n0,add,b\n100,remove,a\n200,add,c\n"
    scenario = _json({"name": "s", "nodes": 4, "history": {"preset": "trace-a"}, "checkpoint_s": 60})
    yield Parser(
        "ledger", "unicron_elastic/base/ledger.py", _in_file(_ledger, "incidents.jsonl"), (record + b"\n" + record,)
    )
    yield Parser(
        "quarantine", "launcher/agent/core/quarantine_file.py", _in_file(quarantine_file.read, "quarantine.json"),
        (_json(to_document([entry])),), (quarantine_file.QuarantineFileError,),
    )  # fmt: skip
    yield Parser("history", "unicron_elastic/simulation/history/replay.py",
                 _in_file(replay.read_history, "history.csv"),
                 (csv, bamboo, record))  # fmt: skip
    yield Parser("scenario", "unicron_elastic/simulation/study/scenario_file.py",
                 _in_file(scenario_parse.read_scenario, "scenario.json"), (scenario,))  # fmt: skip
    yield Parser("job-file", "launcher/view/cluster/what_if.py",
                 _in_file(lambda path: what_if.read_job_file(str(path)), "job.json"), (_json(SPEC),))  # fmt: skip
    yield Parser("job-spec-file", "launcher/node/submission.py",
                 _in_file(lambda path: submission._from_file(str(path)), "spec.json"),
                 (b'{"unit_nodes": 2, "weight": 1.5}',))  # fmt: skip
    yield Parser(
        "manifest", "unicron_elastic/state/storage/manifest.py",
        _in_file(lambda path: storage_manifest.check(path.parent), storage_manifest.MANIFEST), (_json({"files": {}}),),
    )  # fmt: skip
    yield Parser(
        "error-file", "launcher/agent/core/failures.py", _in_file(_error_file, "error.json"),
        (_json({"message": {"message": "E: text", "extraInfo": {"py_callstack": "s", "timestamp": "1"}}}),), (),
    )  # fmt: skip
    yield Parser(
        "ft-launcher-yaml", "unicron_elastic/worker/rank_monitor/config.py",
        _in_file(lambda path: FaultToleranceConfig.from_yaml_file(str(path)), "ft.yaml"),
        (b"fault_tolerance:\n  initial_rank_heartbeat_timeout: 10\n  safety_factor: 3.0\n",),
        took_max_s=60.0,  # PyYAML takes the square of the depth; the file is the user's own
    )  # fmt: skip


def _of_texts() -> Iterator[Parser]:
    yield Parser("etcd-endpoint", "rendezvous/store/address.py", lambda data: StoreAddress.parse(_text(data)),
                 (b"http://10.0.0.1:2379,[::1]:2379,etcd",))  # fmt: skip
    yield Parser("chaos-plan", "unicron_elastic/testing/parse_chaos.py", lambda data: parse_chaos.parse(_text(data)),
                 (b"kill:rank=0,step=3;hang:rank=1,after=2.5",))  # fmt: skip
    yield Parser(
        "plan", "unicron_elastic/planning/allocate/plan.py", Plan.from_json, (_plan().plan.to_json().encode(),)
    )
    yield Parser("measured", "unicron_elastic/planning/model/measured.py", MeasuredJob.from_json, (_json(MEASURED),))
    yield Parser("configurations", "unicron_elastic/planning/model/configured.py",
                 lambda data: parse_configurations(_text(data)), (b'{"2": {"replicas": 2, "tensor": 1}}',))  # fmt: skip


PARSERS = {each.name: each for make in (_records, _of_sockets, _of_files, _of_texts) for each in make()}
