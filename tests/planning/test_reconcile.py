"""Which nodes move: by hand, one rule after the other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, job, nodes

from unicron_elastic.planning.allocate.plan import Plan, Share, Wait
from unicron_elastic.planning.allocate.shares import moves_of
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.published import Loss, Published, Seat
from unicron_elastic.planning.coordinate.reconcile import LendNode, ReturnNode, StartJob, StopJob, reconcile
from unicron_elastic.planning.coordinate.seating import seated
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus

A = replace(job("a", [0, 1, 2, 3, 4], min_nodes=2), phase=JobPhase.RUNNING)
B = replace(job("b", [0, 1, 2, 3, 4]), phase=JobPhase.RUNNING)


def at(name: str, place: str, **options: object) -> NodeStatus:
    """A node that works for a job, or an idle one for ""."""
    state = NodeState.WORKING if place else NodeState.IDLE
    return NodeStatus(node_id=name, host=f"host-{name}", **{"job": place, "state": state, **options})  # type: ignore[arg-type]


def snapshot(*found: NodeStatus, jobs: tuple[JobStatus, ...] = (A, B)) -> ClusterSnapshot:
    return ClusterSnapshot(nodes=found, jobs=jobs)


def seats(found: ClusterSnapshot, counts: dict[str, int], losses: tuple[Loss, ...] = ()) -> dict[str, str]:
    seats, short = seated(found, counts, frozenset(), losses, 0.0)
    assert not short
    return {seat.node_id: seat.job for seat in seats}


def published(found: ClusterSnapshot, **where: str) -> Published:
    """The plan that puts nodes where they are said to be."""
    places = {node.node_id: where.get(node.node_id, "") for node in found.sound_nodes}
    names = [each.name for each in found.jobs if each.is_planned]
    counts = {name: list(places.values()).count(name) for name in names}
    shares = tuple(Share(name, 0, 0, count) for name, count in counts.items())
    plan = Plan(
        nodes=len(places),
        shares=shares,
        moves=moves_of(shares, len(places)),
        waits=tuple(Wait(name, f"{name} waits.") for name, count in counts.items() if not count),
        waf_before_flops=0.0,
        waf_after_flops=0.0,
        lost_flop=0.0,
        running_s=1.0,
        reason="So it is.",
    )
    known = {node.node_id: node for node in found.nodes}
    rows = tuple(Seat(name, known[name].host, place) for name, place in places.items())
    return Published(plan=plan, seats=rows, jobs=tuple((name, 1) for name in names), revision=7)


# -- who gets a seat -----------------------------------------------------------------------------------------------


def test_who_works_stays_and_idle_nodes_go_before_those_of_others() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "b"), at("4", "b"), at("5", ""))
    assert seats(found, {"a": 2, "b": 3}) == {"1": "a", "2": "a", "3": "b", "4": "b", "5": "b"}
    assert seats(found, {"a": 4, "b": 1}) == {"1": "a", "2": "a", "3": "b", "4": "a", "5": "a"}


def test_a_job_is_kept_together_in_its_part_of_the_network() -> None:
    found = snapshot(
        at("1", "a", label="r1"),
        at("2", "a", label="r2"),
        at("3", "a", label="r1"),
        at("4", "", label="r2"),
        at("5", "", label="r1"),
    )
    assert seats(found, {"a": 4, "b": 0})["5"] == "a"  # the idle node beside most of it
    assert seats(found, {"a": 2, "b": 0})["2"] == ""  # and the one that is apart goes


def test_a_host_goes_back_to_the_job_that_lost_it() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "b"), at("4", ""), at("5", ""))
    assert seats(found, {"a": 3, "b": 2}) == {"1": "a", "2": "a", "3": "b", "4": "a", "5": "b"}
    loss = Loss("host-5", "a", 3, 0.0)
    assert seats(found, {"a": 3, "b": 2}, (loss,)) == {"1": "a", "2": "a", "3": "b", "4": "b", "5": "a"}


def test_a_node_is_not_asked_again_by_whom_it_has_refused() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "", refusals=(Refusal("a", 0.0),)), at("4", ""))
    assert seats(found, {"a": 3, "b": 1}) == {"1": "a", "2": "a", "3": "b", "4": "a"}
    _, short = seated(found, {"a": 4, "b": 0}, frozenset(), (), 0.0)
    assert short == {"a": 3}
    _, short = seated(found, {"a": 4, "b": 0}, frozenset(), (), 600.0)
    assert not short


def test_a_draining_node_gets_no_seat_unless_it_is_kept_and_then_only_its_own() -> None:
    found = snapshot(at("1", "a"), at("2", "a", health=Health.DRAINING), at("3", "", health=Health.DRAINING))
    rows, short = seated(found, {"a": 2}, frozenset({"2"}), (), 0.0)
    assert not short
    assert rows[1:] == (Seat("2", "host-2", "a", True), Seat("3", "host-3", "", True))
    _, short = seated(found, {"a": 2}, frozenset(), (), 0.0)
    assert short == {"a": 1}


# -- what is commanded ---------------------------------------------------------------------------------------------


def test_a_node_goes_straight_from_one_job_to_another() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "a"), at("4", "b"), at("5", ""))
    (first, second) = reconcile(found, published(found, **{"1": "a", "2": "a", "3": "b", "4": "b", "5": "b"}))
    assert first == LendNode("3", "a", "b", 7, "host-3 goes from a to b by plan 7: So it is.")
    assert second == LendNode("5", "", "b", 7, "host-5 goes to b by plan 7: So it is.")


@pytest.mark.parametrize(
    "under_way",
    [
        at("3", "b", state=NodeState.JOINING),
        at("3", "a", state=NodeState.LEAVING, towards="b"),
        at("3", "b"),
    ],
)
def test_what_is_under_way_is_not_commanded_again(under_way: NodeStatus) -> None:
    found = snapshot(at("1", "a"), at("2", "a"), under_way)
    assert reconcile(found, published(found, **{"1": "a", "2": "a", "3": "b"})) == ()


def test_a_node_on_its_way_to_the_wrong_job_is_sent_on() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "a", state=NodeState.LEAVING, towards="b"), at("4", "b"))
    (only,) = reconcile(found, published(found, **{"1": "a", "2": "a", "4": "b"}))
    assert (only.node_id, only.source) == ("3", "a")  # type: ignore[union-attr]
    assert isinstance(only, ReturnNode)


def test_a_job_keeps_its_minimum_until_the_replacement_works() -> None:
    plan = {"1": "a", "3": "a"}
    found = snapshot(at("1", "a"), at("2", "a", health=Health.DRAINING), at("3", ""), jobs=(A,))
    assert [type(each) for each in reconcile(found, published(found, **plan))] == [LendNode]
    found = snapshot(
        at("1", "a"), at("2", "a", health=Health.DRAINING), at("3", "a", state=NodeState.JOINING), jobs=(A,)
    )
    assert reconcile(found, published(found, **plan)) == ()
    found = snapshot(at("1", "a"), at("2", "a", health=Health.DRAINING), at("3", "a"), jobs=(A,))
    (last,) = reconcile(found, published(found, **plan))
    assert isinstance(last, ReturnNode)
    assert last.node_id == "2"


def test_a_broken_node_is_taken_whatever_becomes_of_its_job() -> None:
    found = snapshot(at("1", "a"), at("2", "a", health=Health.BROKEN), jobs=(A,))
    (only,) = reconcile(found, published(found, **{"1": "a"}))
    assert isinstance(only, ReturnNode)
    assert only.node_id == "2"


def test_a_job_that_gets_none_is_stopped_with_all_its_nodes() -> None:
    found = snapshot(at("1", "a"), at("2", "a"), at("3", "b"))
    stop, first, second = reconcile(found, published(found, **{"1": "b", "2": "b", "3": "b"}))
    assert stop == StopJob("a", 7, "a waits.")
    assert [type(first), type(second)] == [LendNode, LendNode]


def test_a_job_starts_when_its_minimum_waits_for_it() -> None:
    jobs = (replace(A, phase=JobPhase.SUBMITTED),)
    plan = {"1": "a", "2": "a", "3": "a"}
    found = snapshot(at("1", "a", state=NodeState.JOINING), at("2", ""), at("3", ""), jobs=jobs)
    assert StartJob not in [type(each) for each in reconcile(found, published(found, **plan))]
    found = snapshot(
        at("1", "a", state=NodeState.JOINING), at("2", "a", state=NodeState.JOINING), at("3", ""), jobs=jobs
    )
    assert reconcile(found, published(found, **plan))[-1] == StartJob(
        "a", 7, "a starts, as 2 nodes wait for it and it needs 2."
    )


def test_a_job_that_starts_without_a_state_that_is_there_says_so() -> None:
    jobs = (replace(A, phase=JobPhase.SUBMITTED),)
    keeper = replace(at("3", ""), keeps=("a",))
    joining = [at(name, "a", state=NodeState.JOINING) for name in "12"]
    for seen, said in (
        (
            (*joining, keeper),
            f" It starts without its state that {keeper.host} keeps in memory: the plan has other nodes for it.",
        ),
        ((joining[0], replace(joining[1], keeps=("a",)), keeper), ""),
        ((*joining, replace(keeper, keeps=("b",))), ""),
    ):
        found = snapshot(*seen, jobs=jobs)
        start = reconcile(found, published(found, **{"1": "a", "2": "a"}))[-1]
        assert start == StartJob("a", 7, f"a starts, as 2 nodes wait for it and it needs 2.{said}")


def test_a_job_that_is_given_the_node_with_its_state_does_not_say_that_it_starts_without() -> None:
    jobs = (replace(A, phase=JobPhase.SUBMITTED),)
    found = snapshot(
        *(at(name, "a", state=NodeState.JOINING) for name in "12"), replace(at("3", ""), keeps=("a",)), jobs=jobs
    )
    start = reconcile(found, published(found, **{"1": "a", "2": "a", "3": "a"}))[-1]
    assert start == StartJob("a", 7, "a starts, as 2 nodes wait for it and it needs 2.")


def test_a_job_gets_the_idle_nodes_that_have_its_state_first() -> None:
    keeper = replace(at("3", ""), keeps=("b", "a"))
    found = snapshot(at("1", ""), at("2", ""), keeper)
    seats, _ = seated(found, {"a": 1, "b": 0}, frozenset(), (), 0.0)
    assert [seat.job for seat in seats] == ["", "", "a"]


def test_nodes_of_a_job_without_rates_are_left_alone() -> None:
    jobs = (replace(A, rates_flops=()), B)
    found = snapshot(at("1", "a"), at("2", ""), jobs=jobs)
    (only,) = reconcile(found, published(found, **{"2": "b"}))
    assert only.node_id == "2"  # type: ignore[union-attr]


# -- the plan in the store -----------------------------------------------------------------------------------------


def test_the_published_plan_is_read_as_it_was_written() -> None:
    cluster = FakeCluster(nodes={node.node_id: node for node in nodes(3, label="r")}, jobs={"a": A, "b": B})
    cluster.coordinate()
    found = cluster.published
    assert found is not None
    full = replace(found, losses=(Loss("h", "a", 3, 1.5),), moved_unix_s=(("a", 2.5),), look_again_unix_s=3.5)
    assert Published.from_json(full.to_json(), full.revision) == full
    assert Published.from_json(full.to_json().encode(), 9) == replace(full, revision=9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seats": [["n0", "h0", "a"]]}, "a field has the wrong kind"),
        ({"seats": [["n0", "h0", "a", 1]]}, "a field has the wrong kind"),
        ({"seats": []}, "the seats of a are not"),
        ({"jobs": [["a", True]]}, "a field has the wrong kind"),
        ({"jobs": [["a", 1.5]]}, "a field has the wrong kind"),
        ({"losses": [[1, "a", 3, 1.5]]}, "a field has the wrong kind"),
        ({"moved_unix_s": [["a", "now"]]}, "a field has the wrong kind"),
        ({"look_again_unix_s": False}, "a field has the wrong kind"),
        ({"plan": 3}, "the plan is 3"),
        ({"more": 3}, "with jobs, look_again_unix_s"),
    ],
)
def test_what_is_no_published_plan_is_refused(change: dict[str, object], words: str) -> None:
    cluster = FakeCluster(nodes={node.node_id: node for node in nodes(3)}, jobs={"a": A, "b": B})
    cluster.coordinate()
    assert cluster.published is not None
    text = json.dumps({**json.loads(cluster.published.to_json()), **change})
    with pytest.raises(ValueError, match=words):
        Published.from_json(text, 1)


def test_text_that_is_no_json_is_no_published_plan() -> None:
    with pytest.raises(ValueError, match="it must be JSON"):
        Published.from_json("{", 1)
    with pytest.raises(ValueError, match="it must be an object"):
        Published.from_json("[]", 1)


def test_a_published_plan_has_one_seat_for_each_node_and_none_for_strangers() -> None:
    found = snapshot(at("1", "a"), at("2", "a"))
    plan = published(found, **{"1": "a", "2": "a"})
    with pytest.raises(ValueError, match="two seats"):
        replace(plan, seats=(plan.seats[0], plan.seats[0]))
    with pytest.raises(ValueError, match="seats are for x"):
        replace(plan, seats=(*plan.seats, Seat("3", "h", "x")))


@pytest.mark.parametrize("wrong", [{"job": "a"}, {"state": NodeState.WORKING}, {"towards": "b"}, {"node_id": ""}])
def test_a_node_does_one_thing_at_a_time(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="node"):
        NodeStatus(**{"node_id": "1", "host": "h", **wrong})  # type: ignore[arg-type]


def test_names_in_a_snapshot_are_unique() -> None:
    with pytest.raises(ValueError, match="two nodes are called"):
        snapshot(at("1", ""), at("1", "a"))
    with pytest.raises(ValueError, match="two jobs are called"):
        snapshot(jobs=(A, A))
