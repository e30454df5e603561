"""The picture of one incident, what was saved, and the beginning of the evidence."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import Ledger
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.view.incidents.picture import amount_of, picture, shown_ms
from unicron_elastic.launcher.view.incidents.story import story
from unicron_elastic.launcher.view.incidents.what_was_saved import what_was_saved

INCIDENT = Incident(
    number=2,
    run_id="chat",
    job="train.py",
    host="n2",
    time="2027-01-15T07:58:20.120+00:00",
    generation=1,
    rank=1,
    status="killed by signal",
    severity=2,
    method="process supervision",
    reason="rank 1 was killed by signal 9 (SIGKILL) after 149 steps.",
    action="go on",
    decision="1 rank goes on from the failed step.",
    restarts_used=1,
    max_restarts=3,
    occurred_at=100.0,
    noticed_at=100.1,
    stopped_at=100.2,
    regrouped_at=100.6,
    first_step_at=101.0,
    workers=8,
)
MOVED = replace(INCIDENT, state_at=100.55, state_s=0.25, state_bytes=64 * 2**20, state_from="n1 (shared memory)")
RESTART = replace(INCIDENT, number=1, action="restart", first_step_at=103.9)


def _bars(lines: list[str]) -> dict[str, tuple[int, int]]:
    """By row: the columns of its bar."""
    found = {}
    for line in lines[1:]:
        marks = [place for place, letter in enumerate(line) if letter in "#=|"]
        if marks:
            found[line[2:14].strip()] = marks[0], marks[-1] + 1
    return found


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_bars_are_in_proportion_and_follow_each_other(width):
    lines = picture(INCIDENT, width)
    assert max(map(len, lines)) <= width
    bars = _bars(lines)
    start, end = bars["noticed"][0], bars["first step"][1]
    cells = end - start
    assert cells >= 16
    for name, first, last in (
        ("noticed", 0, 0.1),
        ("stopped", 0.1, 0.2),
        ("regrouped", 0.2, 0.6),
        ("first step", 0.6, 1),
    ):
        assert bars[name] == (start + round(first * cells), start + round(last * cells))


def test_state_is_drawn_where_it_was_fetched_with_from_whom_and_how_much():
    lines = picture(MOVED, 160)
    assert [line.split()[0] for line in lines[1:]] == ["occurred", "noticed", "stopped", "state", "regrouped", "first"]
    row = next(line for line in lines if line.startswith("  state"))
    assert row.endswith("64 MiB from n1 (shared memory)")
    assert "250 ms" in row
    bars = _bars(lines)
    start, cells = bars["noticed"][0], bars["first step"][1] - bars["noticed"][0]
    assert bars["state"] == (start + round(0.3 * cells), start + round(0.55 * cells))


def test_state_that_came_after_the_first_step_was_fetched_while_the_others_trained():
    late = replace(MOVED, state_at=102.0)
    assert picture(late, 100)[-1].startswith("  state ")
    assert "64 MiB from n1 (shared memory) in 250 ms, while the others trained on" in story(late, None)
    assert "trained on" not in story(MOVED, None)


def test_who_noticed_and_what_was_decided_stand_beside_the_bars():
    text = "\n".join(picture(INCIDENT, None))
    assert "by process supervision" in text
    assert "decided: go on" in text


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), 99.0])
def test_moments_that_cannot_be_drawn_are_still_told(moment):
    lines = picture(replace(INCIDENT, stopped_at=moment), 80)
    assert len(lines) == 6
    assert max(map(len, lines)) <= 80


def test_nothing_known_is_dashes():
    empty = replace(
        INCIDENT, **{f"{name}_at": None for name in ("occurred", "noticed", "stopped", "regrouped", "first_step")}
    )
    assert [line.split()[-2:] for line in picture(empty, 80)[1:]] == [["-", "-"]] * 5


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ([], "No restart of this job was measured where this was read, so what it saved is not known."),
        ([RESTART], "A restart of all workers took 3,900 ms (measured: incident 1): 2,900 ms saved."),
        ([replace(RESTART, host="n9")], "(measured: incident 1 on n9)"),
        ([replace(RESTART, run_id="old")], "(measured: incident old:1)"),
        (
            [replace(RESTART, run_id="old"), replace(RESTART, first_step_at=102.0)],
            "took 2,000 ms (measured: incident 1)",
        ),
        (
            [replace(RESTART, number=number, first_step_at=100.0 + number) for number in (3, 4, 8)],
            "took 4,000 ms (the median of those measured: incidents 3, 4, 8): 3,000 ms saved.",
        ),
        ([replace(RESTART, first_step_at=100.5)], "took 500 ms (measured: incident 1): no time was saved."),
        ([replace(RESTART, first_step_at=None)], "No restart of this job was measured"),
        ([replace(RESTART, job="other.py")], "No restart of this job was measured"),
    ],
)
def test_what_was_saved_is_said_by_restarts_that_were_measured(known, told):
    text = what_was_saved(INCIDENT, [INCIDENT, *known])
    assert text.startswith("The first step came 1,000 ms after the fault: 8 worker-seconds of the 8 workers on n2.")
    assert told in text


def test_a_restart_saves_nothing_and_what_is_open_says_nothing():
    assert what_was_saved(RESTART, [RESTART]).endswith("All workers were restarted, so nothing was saved.")
    assert what_was_saved(replace(INCIDENT, first_step_at=None), [RESTART]) == ""
    assert what_was_saved(replace(INCIDENT, action="observe"), [RESTART]) == ""


def _told(tmp_path, evidence) -> str:
    path = tmp_path / "incidents.jsonl"
    Ledger(path).record(replace(INCIDENT, evidence=str(evidence)))
    result = CliRunner().invoke(app, ["incidents", "2", "--ledger", str(path)])
    assert result.exit_code == 0
    return result.stdout


def test_the_evidence_is_begun_and_the_rest_counted(tmp_path):
    report = tmp_path / "evidence-1.txt"
    report.write_text("".join(f"line {number}\x1b[2J\n" for number in range(40)))
    text = _told(tmp_path, report)
    assert "\nEvidence\n  line 0 [2J\n" in text
    assert "and 28 more lines" in text
    assert "\x1b" not in text


def test_nothing_but_evidence_is_read(tmp_path):
    secret = tmp_path / "shadow"
    secret.write_text("root:secret\n")
    pipe, link = tmp_path / "evidence-pipe.txt", tmp_path / "evidence-link.txt"
    os.mkfifo(pipe)
    link.symlink_to(secret)
    for path in (secret, pipe, link, tmp_path / "evidence-none.txt"):
        assert "secret" not in _told(tmp_path, path)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (64 * 2**20, "64 MiB"), (2**50, "1.02e+03 TiB")],
)
def test_amounts_have_units_that_suit_them(count, text):
    assert amount_of(count) == text


def test_long_times_are_seconds():
    assert [shown_ms(value) for value in (None, 0.04, 99.9, 1234.0, 250_000.0)] == [
        "-", "0.0 ms", "99.9 ms", "1,234 ms", "250 s",
    ]  # fmt: skip
