"""``unicron plan``, ``jobs set``, and what ``jobs``, ``nodes`` and ``cancel`` say of planned jobs; with a real etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_lab import job, node, publish, put_cluster, spec, two_jobs
from typer.testing import CliRunner

from unicron_elastic.base.quarantine import LAUNCHER, Quarantined
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.config.answers import local_time
from unicron_elastic.launcher.view.cluster.plan import PlanReading, plan_reading, proposal_view, published_view
from unicron_elastic.launcher.view.cluster.plan_text import amount, plan_text, span
from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.planning.coordinate.node_status import NodeState
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.rendezvous.records.cluster import NodeRecord, node_key, node_text, quarantine_key, quarantine_text
from unicron_elastic.rendezvous.records.job import JobKeys, member_text, round_text
from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_phase, parse_spec, phase_text, spec_text
from unicron_elastic.rendezvous.records.plan_keys import CURRENT, PLAN, PlannedJobKeys, run_of_start
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.rendezvous.store.options import OPTIONS
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

NAMED_BINARY = os.environ.get("UNICRON_TEST_ETCD")
DEADLINE_S = 60.0
LONG_AGO_S = 3600.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    """One server for all tests of this file."""
    with EmbeddedEtcd(binary=Path(NAMED_BINARY) if NAMED_BINARY else None) as server:
        yield server


@pytest.fixture(autouse=True)
def _operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is ada, and nothing is said of etcd."""
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "ada")
    for name in [name for name in os.environ if name.startswith(("UNICRON_ETCD_", "PET_RDZV_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def store(etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store that the commands look at, empty at first."""
    monkeypatch.setenv("UNICRON_ETCD_ENDPOINT", etcd.endpoint)
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as opened:
        for entry in opened.read_prefix("").entries:
            opened.delete(entry.key)
        yield opened


@pytest.fixture
def planned(store: Store) -> Store:
    """With two jobs on six nodes, and a plan of an hour ago that gives the idle node to code."""
    put_cluster(store, two_jobs())
    publish(store, _read(store).snapshot, time.time() - LONG_AGO_S)
    return store


def _read(store: Store) -> PlanReading:
    return plan_reading(store.read_prefix(""), time.time())


def _unicron(*arguments: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def _output(*arguments: object) -> str:
    """Of a command that finds nothing wrong."""
    result = _unicron(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return str(result.stdout)


def _spec(store: Store, name: str) -> JobSpec:
    entry = store.read(PlannedJobKeys(name).spec).entry
    assert entry is not None
    return parse_spec(entry)


# -- plan --------------------------------------------------------------------------------------------------------------


def test_the_published_plan(planned: Store) -> None:
    revision = _read(planned).snapshot.plan_revision
    heading, *lines = _output("plan").splitlines()
    at = f"{local_time(time.time() - LONG_AGO_S):%Y-%m-%d %H:}"
    assert heading.startswith(f"Plan {revision} of {at}")
    assert ": This is the first plan; code gets an idle node: " in heading
    assert heading.endswith("of code standing still.")
    assert lines[0].startswith("It is overtaken: The last plan was to be looked at again about now.")
    assert lines[1:6] == [
        "job   works  joins  leaves  plan  weight  FLOP/s  F",
        "chat  3      -      -       3     1.5     8.46 T  12.7 T",
        "     n1, n2, n3",
        "code  2      -      -       3     1       5.64 T  5.64 T",
        "     n4, n5, n6",
    ]
    assert lines[6].startswith(
        "WAF 16.5 TFLOP/s before, 18.3 TFLOP/s after; getting there costs 13.9 s of it; the next"
    )
    assert lines[7:] == ["Under way:", "     n6 goes to code"]


def test_the_published_plan_for_programs(planned: Store) -> None:
    told = json.loads(_output("plan", "--json"))
    assert (told["is_published"], told["what_if"], told["nodes"]) == (True, [], 6)
    assert told["revision"] == _read(planned).snapshot.plan_revision
    assert told["published_unix_s"] == pytest.approx(time.time() - LONG_AGO_S, abs=30.0)
    chat, code = told["jobs"]
    assert code == {
        "job": "code",
        "phase": "running",
        "before": 2,
        "working": 2,
        "joining": 0,
        "leaving": 0,
        "planned": 3,
        "hosts": ["n4", "n5", "n6"],
        "weight": 1.0,
        "rate_flops": pytest.approx(5.64e12),
        "weighted_flops": pytest.approx(5.64e12),
        "waits": "",
    }
    assert chat["weighted_flops"] == pytest.approx(1.5 * 8.46e12)
    (move,) = told["moves"]
    assert (move["host"], move["source"], move["target"]) == ("n6", "", "code")
    assert move["reason"].startswith(f"n6 goes to code by plan {told['revision']}: This is the first plan")
    assert told["lost_s"] == pytest.approx(told["lost_flop"] / told["waf_before_flops"])
    assert told["running_s"] > 0


def test_without_a_plan_the_one_that_would_be(store: Store) -> None:
    put_cluster(store, two_jobs())
    text = _output("plan")
    assert text.startswith("No plan is published yet. It would be: This is the first plan; ")
    assert text.endswith("Then:\n     n6 goes to code\n")
    told = json.loads(_output("plan", "--json"))
    assert (told["is_published"], told["revision"], told["published_unix_s"]) == (False, 0, None)
    assert store.read(CURRENT).entry is None


def test_nodes_without_a_job(store: Store) -> None:
    put_cluster(store, ClusterSnapshot(nodes=(node("a"), node("b"))))
    text = _output("plan")
    assert "No job is planned.\nidle: a, b\n" in text
    assert "WAF 0 FLOP/s; the next fault is expected in " in text


def test_a_cluster_of_nothing_is_a_sentence(store: Store, etcd: EmbeddedEtcd) -> None:
    sentence = f"unicron: No node and no job that is planned for is in the cluster at {etcd.endpoint}.\n"
    assert store.read_prefix("").entries == ()
    result = _unicron("plan")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", sentence)
    result = _unicron("plan", "--json")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (1, None, sentence)


def test_who_is_on_its_way_and_who_is_kept_out(store: Store) -> None:
    put_cluster(
        store,
        ClusterSnapshot(
            nodes=(
                node("n1", "chat"),
                node("n2", "chat", NodeState.JOINING),
                node("n3", "code", NodeState.LEAVING, towards="chat"),
                node("n4"),
                node("n5"),
            ),
            jobs=(job(spec("chat", 3.0, 3)), job(spec("code", 2.0, min_nodes=9, max_nodes=9), JobPhase.SUBMITTED)),
        ),
    )
    for host, by in (("n4", LAUNCHER), ("n5", "ada")):
        entry = Quarantined(node=host, reason="x", since=1000.0, until=None, by=by, is_broken=by == LAUNCHER)
        store.put(quarantine_key(host), quarantine_text(entry))
    text = _output("plan")
    assert "chat  1      1      -       3  " in text
    assert "code  -      -      1       0  " in text
    assert "     code waits: it needs at least 9 nodes, and there are 3.\n" in text
    assert "\nbroken: n4\nto be drained: n5\n" in text
    assert text.endswith("Then:\n     n2 joins chat\n     n3 leaves code for chat\n")


def test_what_cannot_be_read_is_told_once_and_the_rest_is_shown(planned: Store) -> None:
    planned.put(PlannedJobKeys("odd").spec, b"junk")
    planned.put(quarantine_key("y"), b"{}")
    for command in ("plan", "jobs", "nodes"):
        result = _unicron(command)
        assert result.exit_code == 0
        assert "chat" in result.stdout
        told = result.stderr.splitlines()
        assert len(told) == 2
        assert all(line.startswith("unicron: Skipped: ") for line in told)


# -- what if -----------------------------------------------------------------------------------------------------------


def test_what_if_says_what_would_move_and_writes_nothing(planned: Store) -> None:
    before = planned.read_prefix("")
    text = _output("plan", "--what-if", "lose n1", "--what-if", "weight code 2, join 1 node")
    assert planned.read_prefix("") == before
    lines = text.splitlines()
    assert lines[0] == "What if: lose n1; weight code 2, join 1 node"
    assert lines[1].startswith(
        "The plan would be, and nothing is written: Since the last plan: 1 lost node, 1 new node, 1 changed"
    )
    assert lines[2] == "job   nodes   weight  FLOP/s  F"
    assert lines[3].startswith("chat  3 -> 3  1.5 ")
    assert lines[5].startswith("code  2 -> 3  2 ")
    assert "WAF 16.5 TFLOP/s now, " in text
    moves = text.partition("Then:\n")[2]
    assert "n1 is lost" in moves
    assert "n6 goes to" in moves
    assert "new-1 comes, and goes to" in moves


@pytest.mark.usefixtures("planned")
def test_what_if_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(spec("draft", 50.0).to_json()))
    told = json.loads(_output("plan", "--json", "--what-if", f"submit {path}"))
    assert told["what_if"] == [f"submit {path}"]
    assert not told["is_published"]
    counts = {row["job"]: (row["before"], row["planned"]) for row in told["jobs"]}
    assert counts["draft"] == (0, 6)
    assert counts["chat"] == (3, 0)
    assert {move["target"] for move in told["moves"]} == {"draft"}
    assert told["waf_after_flops"] > told["waf_before_flops"] == pytest.approx(12.69e12 + 3.84e12)
    assert next(row for row in told["jobs"] if row["job"] == "chat")["waits"].startswith("chat waits: ")


def test_a_finished_job_is_told_with_its_nodes(planned: Store) -> None:
    text = _output("plan", "--what-if", "finish chat")
    assert "chat  3 -> 0  1.5     0       0\n     chat is finished.\n" in text
    assert "n1 goes from chat to code" in text
    assert planned.read_prefix(PLAN).entries


def test_what_if_on_an_empty_cluster(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(spec("draft", min_nodes=2).to_json()))
    text = _output("plan", "--what-if", f"join 3 nodes, submit {path}")
    assert "draft  0 -> 3  1 " in text
    assert "new-2 comes, and goes to draft" in text
    assert store.read_prefix("").entries == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lose n9", "'n9' is no node of the cluster: known are n1, n2, n3, n4, n5, n6."),
        ("loose n1", "'loose' is nothing that can be asked: did you mean lose?"),
        ("pause other", "'other' is no planned job: known are chat, code."),
        ("pin chat 0", "job chat: pinned_nodes is 0: it must be a whole number, at least 1."),
        ("weight chat a lot", "weight: 'lot' is no number: it must be weight JOB NUMBER."),
        ("submit /nowhere", "submit: '/nowhere' cannot be read: No such file or directory."),
    ],
)
def test_what_cannot_be_supposed_is_one_sentence(planned: Store, text: str, sentence: str) -> None:
    before = planned.read_prefix("")
    result = _unicron("plan", "--what-if", text)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"unicron: --what-if: {sentence}\n")
    assert planned.read_prefix("") == before


# -- jobs set ----------------------------------------------------------------------------------------------------------


def test_a_weight_is_set(planned: Store) -> None:
    changed, then = _output("jobs", "set", "code", "--weight", "2", "--max-nodes", "5").splitlines()
    assert changed == "job code: weight 1 -> 2, maximum none -> 5."
    assert then.startswith("The plan would be: ")
    assert (_spec(planned, "code").weight, _spec(planned, "code").max_nodes) == (2.0, 5)
    told = json.loads(_output("jobs", "set", "code", "--max-nodes", "none", "--weight", "2", "--json"))
    assert (told["job"], told["changes"], told["warnings"]) == ("code", {"max_nodes": [5, None]}, [])
    assert told["nodes"] == {"chat": 3, "code": 3}


def test_a_job_is_paused_resumed_pinned_and_unpinned(planned: Store) -> None:
    assert _output("jobs", "set", "chat", "--pause").startswith("job chat: paused.\nThe plan would be: ")
    assert _spec(planned, "chat").paused
    assert "3 of 3 (1:all, paused)" in _output("jobs")
    assert _output("jobs", "set", "chat", "--resume").startswith("job chat: resumed.\n")
    assert _output("jobs", "set", "chat", "--pin", "2").startswith("job chat: pin none -> 2.\n")
    assert _spec(planned, "chat").pinned_nodes == 2
    assert "3 of 3 (1:all, pinned to 2)" in _output("jobs")
    assert _output("jobs", "set", "chat", "--unpin").startswith("job chat: pin 2 -> none.\n")
    assert _spec(planned, "chat") == two_jobs().jobs[0].spec


def test_nothing_is_written_where_nothing_changes(planned: Store) -> None:
    before = planned.read_prefix("")
    assert _output("jobs", "set", "chat", "--weight", "1.5").startswith(
        "job chat: nothing changes, as it is so already.\nThe plan would be: "
    )
    assert planned.read_prefix("") == before


@pytest.mark.usefixtures("planned")
def test_a_minimum_above_the_cluster_is_warned_about() -> None:
    result = _unicron("jobs", "set", "code", "--min-nodes", "20")
    assert result.exit_code == 0
    assert result.stdout.startswith("job code: minimum 2 -> 20.\nThe plan would be: ")
    assert result.stderr == "unicron: code waits until there are 20 nodes, and there are 6 now.\n"
    assert "code waits" in _output("plan", "--what-if", "join 1 node")


def test_a_lease_is_kept_and_a_lost_race_is_run_again(planned: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key, lease_id = PlannedJobKeys("code").spec, planned.grant(60.0).lease_id
    planned.put(key, spec_text(_spec(planned, "code")), lease_id)
    commit, others = EtcdStore.commit, [3.0, 4.0]

    def interrupted(self: EtcdStore, guards: Mapping[str, int], *arguments: Any, **named: Any) -> int | None:
        if guards and others:
            planned.put(key, spec_text(replace(_spec(planned, "code"), weight=others.pop())), lease_id)
        return commit(self, guards, *arguments, **named)

    monkeypatch.setattr(EtcdStore, "commit", interrupted)
    assert "minimum 2 -> 3." in _output("jobs", "set", "code", "--min-nodes", "3")
    entry = planned.read(key).entry
    assert entry is not None
    assert (entry.lease_id, parse_spec(entry).weight, parse_spec(entry).min_nodes) == (lease_id, 3.0, 3)


def test_a_race_that_is_always_lost_is_a_sentence(planned: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EtcdStore, "commit", lambda *_arguments, **_named: None)
    result = _unicron("jobs", "set", "code", "--weight", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "unicron: others change the job code all the time; try again.\n"
    assert _spec(planned, "code").weight == 1.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "No change was given: use --weight, --min-nodes, --max-nodes, --pin or --pause."),
        (["--pin", "3", "--unpin"], "Give --pin or --unpin, not both."),
        (["--max-nodes", "many"], "--max-nodes: 'many' is no number of nodes; give one such as 8, or none."),
        (["--max-nodes", "²"], r"--max-nodes: '\xb2' is no number of nodes; give one such as 8, or none."),
        (["--weight", "-1"], "job code: weight is -1.0: it must be a number, 0 or more."),
        (["--weight", "nan"], "job code: weight is nan: it must be a number, 0 or more."),
        (["--min-nodes", "0"], "job code: min_nodes is 0: it must be a whole number, at least 1."),
        (
            ["--min-nodes", "4", "--max-nodes", "3"],
            "job code: min_nodes is 4: it must be at most max_nodes, which is 3.",
        ),
        (
            ["--pin", "1"],
            (
                "job code: pinned_nodes is 1: it must be a multiple of 1 between min_nodes and max_nodes; "
                "to let it wait, set paused."
            ),
        ),
    ],
)
def test_what_cannot_be_set_is_one_sentence_and_changes_nothing(
    planned: Store, arguments: list[str], sentence: str
) -> None:
    before = planned.read_prefix("")
    result = _unicron("jobs", "set", "code", *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"unicron: {sentence}\n")
    assert planned.read_prefix("") == before


def test_a_job_that_is_unknown_or_over_cannot_be_set(planned: Store, etcd: EmbeddedEtcd) -> None:
    result = _unicron("jobs", "set", "other", "--pause")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"unicron: No job 'other' is planned in the cluster at {etcd.endpoint}.\n"
    done = PhaseRecord(phase=JobPhase.FINISHED, reason="All is done.", exit_code=0)
    planned.put(PlannedJobKeys("chat").phase, phase_text(done))
    result = _unicron("jobs", "set", "chat", "--pause")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "unicron: The job 'chat' is finished; nothing of it can be changed.\n"


def test_the_endpoint_may_stand_before_set(planned: Store, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_ETCD_ENDPOINT", "127.0.0.1:1")
    assert "paused" in _output("jobs", "--endpoint", etcd.endpoint, "set", "chat", "--pause")
    assert "resumed" in _output("jobs", "set", "chat", "--resume", "--endpoint", etcd.endpoint)
    assert not _spec(planned, "chat").paused


# -- jobs, nodes and cancel --------------------------------------------------------------------------------------------


def _run_on(store: Store, name: str, *hosts: str) -> None:
    """What runs a job on some hosts for their agents: a round of it, members, and a record in ``nodes/`` of each."""
    keys = JobKeys(name)
    ids = {host: f"{host}/child" for host in hosts}
    store.put(keys.round, round_text(Round(number=3, places=tuple(Place(ids[host], host) for host in hosts))))
    for host, node_id in ids.items():
        store.put(keys.member(node_id), member_text(JobMember(node_id=node_id, host=host, waits_for=3)))
        _record(store, node_id, host, name)


def _record(store: Store, node_id: str, host: str, job: str, *, is_spare: bool = False) -> None:
    record = NodeRecord(node_id=node_id, host=host, job=job, label="", pid=7, is_spare=is_spare)
    store.put(node_key(node_id), node_text(record))


def test_planned_jobs_are_listed_beside_others(planned: Store) -> None:
    left = Round(number=9, places=(Place("x", "x"),))
    planned.put(JobKeys(run_of_start("chat", 7)).round, round_text(left))  # nobody is in it any more
    _run_on(planned, run_of_start("chat", 15), "n2", "n1", "n3")
    _run_on(planned, "own", "x")
    _run_on(planned, "own@7", "y")
    put_cluster(planned, ClusterSnapshot(jobs=(job(spec("new", min_nodes=2, max_nodes=4), JobPhase.SUBMITTED),)))
    done = ClusterSnapshot(jobs=(job(spec("old"), JobPhase.FINISHED),))
    put_cluster(planned, done, {"old": "old ended on all nodes."})
    assert _output("jobs") == (
        "job    state      round  nodes           weight\n"
        "chat   running    3      3 of 3 (1:all)  1.5\n"
        "     n2, n1, n3\n"
        "code   running    -      2 of 3 (2:all)  1\n"
        "     n4, n5\n"
        "new    submitted  -      0 (2:4)         1\n"
        "     new waits for the next plan.\n"
        "old    finished   -      0 (1:all)       1\n"
        "     old ended on all nodes.\n"
        "own    training   3      1               -\n"
        "     x\n"
        "own@7  training   3      1               -\n"
        "     y\n"
    )
    told = {each["job"]: each for each in json.loads(_output("jobs", "--json"))}
    assert (told["chat"]["hosts"], told["chat"]["training"], told["chat"]["planned"]) == (["n2", "n1", "n3"], 3, 3)
    assert (told["new"]["phase"], told["new"]["why"]) == ("submitted", "new waits for the next plan.")
    assert (told["code"]["min_nodes"], told["code"]["max_nodes"], told["code"]["weight"]) == (2, None, 1.0)
    assert "planned" not in told["own"]


def test_a_job_that_waits_tells_what_nodes_say_of_it(planned: Store) -> None:
    keys = PlannedJobKeys("new")
    put_cluster(planned, ClusterSnapshot(jobs=(job(spec("new"), JobPhase.SUBMITTED),)))
    for number in range(5):
        planned.put(keys.refused(f"n{number}"), f"n{number} does not work for new: {number}.".encode())
    (why,) = [each["why"] for each in json.loads(_output("jobs", "--json")) if each["job"] == "new"]
    assert why == (
        "new waits for the next plan. n0 does not work for new: 0. n1 does not work for new: 1. "
        "n2 does not work for new: 2. 2 more nodes say other things."
    )


def test_an_agent_and_what_runs_its_job_are_one_node(planned: Store) -> None:
    for number in range(1, 7):
        _record(planned, f"n{number}/agent", f"n{number}", "", is_spare=True)
    _run_on(planned, run_of_start("chat", 15), "n2", "n1")
    _record(planned, "n4/other", "n4", "elsewhere")
    _record(planned, "s/1", "s", "", is_spare=True)
    put_cluster(planned, ClusterSnapshot(nodes=(node("n3", "chat", NodeState.LEAVING, towards="code"),)))
    put_cluster(planned, ClusterSnapshot(nodes=(node("n6", "code", NodeState.JOINING),)))
    assert _output("nodes").splitlines() == [
        "host  job        rank    role",
        "n1    chat       1",
        "n2    chat       0",
        "n3    chat       leaves  towards code",
        "n4    code       works",
        "n4    elsewhere  -",
        "n5    code       works",
        "n6    code       joins",
        "s     -          spare",
    ]
    told = {each["node_id"]: each for each in json.loads(_output("nodes", "--json"))}
    assert (told["n1/agent"]["state"], told["n1/agent"]["agent"], told["n1/agent"]["rank"]) == (
        "training",
        "working",
        1,
    )
    assert (told["n3/agent"]["agent"], told["n3/agent"]["towards"]) == ("leaving", "code")
    assert "agent" not in told["s/1"]
    assert "n1/child" not in told


def test_a_planned_job_is_cancelled(planned: Store) -> None:
    assert _output("cancel", "code", "--reason", "Wrong data.") == (
        "job code is cancelled by ada: Wrong data; 2 nodes stop.\n"
    )
    entry = planned.read(PlannedJobKeys("code").phase).entry
    assert entry is not None
    record = parse_phase(entry)
    assert record.start > 0
    assert record == replace(
        record, phase=JobPhase.CANCELLED, reason="cancelled by ada: Wrong data.", nodes=0, exit_code=None
    )
    assert planned.read(JobKeys("code").cancelled).entry is None
    assert "code  cancelled  -      2 (2:all) " in _output("jobs")
    assert "     cancelled by ada: Wrong data.\n" in _output("jobs")
    result = _unicron("cancel", "code")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "unicron: The job 'code' is over: cancelled by ada: Wrong data.\n"


def test_what_is_known_of_a_cancelled_job_goes_after_a_day(planned: Store) -> None:
    keys = PlannedJobKeys("code")
    planned.put(keys.refused("n1"), b"It has no GPU.")
    _output("cancel", "code")
    left = planned.read_prefix(keys.prefix).entries
    assert {keys.spec, keys.phase, keys.refused("n1")} <= {entry.key for entry in left}
    (lease_id,) = {entry.lease_id for entry in left}
    assert lease_id is not None
    planned.revoke(lease_id)
    assert not planned.read_prefix(keys.prefix).entries


def test_what_runs_a_planned_job_is_told_as_well(planned: Store) -> None:
    _run_on(planned, "chat", "n1", "n2", "n3")
    told = json.loads(_output("cancel", "chat", "--json"))
    assert told == {"job": "chat", "reason": "cancelled by ada", "nodes": 3}
    entry = planned.read(JobKeys("chat").cancelled).entry
    assert entry is not None
    assert entry.value == b"cancelled by ada"
    assert entry.lease_id is not None
    phase = planned.read(PlannedJobKeys("chat").phase).entry
    assert phase is not None
    assert parse_phase(phase).phase is JobPhase.CANCELLED


def test_a_planned_job_between_two_runs_is_cancelled(planned: Store) -> None:
    planned.put(JobKeys("chat").closed, b"It ended.")
    assert "chat is cancelled by ada; 3 nodes stop" in _output("cancel", "chat")
    planned.delete(PlannedJobKeys("code").phase)  # nobody has said how far it is
    assert "code is cancelled by ada; 2 nodes stop" in _output("cancel", "code")
    planned.put(PlannedJobKeys("code").phase, b"junk")
    result = _unicron("cancel", "code")
    assert (result.exit_code, result.stdout) == (0, "job code is cancelled by ada; 2 nodes stop.\n")


# -- as text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    hosts = [f"node-{number}.rack-3.north.example.org" for number in range(100)]
    name = "a-long-name-of-a-job"
    found = ClusterSnapshot(
        nodes=tuple(node(host, name if number < 50 else "") for number, host in enumerate(hosts)),
        jobs=(job(spec(name, most=40)), job(spec("other", min_nodes=200, max_nodes=300))),
    )
    for view in (
        proposal_view(found, found, 0.0),
        proposal_view(found, replace(found, nodes=found.nodes[1:]), 0.0, ("lose it",)),
        published_view(found, replace(propose(found, 0.0), revision=7), 0.0),
    ):
        lines = plan_text(view, local_time, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any("more" in line for line in lines)
        if width >= 60:
            rows = [line.split() for line in lines if line.startswith("a-long-")]
            assert any(row[-1] == row[-3] == "T" and row[-2] == row[-4] for row in rows)  # FLOP/s and, for weight 1, F
        assert hosts[99] in plan_text(view, local_time, None)


def test_escapes_do_not_reach_the_terminal(store: Store) -> None:
    put_cluster(store, ClusterSnapshot(nodes=(node("a\x1b[2J"),), jobs=(job(spec("job")),)))
    name = "job\x1b[2J\n"  # which no command submits, and a stranger may write
    told = json.loads(spec_text(spec("job")))
    store.put(PlannedJobKeys(name).spec, json.dumps({**told, "name": name}).encode())
    store.put(PlannedJobKeys(name).phase, phase_text(PhaseRecord(phase=JobPhase.RUNNING, reason=name)))
    for arguments in (["plan"], ["plan", "--what-if", "lose \x1b[2J"], ["jobs"], ["nodes"]):
        result = _unicron(*arguments)
        text = result.stdout + result.stderr
        assert "\x1b" not in text
        assert "[2J" in text or "%5B2J" in text  # as in the key of what cannot be read


def test_numbers_are_short() -> None:
    assert [amount(value).rstrip() for value in (0.0, 7.0, 999.4, 999.6, 1.5e3, 9.996e14, 2e18, 3e21, 3e25)] == [
        "0",
        "7",
        "999",
        "1 k",
        "1.5 k",
        "1 P",
        "2 E",
        "3 Z",
        "3e+04 Z",
    ]
    assert [span(seconds) for seconds in (0.5, 119.0, 600.0, 7200.0, 1e6)] == [
        "0.5 s",
        "119 s",
        "10 minutes",
        "2 hours",
        "11.6 days",
    ]


# -- what goes wrong ---------------------------------------------------------------------------------------------------

COMMANDS = [["plan"], ["plan", "--what-if", "lose a"], ["jobs", "set", "a", "--pause"]]


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_command_takes_every_option_of_etcd(arguments: list[str], option: str) -> None:
    name = f"--{option.replace('_', '-')}"
    result = _unicron(*arguments, name, " ")
    assert result.exit_code == 2
    assert result.stderr == f"unicron: {name} is empty; give a value, or leave the option out.\n"


@pytest.mark.parametrize("arguments", COMMANDS)
def test_an_etcd_that_is_not_there_is_one_sentence(arguments: list[str]) -> None:
    result = _unicron(*arguments, "--endpoint", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "unicron: etcd at http://127.0.0.1:1 refuses connections: no server runs there.\n"


def test_help_calculates_nothing() -> None:
    code = (
        "import sys; sys.argv = ['unicron', '--help'];"
        "from unicron_elastic.launcher.cli import app; app(standalone_mode=False);"
        "print({'numpy', 'torch', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.endswith("set()\n")
