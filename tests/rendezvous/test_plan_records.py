"""What planning keeps in the store: it comes back as it was written, and garbage is a ValueError that names its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.proposal import propose
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec, MeasuredSteps, Modelled, Throughput
from unicron_elastic.rendezvous.records.job import NAME_CHARACTERS, REASON_CHARACTERS
from unicron_elastic.rendezvous.records.plan import (
    SPEC_MAX_BYTES,
    Order,
    PhaseRecord,
    faults_text,
    order_text,
    parse_faults,
    parse_node_status,
    parse_order,
    parse_phase,
    parse_published,
    parse_rates,
    parse_spec,
    phase_text,
    rates_text,
    spec_text,
    status_text,
)
from unicron_elastic.rendezvous.records.plan_keys import (
    CURRENT,
    FAULTS,
    JOB_RECORDS,
    NODE_RECORDS,
    ORDERS,
    PLAN,
    PlannedJobKeys,
    job_of_key,
    order_key,
    run_of_start,
    status_key,
)
from unicron_elastic.rendezvous.store.interface import MAX_COMMIT_BYTES, Entry, Put, check_commit, check_key

NODE = NodeStatus(
    node_id="h1/agent",
    host="h1",
    label="rack 7",
    state=NodeState.LEAVING,
    job="chat",
    towards="code",
    refusals=(Refusal("draft", 1.7e9), Refusal("ü", 0.0)),
    keeps=("draft", "ü"),
)
SPEC = JobSpec(
    name="chat/1 ü",
    command=("python", "train.py", "--x=1"),
    directory="/home",
    env={"A": "b\n"},
    nproc_per_node=4,
    min_nodes=2,
    max_nodes=8,
    unit_nodes=2,
    weight=1.5,
    pinned_nodes=4,
)
KEYS = PlannedJobKeys(SPEC.name)
ORDER = Order(source="chat", target="code", plan_revision=17, reason="h1 goes from chat to code.")
PHASE = PhaseRecord(
    phase=JobPhase.FINISHED, reason="It has ended well.", nodes=3, exit_code=0, signal=SIGINT, start=9, submission=7
)
HUGE = 10**400  # more than a float can be


def entry(key: str, value: object) -> Entry:
    """A key with this text, or with this as JSON."""
    if isinstance(value, str):
        value = value.encode()
    found = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Entry(key=key, value=found, revision=5, created=5, lease_id=None)


def a_plan() -> bytes:
    """A published plan."""
    job = JobStatus(spec=replace(SPEC, pinned_nodes=None), rates_flops=(0.0, 1e12, 2e12))
    nodes = tuple(NodeStatus(node_id=f"n{place}", host=f"n{place}") for place in range(3))
    return propose(ClusterSnapshot(nodes=nodes, jobs=(job,)), 1e9).to_json().encode()


# Each kind of record: its key, what reads it, and a text that is one.
KINDS: dict[str, tuple[str, Callable[[Entry], object], bytes]] = {
    "node": (status_key(NODE.node_id), parse_node_status, status_text(NODE).encode()),
    "order": (order_key("h1/agent"), parse_order, order_text(ORDER)),
    "spec": (KEYS.spec, parse_spec, spec_text(SPEC)),
    "phase": (KEYS.phase, parse_phase, phase_text(PHASE)),
    "rates": (KEYS.rates, parse_rates, rates_text((0.0, 1.0))),
    "faults": (FAULTS, parse_faults, faults_text(FaultRate(faults=1, node_s=2.0))),
    "plan": (CURRENT, parse_published, a_plan()),
}


def changed(kind: str, **fields: Any) -> Entry:
    """A record with other values in some of its fields."""
    key, _, text = KINDS[kind]
    return entry(key, {**json.loads(text), **fields})


def parsed(kind: str, found: Entry) -> object:
    return KINDS[kind][1](found)


def complaint(kind: str, found: Entry) -> str:
    """Why it is no record; "": it is one."""
    try:
        parsed(kind, found)
    except ValueError as error:
        return str(error)
    return ""


# -- there and back ------------------------------------------------------------------------------------------------


def test_all_keys_are_below_one_prefix_and_none_is_another_s() -> None:
    names = ["a", "a/b", "a%2Fb", "a b", "ü", "spec"]
    keys = [key for name in names for key in vars(PlannedJobKeys(name)).values() if key != name]
    keys += [each(name) for name in names for each in (status_key, order_key)] + [CURRENT, FAULTS]
    keys = [key for key in keys if not key.endswith("/")]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(PLAN) for key in keys)
    for name in names:
        assert job_of_key(PlannedJobKeys(name).spec) == job_of_key(PlannedJobKeys(name).refused("h/1")) == name
    for key in keys:
        check_key(key)


def test_a_prefix_holds_the_keys_of_one_job_alone() -> None:
    assert not PlannedJobKeys("chat2").spec.startswith(PlannedJobKeys("chat").prefix)
    assert PlannedJobKeys("chat").refused("h1/a") == f"{JOB_RECORDS}chat/refused/h1%2Fa"


def test_the_runs_of_a_job_have_names_of_their_own() -> None:
    assert run_of_start("chat", 7) != run_of_start("chat", 8)


def test_a_node_comes_back_as_it_was() -> None:
    assert parse_node_status(entry(status_key(NODE.node_id), status_text(NODE))) == NODE


def test_its_health_is_for_others_to_say() -> None:
    found = entry(status_key(NODE.node_id), status_text(replace(NODE, health=Health.BROKEN)))
    assert parse_node_status(found).health is Health.OK
    assert parse_node_status(found, Health.DRAINING).health is Health.DRAINING


@pytest.mark.parametrize(
    "throughput",
    [
        MeasuredSteps(1e13),
        GivenRates((0.0, 1e12, 0.0, 3e12)),
        Modelled(Workload(global_batch=64, gpus_per_unit=8, flops_per_sample=1e12, micro_batch_sizes=(1, 2))),
    ],
)
def test_a_spec_comes_back_as_it_was(throughput: Throughput) -> None:
    spec = replace(SPEC, throughput=throughput)
    assert parse_spec(entry(KEYS.spec, spec_text(spec))) == spec


def test_orders_phases_rates_and_faults_come_back_as_they_were() -> None:
    assert parse_order(entry(order_key("h1/agent"), order_text(ORDER))) == ORDER
    assert parse_phase(entry(KEYS.phase, phase_text(PHASE))) == PHASE
    running = json.loads(phase_text(PhaseRecord(phase=JobPhase.RUNNING, reason="", start=4, submission=2)))
    assert parse_phase(entry("k", json.dumps(running).encode())).start == 4
    del running["start"]
    old = entry("k", json.dumps(running).encode())
    assert parse_phase(old).start == old.revision, "before it was told, it was the key's revision"
    submitted = PhaseRecord(phase=JobPhase.SUBMITTED, reason="")
    assert parse_phase(entry(KEYS.phase, phase_text(submitted))) == submitted
    assert parse_rates(entry(KEYS.rates, rates_text((0.0, 1e12, 2.5e12)))) == (0.0, 1e12, 2.5e12)
    faults = FaultRate(faults=3, node_s=12.5)
    assert parse_faults(entry(FAULTS, faults_text(faults))) == faults


def test_a_plan_comes_back_with_the_revision_of_its_key() -> None:
    found = parse_published(entry(CURRENT, a_plan()))
    assert (found.revision, found.to_json().encode()) == (5, a_plan())


# -- what is no record ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b'{"a":' * 10_000, b"NaN", b"{}"])
def test_what_is_no_record_names_its_key(kind: str, text: bytes) -> None:
    key, parse, _ = KINDS[kind]
    with pytest.raises(ValueError, match=key):
        parse(entry(key, text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_missing_names_the_key(kind: str) -> None:
    key, parse, text = KINDS[kind]
    told = json.loads(text)
    for name in told:
        if (kind, name) in {
            ("node", "refusals"),
            ("node", "keeps"),
            ("phase", "exit_code"),
            ("phase", "start"),
            ("phase", "submission"),
        }:
            continue  # older agents have none
        if kind == "spec" and name not in ("name", "command", "directory"):
            continue  # a person need not say it
        with pytest.raises(ValueError, match=key):
            parse(entry(key, {each: value for each, value in told.items() if each != name}))


ODD_VALUES = [None, True, -1, 1.5, HUGE, "", "x", "\ud800", [], [[]], {}, {"a": 1}, float("nan"), float("inf"), 1e308]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: ascii(value)[:20])
def test_an_odd_value_in_any_field_is_taken_or_is_a_value_error(kind: str, value: object) -> None:
    for name in json.loads(KINDS[kind][2]):
        found = changed(kind, **{name: value})
        text = complaint(kind, found)
        assert not text or found.key in text
        assert len(text) < 500


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_whatever_bytes_there_are_they_raise_nothing_but_value_errors(text: bytes) -> None:
    for kind, (key, _, _) in KINDS.items():
        assert key in complaint(kind, entry(key, text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(HUGE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_whatever_json_is_in_a_field_it_raises_nothing_but_value_errors(kind: str, data: st.DataObject) -> None:
    names = sorted(json.loads(KINDS[kind][2]))
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=2))
    text = complaint(kind, changed(kind, **fields))
    assert not text or KINDS[kind][0] in text


@pytest.mark.parametrize(
    "throughput",
    [
        {"gpu_flops": HUGE},
        {"rates_flops": [0, HUGE]},
        {"rates_flops": [0, 1e30]},
        {"rates_flops": [1, 2]},
        {"workload": {"global_batch": HUGE}},
        {"workload": {"global_batch": 8, "flops_per_sample": HUGE}},
        {"workload": {"global_batch": 8, "micro_batch_sizes": [HUGE]}},
        {"workload": {"global_batch": 8, "transformer": []}},
        {"workload": 3, "gpu_flops": 1},
    ],
    ids=str,
)
def test_a_throughput_that_nobody_can_plan_with_is_a_value_error(throughput: object) -> None:
    with pytest.raises(ValueError, match=KEYS.spec):
        parse_spec(changed("spec", throughput=throughput))


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_node_speaks_for_itself_alone() -> None:
    with pytest.raises(ValueError, match="node_id must be the one that the key names"):
        parse_node_status(entry(status_key("h2/agent"), status_text(NODE)))


def test_a_spec_is_of_the_job_that_its_key_names() -> None:
    with pytest.raises(ValueError, match="name must be the one that the key names"):
        parse_spec(entry(PlannedJobKeys("other").spec, spec_text(SPEC)))


@pytest.mark.parametrize("key", [f"{NODE_RECORDS}h1/agent", f"{NODE_RECORDS}h1%2fagent", f"{ORDERS}h1%2Fagent"])
def test_another_way_to_write_a_name_is_another_key(key: str) -> None:
    with pytest.raises(ValueError, match="key names"):
        parse_node_status(entry(key, status_text(NODE)))


def test_a_job_s_name_leaves_room_for_the_rest_of_its_keys() -> None:
    """Letters that are not ASCII take nine bytes in a key: with one key too long nothing could be written any more."""
    longest = replace(SPEC, name="語" * 25)
    assert parse_spec(entry(PlannedJobKeys(longest.name).spec, spec_text(longest))) == longest
    node = replace(NODE, node_id="n" * 200)
    assert parse_node_status(entry(status_key(node.node_id), status_text(node))) == node
    for key in (order_key(node.node_id), PlannedJobKeys(longest.name).refused(node.node_id)):
        check_key(key)
    with pytest.raises(ValueError, match="name must be shorter"):
        spec_text(replace(SPEC, name="語" * 30))
    long = replace(NODE, node_id="語" * 30)
    with pytest.raises(ValueError, match="its key must have at most"):
        parse_node_status(entry(status_key(long.node_id), status_text(long)))


# -- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["node", "order", "phase", "faults"])
def test_a_record_that_is_too_long_is_not_read(kind: str) -> None:
    with pytest.raises(ValueError, match="bytes, and at most 65536 are read"):
        parsed(kind, changed(kind, more="x" * 65536))


def test_a_spec_that_is_too_long_is_neither_written_nor_read() -> None:
    long = replace(SPEC, env={"A": "x" * SPEC_MAX_BYTES})
    with pytest.raises(ValueError, match="at most 524288 can be kept"):
        spec_text(long)
    with pytest.raises(ValueError, match="at most 524288 are read"):
        parse_spec(entry(KEYS.spec, long.to_json()))


@pytest.mark.parametrize(
    "options",
    [
        {"nproc_per_node": 10**7},
        {"unit_nodes": 10**7, "max_nodes": None, "pinned_nodes": None},
        {"min_nodes": 10**7, "max_nodes": None, "pinned_nodes": None},
        {"max_nodes": 10**7},
        {"pinned_nodes": 10**7, "max_nodes": None},
        {"weight": 1e10},
        {"throughput": GivenRates((0.0, 1e30))},
    ],
    ids=str,
)
def test_a_spec_beyond_what_is_planned_is_neither_written_nor_read(options: dict[str, Any]) -> None:
    """It would cost the plans of all others: their numbers, or the time to make them."""
    spec = replace(SPEC, **options)
    name = "rates_flops" if "throughput" in options else next(iter(options))
    with pytest.raises(ValueError, match=f"job {SPEC.name}: {name} must be"):
        spec_text(spec)
    with pytest.raises(ValueError, match=KEYS.spec):
        parse_spec(entry(KEYS.spec, spec.to_json()))


def test_only_the_last_refusals_are_read() -> None:
    found = parse_node_status(changed("node", refusals=[["job", float(place)] for place in range(150)]))
    assert [each.at_unix_s for each in found.refusals] == [float(place) for place in range(50, 150)]


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), HUGE, "1", None, True])
def test_a_refusal_without_a_moment_is_none(moment: object) -> None:
    with pytest.raises(ValueError, match=status_key("h1/agent")):
        parse_node_status(changed("node", refusals=[["job", moment]]))


def test_long_texts_are_cut() -> None:
    assert len(parse_node_status(changed("node", label="x" * 5000)).label) == NAME_CHARACTERS
    assert len(parse_phase(changed("phase", reason="x" * 5000)).reason) == REASON_CHARACTERS


def test_a_reason_of_any_length_can_be_written_and_read() -> None:
    """Plans of many jobs have long reasons, and each order repeats its plan's."""
    reason = "語" * 100_000
    order, phase = replace(ORDER, reason=reason), replace(PHASE, reason=reason)
    assert parse_order(entry(order_key("a"), order_text(order))).reason == reason[:REASON_CHARACTERS]
    assert parse_phase(entry(KEYS.phase, phase_text(phase))).reason == reason[:REASON_CHARACTERS]
    check_commit({}, [Put(order_key(f"n{place}"), order_text(order)) for place in range(50)], [])
    assert 50 * len(order_text(order)) < MAX_COMMIT_BYTES


@pytest.mark.parametrize(
    "told", [[0.0], [], [1.0, 2.0], [0.0, -1.0], [0.0, 1e30], [0.0, True], [0.0, "1"], [0.0, HUGE]]
)
def test_rates_that_nobody_can_plan_with_are_none(told: list[object]) -> None:
    with pytest.raises(ValueError, match=KEYS.rates):
        parse_rates(entry(KEYS.rates, {"rates_flops": told}))


@pytest.mark.parametrize("node_s", [-1, 1e300, HUGE, float("nan"), float("inf"), True, "1", None])
def test_a_time_that_no_nodes_have_run_is_none(node_s: object) -> None:
    with pytest.raises(ValueError, match=FAULTS):
        parse_faults(changed("faults", node_s=node_s))


@pytest.mark.parametrize("number", [SIGKILL, 0, 99, -15, True, "15"])
def test_a_job_is_stopped_by_no_other_signal_than_torchrun_is(number: object) -> None:
    with pytest.raises(ValueError, match="signal"):
        parse_phase(changed("phase", signal=number))
    assert parse_phase(changed("phase", signal=int(SIGTERM))).signal == SIGTERM
