"""The dashboard: what Grafana imports, with panels that ask for what is served."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from expressions import LABELS, check, selectors

from unicron_elastic.metrics.definitions import METRICS

TEXT = (Path(__file__).parents[2] / "contrib" / "grafana" / "unicron.json").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads(TEXT)
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
OF_GRAFANA = {"__rate_interval": "5m", "__range": "6h", "__range_s": "21600"}
COLUMNS = 24


def _filled(expression: str) -> str:
    """As Grafana sends it: variables of its own, and those of the dashboard."""
    values = OF_GRAFANA | dict.fromkeys(VARIABLES, ".*")
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], expression)


def _expressions() -> list[str]:
    return [_filled(target["expr"]) for panel in PANELS for target in panel["targets"]]


def test_it_is_a_dashboard_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36  # from which on a panel's data source is an object
    assert (DASHBOARD["id"], DASHBOARD["uid"], DASHBOARD["title"]) == (None, "unicron", "unicron")
    assert {"from", "to"} == set(DASHBOARD["time"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len(PANELS) >= 10
    assert all(row["panels"] == [] for row in ROWS)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("timeseries", "stat", "table")
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "none", "percentunit", "flops")
    assert panel["targets"]
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_panels_do_not_lie_on_one_another() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= COLUMNS
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


@pytest.mark.parametrize("expression", _expressions())
def test_an_expression_asks_for_what_is_served(expression: str) -> None:
    check(expression)


def test_legends_name_labels_that_there_are() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            known = set.union(*(LABELS[series] for series, _ in selectors(_filled(target["expr"]))))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_variables_are_of_labels_that_there_are() -> None:
    assert set(VARIABLES) == {"datasource", "cluster", "run_id"}
    for name in ("cluster", "run_id"):
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", _filled(VARIABLES[name]["query"]["query"]))
        assert asked is not None
        check(asked[1])
        assert asked[2] == name
        assert name in LABELS[selectors(asked[1])[0][0]]


def test_every_important_metric_is_shown() -> None:
    shown = {series for expression in _expressions() for series, _ in selectors(expression)}
    left_out = {metric.name for metric in METRICS if not shown & set(metric.series)}
    assert left_out == {
        f"unicron_{name}"
        for name in (
            "job_info", "job_start_timestamp_seconds", "generation", "nodes", "worker_step", "incident_open",
            "node_state", "coordinator_known", "store_visible", "plan_timestamp_seconds",
        )
    }  # fmt: skip
