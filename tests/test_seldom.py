"""A line that somebody else can cause comes once, and later with how many were left out."""

from __future__ import annotations

from unicron_elastic.base.seldom import EVERY_S, Seldom


def test_one_line_in_a_minute_that_counts_the_others() -> None:
    now = 1000.0
    seldom = Seldom(now=lambda: now)
    assert [seldom.line("Closed.") for _ in range(5)] == ["Closed.", "", "", "", ""]
    now += EVERY_S - 1.0
    assert seldom.line("Closed.") == ""
    now += 1.0
    assert seldom.line("Full.") == "Full. So were 5 more since this was last said."
    now += EVERY_S
    assert seldom.line("Closed.") == "Closed."
