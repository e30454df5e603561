"""What the comparison of peers makes of a log of events, and how it counts the lines a script must change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

from _peers_measures import measures
from _peers_page import changed_lines, code_lines
from _recovery_events import Kill, parse

MS = 1_000_000


def log(*lines: str) -> str:
    """Events of ``MILLISECONDS PID SLOT KIND STEP INDEX GENERATION WORLD``."""
    words = [line.split() for line in lines]
    return "".join(f"{int(first) * MS} {' '.join(rest)}\n" for first, *rest in words)


def test_a_restart_from_a_checkpoint_resumes_long_before_it_has_caught_up() -> None:
    events = parse(
        log(
            *(f"{100 * step + slot} {slot} {slot} step {step} 0 0 2" for step in (1, 2, 3) for slot in (0, 1)),
            "90 0 0 micro 2 0 0 0",
            *(f"{1000 + 100 * step} {slot + 8} {slot} step {step} 0 0 2" for step in (2, 3, 4) for slot in (0, 1)),
            "1190 8 0 micro 2 0 0 0",
        )
    )
    found = measures(events, Kill(350 * MS, 1), 2)
    assert found == {
        "resumed_ms": pytest.approx(850),
        "caught_up_ms": pytest.approx(1050),
        "whole_ms": pytest.approx(850),
        "repeated_micro_batches": 1,
        "steps_lost": 2,
    }


def test_a_step_of_the_old_world_that_ends_after_the_fault_is_no_recovery() -> None:
    events = parse(log("100 5 0 step 1 0 0 2", "100 6 1 step 1 0 0 2", "160 5 0 step 2 0 0 2"))
    assert "resumed_ms" not in measures(events, Kill(150 * MS, 1), 2)
    again = measures([*events, *parse(log("300 5 0 step 2 0 1 1"))], Kill(150 * MS, 1), 2)
    assert "caught_up_ms" not in again  # it had made that one before
    more = [*events, *parse(log("300 5 0 step 3 0 1 1"))]
    found = measures(more, Kill(150 * MS, 1), 2)
    assert found["resumed_ms"] == found["caught_up_ms"] == pytest.approx(150)
    assert "whole_ms" not in found


def test_a_spare_in_another_place_makes_the_world_whole() -> None:
    events = parse(log("100 5 0 step 1 0 0 2", "100 6 2 step 1 0 0 2", "400 7 0 step 2 0 0 2", "400 9 1 step 2 0 0 2"))
    found = measures(events, Kill(150 * MS, 2), 2)
    assert found["resumed_ms"] == found["whole_ms"] == pytest.approx(250)


def test_comments_and_docstrings_are_no_lines_that_change() -> None:
    assert code_lines('"""Text."""\n\n# why\ndef f():\n    """More."""\n    return 1  # one\n') == [
        "def f():",
        "    return 1  # one",
    ]
    assert changed_lines("train_torchrun.py") == (0, 0)
    added, removed = changed_lines("train_nvrx.py")
    assert added > removed > 0
