"""Faults by chance: as often and as mixed as their source says, and the same from the same seed everywhere."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unicron_elastic.faults import Severity, Status
from unicron_elastic.simulation.history.events import KINDS, FaultStruck, History
from unicron_elastic.simulation.history.generate import Racks, generate
from unicron_elastic.simulation.history.presets import DAY_S, LLAMA_3, PAPER_MIX, PRESETS, Preset, Repair
from unicron_elastic.simulation.history.replay import write_csv

SEEDS = 300


def node_faults(history: History) -> list[FaultStruck]:
    return [fault for fault in history.faults if fault.severity is Severity.SEV1]


def assert_poisson(counts: list[int], expected: float) -> None:
    """The mean is within four standard errors of what was expected; seeds are fixed, so this is no matter of luck."""
    mean = sum(counts) / len(counts)
    assert abs(mean - expected) <= 4 * math.sqrt(expected / len(counts)), (mean, expected)


@pytest.mark.parametrize(("name", "sev1", "others"), [("trace-a", 10, 33), ("trace-b", 26, 80)])
def test_the_traces_have_as_many_faults_as_is_said_of_the_papers(name: str, sev1: int, others: int) -> None:
    histories = [generate(name, seed) for seed in range(SEEDS)]
    assert_poisson([len(node_faults(history)) for history in histories], sev1)
    assert_poisson([len(history.faults) - len(node_faults(history)) for history in histories], others)
    assert {(history.nodes, history.duration_s / DAY_S) for history in histories} == {
        (16, 56 if name == "trace-a" else 7)
    }


def test_trace_b_is_trace_a_twenty_times_as_fast() -> None:
    # What is remembered of the paper, and what the counts that are remembered come to.
    rates = [PRESETS[name] for name in ("trace-a", "trace-b")]
    assert rates[1].sev1_per_1000_node_days / rates[0].sev1_per_1000_node_days == pytest.approx(20.8, rel=0.01)
    assert rates[1].others_per_1000_node_days / rates[0].others_per_1000_node_days == pytest.approx(19.4, rel=0.01)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_rates_kinds_and_repairs_are_those_of_the_preset(name: str) -> None:
    preset = PRESETS[name]
    # Repairs of no time, so that every node is always there and the rate is that of the source.
    thousand_node_days = 4000 / (preset.sev1_per_1000_node_days + preset.others_per_1000_node_days)
    duration_s = thousand_node_days * 1000 / 100 * DAY_S
    history = generate(name, 1, nodes=100, duration_s=duration_s, repair=Repair(0, 0))
    assert_poisson([len(node_faults(history))], preset.sev1_per_1000_node_days * thousand_node_days)
    others = len(history.faults) - len(node_faults(history))
    assert_poisson([others], preset.others_per_1000_node_days * thousand_node_days)
    kinds = Counter(fault.kind for fault in history.faults)
    assert set(kinds) == set(preset.mix)
    for worst in (True, False):
        weights = {k: w for k, w in preset.mix.items() if (KINDS[k].severity is Severity.SEV1) == worst}
        count = sum(kinds[kind] for kind in weights)
        for kind, weight in weights.items():
            share = weight / sum(weights.values())
            assert abs(kinds[kind] - count * share) <= 4 * math.sqrt(count * share * (1 - share)) + 1e-9
    assert {fault.repair_s for fault in history.faults if fault.severity is not Severity.SEV1} <= {None}
    assert max(Counter(fault.node for fault in history.faults).values()) < len(history.faults) / 20


def test_the_mixes_are_the_published_numbers() -> None:
    assert sum(PAPER_MIX.values()) == pytest.approx(100 - 56.6)
    bad = sum(weight for kind, weight in PAPER_MIX.items() if KINDS[kind].severity is Severity.SEV1)
    assert bad / 43.4 == pytest.approx(0.281, abs=0.0005)
    assert sum(LLAMA_3.values()) == 419
    llama = PRESETS["llama3"].sev1_per_1000_node_days + PRESETS["llama3"].others_per_1000_node_days
    assert llama == pytest.approx(3.8, abs=0.02)
    assert PRESETS["rsc-1"].sev1_per_1000_node_days + PRESETS["rsc-1"].others_per_1000_node_days == pytest.approx(6.5)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_every_preset_says_where_it_is_from_and_what_is_assumed(preset: Preset) -> None:
    assert "assumption" in preset.source
    history = generate(preset, 3, nodes=2, duration_s=DAY_S, fault_factor=2.0, repair=Repair.parse("12h"))
    assert preset.source in history.source
    assert "seed 3" in history.source
    assert "2 times as often" in history.source
    assert "repairs here of 43200 s" in history.source


def test_a_seed_means_the_same_history_everywhere() -> None:
    # If this fails, published figures can no longer be had again from their seeds.
    text = write_csv(generate("trace-b", 7, racks=Racks(4, 0.25)))
    assert text == write_csv(generate("trace-b", 7, racks=Racks(4, 0.25)))
    assert text != write_csv(generate("trace-b", 8, racks=Racks(4, 0.25)))
    rows = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == "b769054ca1394576"


def test_a_longer_history_begins_like_the_shorter_one() -> None:
    short, long = (generate("trace-a", 5, duration_s=days * DAY_S) for days in (28, 56))
    assert long.events[: len(short.events)] == short.events
    assert len(long.events) > len(short.events) > 5


def test_repairs_are_spread_over_their_range() -> None:
    repairs = [fault.repair_s or 0.0 for fault in node_faults(generate("opt-175b", 0, repair=Repair.parse("1d-7d")))]
    assert 1 * DAY_S <= min(repairs) < 1.5 * DAY_S
    assert 6.5 * DAY_S < max(repairs) <= 7 * DAY_S
    fixed = generate("opt-175b", 0, repair=Repair.parse("90m"))
    assert {fault.repair_s for fault in node_faults(fixed)} == {5400.0}


def test_racks_lose_as_many_nodes_but_together() -> None:
    def struck(racks: Racks | None) -> list[FaultStruck]:
        made = [generate("trace-b", seed, nodes=64, repair=Repair(0, 0), racks=racks) for seed in range(40)]
        return [fault for history in made for fault in node_faults(history)]

    alone, together = struck(None), struck(Racks(8, 0.5))
    # Of racks' faults, eight at a time, the spread is eight times that of as many single ones.
    assert abs(len(together) - len(alone)) <= 4 * math.sqrt(len(alone) * (1 + 0.5 + 0.5 * 8))
    fallen = [fault for fault in together if fault.kind is Status.LOST_CONNECTION]
    assert len(fallen) / len(together) == pytest.approx(0.5, abs=0.06)
    by_moment = Counter((fault.at_s, fault.node // 8) for fault in fallen)
    assert set(by_moment.values()) == {8}
    assert {fault.node // 8 for fault in fallen} == set(range(8))


@settings(max_examples=60, deadline=None)
@example(seed=0, size=(4, 30.0), factor=1e-200, racks=None, repair=None)
@example(seed=0, size=(4, 30.0), factor=1e-9, racks=Racks(4, 1.0), repair=None)
@given(
    seed=st.integers(0, 2**40),
    size=st.tuples(st.integers(4, 40), st.floats(0.01, 3)),
    factor=st.floats(0, 10),
    racks=st.none() | st.builds(Racks, st.integers(2, 4), st.floats(0, 1)),
    repair=st.none() | st.builds(lambda a, b: Repair(min(a, b), max(a, b)), st.floats(0, 1e6), st.floats(0, 1e6)),
)
def test_no_node_fails_while_it_is_under_repair(
    seed: int, size: tuple[int, float], factor: float, racks: Racks | None, repair: Repair | None
) -> None:
    nodes, days = size
    history = generate(
        "trace-b", seed, nodes=nodes, duration_s=days * DAY_S, fault_factor=factor, racks=racks, repair=repair
    )
    back_at_s = [0.0] * nodes
    for fault in history.faults:
        assert fault.at_s >= back_at_s[fault.node]
        assert (fault.repair_s is None) == (fault.severity is not Severity.SEV1)
        back_at_s[fault.node] = fault.at_s + (fault.repair_s or 0.0)
    assert factor > 0 or not history.events


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"preset": "trace-c"}, "there is no preset 'trace-c': known are trace-a, trace-b"),
        ({"seed": -1}, "the seed is -1"),
        ({"nodes": 0}, "both must be positive"),
        ({"duration_s": -1.0}, "both must be positive"),
        ({"fault_factor": -0.5}, "0 or more"),
        ({"fault_factor": math.nan}, "0 or more"),
        ({"nodes": 4, "racks": Racks(8, 0.1)}, "a rack must fit into the cluster"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object], problem: str) -> None:
    usual: dict[str, object] = {"preset": "trace-a", "seed": 0}
    with pytest.raises(ValueError, match=problem):
        generate(**{**usual, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "7", "1w", "-1d", "7d-1d", "1d-", "1d-7d-9d", "nan", "1e9d"])
def test_a_repair_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="repair"):
        Repair.parse(text)


def test_racks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 nodes"):
        Racks(1, 0.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Racks(4, 1.5)
