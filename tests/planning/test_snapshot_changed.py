"""A snapshot that is kept up to date is the one that is made anew, in all that it knows beside nodes and jobs."""

from __future__ import annotations

from dataclasses import fields

import pytest
from fake_cluster import spec
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.planning.coordinate import snapshot as module
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.faulting import FaultRate

JOBS = ("a", "b", "c")
HOSTS = [f"n{number}" for number in range(8)]


def job(name: str, phase: JobPhase, *, is_known: bool) -> JobStatus:
    return JobStatus(spec=spec(name), phase=phase, rates_flops=(0.0, 1.0, 2.0) if is_known else ())


@st.composite
def statuses(draw: st.DrawFn, host: str) -> NodeStatus:
    state = draw(st.sampled_from(NodeState))
    return NodeStatus(
        node_id=f"{host}/1",
        host=host,
        health=draw(st.sampled_from(Health)),
        state=state,
        job="" if state is NodeState.IDLE else draw(st.sampled_from(JOBS)),
        towards=draw(st.sampled_from(["", *JOBS])) if state is NodeState.LEAVING else "",
        refusals=(Refusal("a", 1.0),) if draw(st.booleans()) else (),
    )


@st.composite
def changes(draw: st.DrawFn) -> dict[str, NodeStatus | None]:
    hosts = draw(st.sets(st.sampled_from(HOSTS)))
    return {f"{host}/1": draw(st.none() | statuses(host)) for host in sorted(hosts)}


PHASES = st.sampled_from([JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.FINISHED])
JOB_LISTS = st.tuples(
    *[st.builds(job, st.just(name), PHASES, is_known=st.sampled_from([True, True, False])) for name in JOBS]
)


def facts(snapshot: ClusterSnapshot) -> dict[str, object]:
    found = {each.name: getattr(snapshot, each.name) for each in fields(snapshot)}
    return {**found, "heading": dict(snapshot.heading), "held": +snapshot.held(), "working": +snapshot.working()}


@given(st.lists(st.tuples(changes(), JOB_LISTS), min_size=1, max_size=6), st.sampled_from([2, 256]))
def test_changes_come_to_the_same_as_a_new_one(
    steps: list[tuple[dict[str, NodeStatus | None], tuple[JobStatus, ...]]], few: int
) -> None:
    kept, nodes = ClusterSnapshot(), dict[str, NodeStatus]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW_CHANGES", few)
        for changed, jobs in steps:
            before, known = kept, facts(kept)
            nodes = {name: node for name, node in {**nodes, **changed}.items() if node is not None}
            kept = kept.changed(changed, jobs=jobs, published=None, faults=FaultRate())
            assert facts(kept) == facts(ClusterSnapshot(nodes=tuple(nodes.values()), jobs=jobs))
            assert facts(before) == known  # the old one stays as it was
            held = [node.held_by for node in kept.sound_nodes]
            assert +kept.held() == {name: held.count(name) for name in set(held)}
            works = [node.job for node in kept.sound_nodes if node.state is NodeState.WORKING]
            assert +kept.working() == {name: works.count(name) for name in set(works)}


def test_two_jobs_of_one_name_are_refused() -> None:
    twice = [job("a", JobPhase.RUNNING, is_known=True)] * 2
    with pytest.raises(ValueError, match="two jobs are called"):
        ClusterSnapshot().changed({}, jobs=twice, published=None, faults=FaultRate())
