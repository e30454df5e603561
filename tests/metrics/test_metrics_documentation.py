"""docs/metrics.md says what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from unicron_elastic.metrics.definitions import METRICS, reference

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
SERIES = {series for metric in METRICS for series in metric.series} | {metric.name for metric in METRICS}


def test_the_reference_is_that_of_the_code() -> None:
    _, mark, told = TEXT.partition("<!-- reference -->\n")
    assert mark
    assert told == reference(), "docs/metrics.md is out of date: python -m unicron_elastic.metrics prints the reference"


def test_the_reference_can_be_printed() -> None:
    words = [sys.executable, "-m", "unicron_elastic.metrics"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == reference()


def test_every_metric_that_is_named_exists() -> None:
    assert set(re.findall(r"\bunicron_[a-z_]+\b", TEXT)) <= SERIES | {"unicron_elastic"}


def test_every_metric_has_a_row() -> None:
    rows = re.findall(r"^\| `(unicron_\w+)` \| (\w+) \|", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted((metric.name, metric.kind) for metric in METRICS)
