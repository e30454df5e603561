"""What would be if: the sentences, what they change, and what is wrong with others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overview_lab import to_utc
from plan_lab import NOW, job, node, spec, two_jobs

from unicron_elastic.launcher.view.cluster.plan import proposal_view, published_view
from unicron_elastic.launcher.view.cluster.plan_text import plan_text
from unicron_elastic.launcher.view.cluster.what_if import FORMS, what_if, with_spec
from unicron_elastic.planning.coordinate.node_status import Health, NodeState
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase
from unicron_elastic.planning.model.jobs import JobSpec, MeasuredSteps

FOUND = two_jobs()
PLANNED = replace(FOUND, published=replace(propose(FOUND, NOW - 9999.0), revision=7))


def _hosts(snapshot: ClusterSnapshot) -> list[str]:
    return [node.host for node in snapshot.nodes]


def _spec(snapshot: ClusterSnapshot, name: str) -> JobSpec:
    found = snapshot.job(name)
    assert found is not None
    return found.spec


def _no_file(path: str) -> JobSpec:
    raise ValueError(f"{path!a} is not read")


# -- what is changed ---------------------------------------------------------------------------------------------------


def test_nodes_are_lost_by_host_or_by_id() -> None:
    assert _hosts(what_if(FOUND, "lose n1,n3")) == ["n2", "n4", "n5", "n6"]
    assert _hosts(what_if(FOUND, " lose  n1 , n2/agent ,lose n6")) == ["n3", "n4", "n5"]


def test_all_agents_of_a_host_are_lost_with_it() -> None:
    twice = replace(FOUND, nodes=(*FOUND.nodes, replace(node("n1"), node_id="n1/other")))
    assert "n1" not in _hosts(what_if(twice, "lose n1"))
    assert _hosts(what_if(twice, "lose n1/other")) == _hosts(FOUND)


def test_nodes_join_by_name_or_by_number() -> None:
    found = what_if(FOUND, "join n9,n10")
    assert {"n9", "n10"} <= set(_hosts(found))
    assert all(node.state is NodeState.IDLE for node in found.nodes if node.host in ("n9", "n10"))
    assert len(what_if(FOUND, "join 2 nodes").nodes) == len(what_if(FOUND, "join 2").nodes) == 8
    twice = what_if(what_if(FOUND, "join 1 node"), "join 1 node")
    assert {"new-1", "new-2"} <= set(_hosts(twice))


def test_rates_reach_as_far_as_the_nodes_that_join() -> None:
    counted = replace(spec("c", most=3), throughput=MeasuredSteps(1e12))
    found = ClusterSnapshot(
        nodes=FOUND.nodes, jobs=(replace(job(spec("c")), spec=counted, rates_flops=(0.0, 1e12, 2e12)),)
    )
    after = what_if(found, "join 10 nodes").job("c")
    assert after is not None
    assert after.rates_flops == tuple(1e12 * count for count in range(17))
    measured = replace(found, jobs=(replace(found.jobs[0], rates_flops=(0.0, 1e12, 1.5e12)),))
    assert what_if(measured, "join 10 nodes").jobs == measured.jobs


def test_a_node_is_drained_unless_it_is_out_anyway() -> None:
    broken = replace(FOUND, nodes=(*FOUND.nodes, node("n7", health=Health.BROKEN)))
    found = {node.host: node.health for node in what_if(broken, "drain n1,n7").nodes}
    assert (found["n1"], found["n2"], found["n7"]) == (Health.DRAINING, Health.OK, Health.BROKEN)


def test_a_finished_job_leaves_its_nodes_idle() -> None:
    moving = replace(
        FOUND,
        nodes=(
            node("n1", "chat"),
            node("n2", "chat", NodeState.LEAVING, towards="code"),
            node("n3", "code", NodeState.LEAVING, towards="chat"),
            node("n4", "code"),
        ),
    )
    found = what_if(moving, "finish chat")
    assert [job.phase for job in found.jobs] == [JobPhase.FINISHED, JobPhase.RUNNING]
    states = {node.host: (node.state, node.job, node.towards) for node in found.nodes}
    assert states == {
        "n1": (NodeState.IDLE, "", ""),
        "n2": (NodeState.JOINING, "code", ""),
        "n3": (NodeState.LEAVING, "code", ""),
        "n4": (NodeState.WORKING, "code", ""),
    }


def test_what_a_job_asks_for_is_changed() -> None:
    found = what_if(FOUND, "weight chat 2.5, pin code 2, pause code")
    assert _spec(found, "chat").weight == 2.5
    assert (_spec(found, "code").pinned_nodes, _spec(found, "code").paused) == (2, True)
    assert [job.revision for job in found.jobs] == [2, 3]
    again = _spec(what_if(found, "unpin code,resume code"), "code")
    assert again == _spec(FOUND, "code")


def test_names_may_have_blanks_and_commas_in_them() -> None:
    odd = replace(FOUND, jobs=(job(spec("a, b")), job(spec("my job"))))
    assert _spec(what_if(odd, "weight my job 3"), "my job").weight == 3.0
    assert _spec(what_if(odd, "pause a, b, weight a, b 4"), "a, b").paused
    assert _spec(what_if(odd, "pause a, b, weight a, b 4"), "a, b").weight == 4.0


def test_a_job_is_submitted_from_a_file(tmp_path: Path) -> None:
    told = {"name": "draft", "command": ["train.py"], "directory": "/", "nproc_per_node": 8, "max_nodes": 4}
    path = tmp_path / "my, job.json"
    path.write_text(json.dumps(told))
    found = what_if(FOUND, f"submit {path}, lose n1")
    draft = found.job("draft")
    assert draft is not None
    assert (draft.phase, len(draft.rates_flops)) == (JobPhase.SUBMITTED, 9)
    assert draft.rates_flops[2] == 2 * 8 * 125e12
    assert "n1" not in _hosts(found)
    finished = replace(FOUND, jobs=(job(spec("draft"), phase=JobPhase.FINISHED),))
    assert [job.phase for job in what_if(finished, f"submit {path}").jobs] == [JobPhase.SUBMITTED]


def test_the_snapshot_stays_as_it_was() -> None:
    before = repr(FOUND)
    what_if(FOUND, "lose n1, weight chat 2, finish code, join 3 nodes")
    assert repr(FOUND) == before


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "nothing is said: it takes lose NODE"),
        (" , ", "nothing is said: it takes lose NODE"),
        ("loose n1", "'loose' is nothing that can be asked: did you mean lose?"),
        ("xyz n1", "'xyz' is nothing that can be asked: it takes lose NODE"),
        ("lose", r"lose what\? It must be lose NODE\[,NODE\]"),
        ("lose ,", r"lose what\?"),
        ("lose n9", "'n9' is no node of the cluster: known are n1, n2, n3, n4, n5, n6"),
        ("lose n1, lose n1", "'n1' is no node of the cluster: known are n2"),
        ("drain \x1b[2J", r"'\\x1b\[2J' is no node"),
        ("join n1", "join: n1 is in the cluster already; give a host that is not, or join 2 nodes"),
        ("join 0 nodes", "join: 0 nodes cannot join: it must be 1 to 10000"),
        ("join 99999999 nodes", "join: 99999999 nodes cannot join"),
        ("join a b", "join: 'a b' names no host"),
        ("finish other", "'other' is no planned job: known are chat, code"),
        ("finish code, pause code", "'code' is finished: known are chat"),
        ("weight chat", "weight 'chat' is not enough: it must be weight JOB NUMBER"),
        ("weight chat much", "weight: 'much' is no number: it must be weight JOB NUMBER"),
        ("weight chat nan", "job chat: weight is nan: it must be a number, 0 or more"),
        ("weight chat -1", "job chat: weight is -1.0"),
        ("pin chat 1.5", "pin: '1.5' is no number of nodes: it must be pin JOB NODES"),
        ("pin chat 0", "job chat: pinned_nodes is 0: it must be a whole number, at least 1"),
        ("pin code 1", "job code: pinned_nodes is 1: it must be a multiple of 1 between min_nodes and max_nodes"),
        ("submit /nowhere/x.json", "submit: '/nowhere/x.json' cannot be read: No such file or directory"),
        ("submit /", "submit: '/' cannot be read: Is a directory"),
        ("submit a\0b", "submit: 'a.*b' cannot be read"),
    ],
)
def test_what_is_wrong_is_said(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        what_if(FOUND, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "holds no JSON: it must hold an object with name, command, directory"),
        ("[" * 100_000, "holds no JSON"),
        ("[]", r"a job is \[\]: it must be an object"),
        ('{"name": "x", "comand": []}', "job x has the unknown key 'comand': did you mean command?"),
        ('{"name": "chat", "command": ["a"], "directory": "/"}', "a job chat is there already: finish it before"),
        ('{"name": "x", "command": ["a"], "directory": "/", "weight": 1' + "0" * 400 + "}", "submit: .*too large"),
        (
            '{"name": "x", "command": ["a"], "directory": "/", "nproc_per_node": 1' + "0" * 400 + "}",
            "submit: the FLOP/s of job x cannot be computed: a number is too large",
        ),
        (" " * 600_000, "is too long: a job's spec has at most 524288 bytes"),
    ],
)
def test_a_file_that_holds_no_job(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        what_if(FOUND, f"submit {path}")


def test_a_cluster_of_nothing_knows_nothing() -> None:
    with pytest.raises(ValueError, match="'a' is no node of the cluster: there is none"):
        what_if(ClusterSnapshot(), "lose a")
    with pytest.raises(ValueError, match="'a' is no planned job: there is none"):
        what_if(ClusterSnapshot(), "pause a")


WORDS = [*FORMS, "n1", "n2", "n6", "chat", "code", "2", "0", "-1", "nodes", ",", " ", "nan", "1e999", "\0", "new-1"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)))
def test_whatever_is_said_there_is_a_plan_or_a_sentence(text: str) -> None:
    try:
        found = what_if(PLANNED, text, _no_file)
    except ValueError:
        return
    view = proposal_view(PLANNED, found, NOW, (text,))
    assert sum(row.planned for row in view.jobs) <= len(found.nodes)
    json.dumps(view.to_json(), allow_nan=False)


@given(st.text())
def test_a_file_of_any_name_is_a_sentence(name: str) -> None:
    with pytest.raises(ValueError):
        what_if(PLANNED, f"submit /nowhere/{name}/x")


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_by_the_idle_one() -> None:
    view = proposal_view(PLANNED, what_if(PLANNED, "lose n1"), NOW, ("lose n1",))
    assert {row.job: (row.before, row.planned) for row in view.jobs} == {"chat": (3, 3), "code": (2, 2)}
    moves = {move.host: (move.source, move.target, move.how) for move in view.moves}
    assert moves == {"n1": ("chat", "", "is lost"), "n6": ("", "chat", "goes to chat")}
    assert view.idle == ()
    assert not view.is_published
    assert view.lost_s
    assert "lost" in view.reason


def test_a_drained_node_leaves_once_another_has_its_place() -> None:
    small = ClusterSnapshot(
        nodes=(node("n1", "chat"), node("n2", "chat"), node("n3")),
        jobs=(job(spec("chat", min_nodes=2, max_nodes=2)),),
    )
    view = proposal_view(small, what_if(small, "drain n1"), NOW, ("drain n1",))
    assert {move.host: move.how for move in view.moves} == {
        "n1": "leaves chat once chat can do without it",
        "n3": "goes to chat",
    }
    assert view.kept_out == (("n1", "to be drained"),)


def test_a_minimum_above_the_cluster_waits_and_is_not_called_paused() -> None:
    found = with_spec(PLANNED, replace(_spec(PLANNED, "chat"), min_nodes=50))
    view = proposal_view(PLANNED, found, NOW, ("x",))
    (row,) = [row for row in view.jobs if row.job == "chat"]
    assert row.waits == "chat waits: it needs at least 50 nodes, and there are 6."
    assert (row.before, row.planned) == (3, 0)


def test_a_published_plan_tells_when_it_was_made_and_what_it_does_not_know() -> None:
    published = PLANNED.published
    assert published is not None
    view = published_view(PLANNED, published, NOW - 9999.0)
    assert (view.revision, view.published_unix_s, view.overtaken) == (7, NOW - 9999.0, "")
    assert [(move.host, move.how) for move in view.moves] == [("n6", "goes to code")]
    assert view.moves[0].reason.startswith("n6 goes to code by plan 7: ")
    late = published_view(what_if(PLANNED, "lose n1"), published, NOW - 9999.0)
    assert late.overtaken == "Nodes have come, gone, or are to be drained."


def test_flops_that_nobody_tells_are_called_an_estimate() -> None:
    view = proposal_view(PLANNED, PLANNED, NOW)
    told = plan_text(replace(view, estimates=("chat", "gone")), to_utc, None).splitlines()
    why = "an estimate, as its job does not tell the FLOPs of a step; a worker counts as 125 TFLOP/s at first."
    assert f"FLOP/s of chat: {why}" in told
    assert "estimate" not in plan_text(view, to_utc, None)
