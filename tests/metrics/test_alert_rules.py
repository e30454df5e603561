"""The alert rules: they are PromQL, ask for what is served, and alert when they should and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from expressions import LABELS, check, grouped_by, selectors
from metric_values import every_sample

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer

FOLDER = Path(__file__).parents[2] / "contrib" / "prometheus"
RULES = yaml.safe_load((FOLDER / "unicron.rules.yml").read_text(encoding="utf-8"))
TESTS = yaml.safe_load((FOLDER / "unicron.rules_test.yml").read_text(encoding="utf-8"))
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, which comes with Prometheus")


def _promtool(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], cwd=FOLDER, input=given, capture_output=True, timeout=60, check=False)


def test_the_parser_knows_promql() -> None:
    assert selectors('sum by (a) (rate(x{b="1"}[5m])) > on (c) y') == [("x", {"b"}), ("y", set())]
    assert grouped_by("sum by (a) (x) > on (c) y") == {"a", "c"}
    with pytest.raises(ValueError):
        selectors("sum(x")
    with pytest.raises(AssertionError, match="served by nobody"):
        check("unicron_nothing > 1")
    with pytest.raises(AssertionError):
        check('unicron_step{rank="1"} > 1')
    with pytest.raises(AssertionError):
        check("sum by (rank) (unicron_step)")


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_what_is_served(name: str) -> None:
    check(ALERTS[name]["expr"])


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("Unicron")
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    told = rule["annotations"]
    assert set(told) == {"summary", "description"}
    labels = set(re.findall(r"\$labels\.(\w+)", " ".join(told.values())))
    kept = grouped_by(rule["expr"]) or set.union(*(LABELS[series] for series, _ in selectors(rule["expr"])))
    assert labels <= kept


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tried_both_ways(name: str) -> None:
    tried = [
        each["exp_alerts"] for test in TESTS["tests"] for each in test["alert_rule_test"] if each["alertname"] == name
    ]
    assert any(tried)
    assert not all(tried)


def test_alerts_are_in_the_documentation() -> None:
    text = (FOLDER.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in ALERTS if f"`{name}`" not in text] == []


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    done = _promtool("check", "rules", "--lint-fatal", "unicron.rules.yml")
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout.decode()


@needs_promtool
def test_promtool_sees_the_alerts_fire_and_be_silent() -> None:
    done = _promtool("test", "rules", "unicron.rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_notices_a_rule_that_is_off(tmp_path: Path) -> None:
    for path in FOLDER.glob("unicron.rules*.yml"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace("_timestamp_seconds) > 600", "_timestamp_seconds) > 6000"))
    done = _promtool("test", "rules", str(tmp_path / "unicron.rules_test.yml"))
    assert done.returncode != 0
    assert b"UnicronJobWithoutStep" in done.stdout + done.stderr


@needs_promtool
def test_promtool_has_nothing_to_say_of_what_is_served() -> None:
    class All(Answers):
        def samples(self) -> Any:
            return every_sample()

    server = MetricsServer(LOOPBACK, 0, All())
    try:
        import urllib.request

        with urllib.request.urlopen(f"http://{LOOPBACK}:{server.port}/metrics", timeout=10) as answer:
            text = answer.read()
    finally:
        server.close()
    done = _promtool("check", "metrics", given=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
