"""The overview as text: for every width and height it fits, and nothing bad is left out before something good."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from overview_lab import NOW, incident, job, lost, node, overview, plan, to_utc
from rich.text import Text

from unicron_elastic.launcher.common.host_ranges import host_ranges
from unicron_elastic.launcher.view.cluster.changes import changes
from unicron_elastic.launcher.view.cluster.overview import Overview
from unicron_elastic.launcher.view.cluster.recorded_fault import seen_together
from unicron_elastic.launcher.view.cluster.section import Section, fitted
from unicron_elastic.launcher.view.cluster.text import status_lines

WIDTHS = (60, 80, 120, 200)
HEIGHTS = (1, 5, 12, 24, 50, None)


def _plain(found: Overview, width: int | None = None, rows: int | None = None) -> list[str]:
    return [line.plain for line in status_lines(found, to_utc, width, rows)]


def _cluster(count: int) -> Overview:
    """With so many nodes, of which every seventh is idle and the last one is broken; a job for each ten."""
    nodes = [
        node(f"gpu-{i:04d}", *(("idle", "") if i % 7 == 0 else ("working", f"job{i // 10}"))) for i in range(1, count)
    ]
    if count:
        reason = "GPU 3 has fallen off the bus (XID 79). " * 3
        nodes.append(node(f"gpu-{count:04d}", "absent", "", "broken", reason=reason, by="unicron-run"))
    jobs = [job(f"job{i}", weight=1.5, weighted_flops=3e15, workers=80) for i in range(count // 10)]
    jobs += [job("late", "waiting", why="late waits for nodes. " * 8, has_run=True, nodes=0)] * bool(count)
    incidents = tuple(incident(number, seconds_ago=100.0 * number) for number in range(min(count, 50)))
    return overview(nodes=tuple(nodes), jobs=tuple(jobs), incidents=incidents, plan=plan())


@pytest.mark.parametrize("count", [0, 1, 50, 2000])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits(count, width):
    found = _cluster(count)
    for rows in HEIGHTS:
        lines = _plain(found, width, rows)
        assert max(map(len, lines)) <= width
        assert rows is None or len(lines) <= rows
        assert all(line.isprintable() for line in lines)
        assert lines[0].startswith(found.verdict.level.upper())


@pytest.mark.parametrize("rows", [24, 40])
def test_what_does_not_fit_is_counted(rows):
    found = _cluster(2000)
    lines = _plain(found, 80, rows)
    shown = sum(bool(re.match(r"[ !]{3}\S+ +(training|waiting)", line)) for line in lines)
    hidden = next(int(match[1]) for line in lines if (match := re.match(r"  and (\d+) more jobs?$", line)))
    assert shown + hidden == 201
    assert shown >= 1


def test_nodes_that_are_hidden_are_counted_as_nodes():
    found = overview(nodes=tuple(node(f"n{i}", job=f"job{i % 40}") for i in range(400)))
    lines = _plain(found, 80, 20)
    shown = sum(int(match[1]) for line in lines if (match := re.match(r" +(\d+)  well ", line)))
    hidden = next(int(match[1]) for line in lines if (match := re.match(r"  and (\d+) more nodes?$", line)))
    assert shown + hidden == 400


@pytest.mark.parametrize("rows", [18, 24, None])
def test_the_worst_comes_first(rows):
    lines = _plain(_cluster(50), 80, rows)
    jobs = [line for line in lines if re.match(r"(!!|! |  ) (late|job\d)", line)]
    assert jobs[0].startswith("!! late")
    nodes = [line for line in lines if re.match(r" +\d+  (broken|well)", line)]
    assert not nodes or " broken " in nodes[0]


def test_a_pipe_gets_everything_uncut_and_without_codes():
    lines = _plain(_cluster(2000))
    assert not any(line.startswith("  and ") for line in lines)
    assert any("late waits for nodes. late waits for nodes." in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert sum(line.startswith("   job") for line in lines) == 201  # and the heading


def test_narrow_terminals_leave_out_columns_and_keep_the_most_important():
    wide, narrow = (next(line for line in _plain(_cluster(50), width) if " state " in line) for width in (120, 60))
    assert all(name in wide.split() for name in ("gen", "step", "nodes", "workers", "weight", "WAF"))
    assert "workers" not in narrow.split()
    assert narrow.split()[:2] == ["job", "state"]


def test_a_node_that_is_kept_out_is_told_with_why_by_whom_and_until_when():
    kept = node("n2", health="draining", reason="riser", by="ada", since_unix_s=NOW - 60.0, until_unix_s=NOW + 86_400.0)
    text = " ".join(_plain(overview(nodes=(node("n1"), kept))))
    assert "kept out since 07:59:00 until 2027-01-16 08:00, by ada: riser" in text


def test_lost_nodes_are_told_with_since_when_why_and_what_can_be_done():
    told = overview(nodes=(node("n1"), lost("n3", NOW - 60.0), lost("n2", None, "")))
    lines = _plain(told)
    at = next(place for place, line in enumerate(lines) if line.endswith("  n[2-3]"))
    assert lines[at].split() == ["2", "-", "lost", "-", "n[2-3]"]
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "n3 is lost: its process has ended, since 07:59:00.",
        "n2 is lost: nobody was there to see why.",
        "If they are not to return: unicron nodes forget n3 n2",
    ]


def test_like_nodes_share_a_row():
    lines = _plain(overview(nodes=tuple(node(f"gpu-{i:03d}") for i in range(1, 129))), 80)
    assert any(re.match(r" +128  well +working +chat  gpu-\[001-128\]$", line) for line in lines)


def test_names_that_others_chose_cannot_do_anything_to_the_terminal():
    found = overview(
        nodes=(node("a\x1b[2J\nb"),), jobs=(job("c\x1b]0;x\x07"),), incidents=(incident(reason="d\x1b[31m"),)
    )
    assert all(line.isprintable() for line in _plain(found, 80))


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n2", "n5"], "n[1-3,5]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["g08", "g09", "g10"], "g[08-10]"),
        (["a-1.lan", "a-2.lan", "head"], "a-[1-2].lan, head"),
        (["n1", "n1", "n2"], "n2, n1 (2)"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2], r2n1"),
    ],
)
def test_hosts_are_named_as_slurm_does(hosts, text):
    assert host_ranges(hosts) == text


def test_sections_get_rows_by_turns():
    sections = [
        Section(heading=(Text(name),), items=tuple((Text(f"{name}{i}"),) for i in range(9)), of="thing")
        for name in ("a", "b")
    ]
    lines = [line.plain for line in fitted(sections, 8)]
    assert lines == ["a", "a0", "a1", "  and 7 more things", "b", "b0", "b1", "  and 7 more things"]


def test_the_same_fault_on_several_nodes_is_told_once():
    seen = seen_together(
        [
            incident(4, "n1", 60.0, rank=None, total_ms=4000.0),
            incident(9, "n2", 59.5, rank=3, total_ms=4100.0),
            incident(5, "n1", 20.0),
            incident(1, "n3", 59.9, run_id="code"),
        ]
    )
    assert [(each.cause.host, each.cause.number, each.nodes, each.total_ms) for each in seen] == [
        ("n1", 5, 1, 3900.0),
        ("n3", 1, 1, 3900.0),
        ("n2", 9, 2, 4100.0),
    ]


def test_what_breaks_when_training_goes_on_again_is_another_fault():
    seen = seen_together(
        [incident(1, "n1", 57.0, rank=None, total_ms=30.0), incident(1, "n2", 60.0, rank=1, total_ms=500.0)]
    )
    assert [(each.cause.host, each.nodes) for each in seen] == [("n1", 1), ("n2", 1)]


def test_nothing_changes_while_steps_are_made():
    before = overview()
    after = overview(at_unix_s=NOW + 2.0, jobs=(job(step=1205, steps_per_s=2.6, stepped_unix_s=NOW + 1.9),))
    assert changes(before, after) == []


def test_a_problem_is_told_once_and_its_end():
    well, slow, slower = overview(), overview(jobs=(job(of_expected=0.4),)), overview(jobs=(job(of_expected=0.3),))
    assert changes(well, slow) == ["DEGRADED: chat achieves 40% of what the plan promises."]
    assert changes(slow, slower) == []
    assert changes(slower, well) == ["FINE: The job trains."]


def test_a_node_that_is_lost_and_returns_or_is_forgotten_is_told_once_each():
    there = overview(nodes=(node("n1"), node("n2")))
    gone = overview(nodes=(node("n1"), lost("n2", NOW)))
    back = overview(nodes=(node("n1"), replace(node("n2"), node_id="n2/2")))
    assert changes(there, gone) == ["n2: is gone.", "DEGRADED: n2 is lost: its process has ended, 0 s ago."]
    assert changes(gone, back) == ["n2: came, working chat.", "FINE: The job trains."]
    assert changes(gone, overview(nodes=(node("n1"),))) == ["FINE: The job trains."]


def test_changes_are_told_in_the_order_of_cause_and_effect():
    before = overview(nodes=(node("n1"), node("n2"), node("n3")), plan=plan())
    after = overview(
        nodes=(node("n1"), node("n4", "idle", "")),
        jobs=(job(nodes=1, generation=2),),
        incidents=(incident(total_ms=None),),
        plan=replace(plan(8), reason="A node was lost."),
    )
    assert changes(before, after) == [
        "Incident chat:1 on n1: rank 3 was killed by signal 9 (SIGKILL), for the 1. time.",
        "n[2-3]: is gone.",
        "n4: came, idle.",
        "Job chat: generation 2, 1 of 2 nodes.",
        "Plan 8: A node was lost.",
        "DEGRADED: chat trains on 1 of 2 nodes.",
    ]
    over = overview(nodes=after.nodes, jobs=after.jobs, incidents=(incident(),), plan=after.plan)
    assert changes(after, over) == ["Incident chat:1: first step 3,900 ms after the fault."]


def test_a_fault_is_told_once_though_the_node_where_it_was_tells_of_it_later():
    others = incident(4, "n1", 59.0, rank=None, reason="n2 is lost.", total_ms=None)
    cause = incident(9, "n2", 60.0)
    first, second = overview(incidents=(others,)), overview(incidents=(others, cause))
    assert changes(overview(), first) == ["Incident chat:4 on n1: n2 is lost."]
    assert changes(first, second) == ["Incident chat:9: first step 3,900 ms after the fault."]


def test_jobs_that_are_over_are_summed_up_but_for_some():
    over = [job(f"old{number}", state="finished", start=number) for number in range(1, 10)]
    gone = [job(f"gone{number}", state="cancelled") for number in range(3)]
    lines = _plain(overview(jobs=(job(), *over, *gone, job("bad", state="failed"))))
    names = [line.split()[0] for line in lines if re.match(r"(! |  ) [a-z]+\d*  ", line) and "  finished" in line]
    assert names == ["old5", "old6", "old7", "old8", "old9"]
    assert "   and 7 more that are over: 4 finished, 3 cancelled; `unicron jobs` lists all" in lines
    assert not any("gone" in line for line in lines)
    assert any(line.startswith("!  bad") for line in lines)


def test_few_jobs_that_are_over_are_all_there():
    lines = _plain(overview(jobs=tuple(job(f"old{number}", state="finished") for number in range(5))))
    assert not any("more that are over" in line for line in lines)


def test_what_nobody_tells_is_called_an_estimate_and_what_cannot_be_is_not_shown():
    planned = replace(plan(), waf_flops=246e12, achieved_waf_flops=618e12, next_fault_s=7200.0)
    guessed = job(weight=1.0, weighted_flops=618e12, of_expected=2.51, is_estimate=True)
    text = " ".join(" ".join(_plain(overview(jobs=(guessed,), plan=planned))).split())
    assert "~618 T" in text
    assert ">100%" in text
    assert "251" not in text
    assert "WAF ~246 T FLOP/s planned, which is too little: its jobs achieve more; the next fault" in text
    assert (
        "~: an estimate, as its job does not tell the FLOPs of a step; a worker counts as 125 TFLOP/s at first." in text
    )
    known = replace(guessed, of_expected=0.99, is_estimate=False)
    found = overview(jobs=(known,), plan=replace(planned, achieved_waf_flops=244e12))
    text = " ".join(" ".join(_plain(found)).split())
    assert "WAF 244 T of 246 T FLOP/s planned (99%); the next fault is expected in 2 hours." in text
    assert "~" not in text
