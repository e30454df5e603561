"""What plots show, as numbers: steps over time, and results against what was varied. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from unicron_elastic.simulation.history.events import Fault, History, NodeJoins, NodeLeaves
from unicron_elastic.simulation.model.results import StudyResult
from unicron_elastic.simulation.study.summary import Interval, summarise

_VARIED = re.compile(r"(?P<name>.*?)\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>\D*)")


class Point(NamedTuple):
    """A value of what was varied, and what came of it."""

    value: float
    of_ideal: Interval


class Sensitivity(NamedTuple):
    """``name`` [``unit``] was varied; for each policy its points, by value."""

    name: str
    unit: str
    policies: dict[str, tuple[Point, ...]]


def healthy_nodes(history: History) -> list[tuple[float, int]]:
    """How many nodes are there and need no repair, from each moment on; the first moment is 0.

    A fault that takes a node away counts from the moment that it strikes; one whose repair is not known, for good.
    """
    changes: list[tuple[float, int, int]] = []  # moment, node, +1 or -1 reason to be away
    away = [1 if node in history.absent else 0 for node in range(history.nodes)]
    for event in history.events:
        if isinstance(event, NodeLeaves):
            changes.append((event.at_s, event.node, 1))
        elif isinstance(event, NodeJoins):
            changes.append((event.at_s, event.node, -1))
        elif isinstance(event, Fault) and event.severity == 1:
            changes.append((event.at_s, event.node, 1))
            if event.repair_s is not None and event.at_s + event.repair_s < history.duration_s:
                changes.append((event.at_s + event.repair_s, event.node, -1))
    count = away.count(0)
    steps = [(0.0, count)]
    for at_s, node, change in sorted(changes):
        before = away[node] == 0
        away[node] += change
        count += (away[node] == 0) - before
        if steps[-1][0] == at_s:
            steps[-1] = (at_s, count)
        elif steps[-1][1] != count:
            steps.append((at_s, count))
    return steps


def sensitivities(studies: Sequence[StudyResult]) -> list[Sensitivity]:
    """The studies with ``varied`` such as "checkpoint interval 900 s", gathered by what was varied.

    Raises ``ValueError`` for a ``varied`` without a number, and for two studies of one value.
    """
    found: dict[tuple[str, str], dict[str, dict[float, Interval]]] = {}
    for study in studies:
        if not study.varied:
            continue
        match = _VARIED.fullmatch(study.varied)
        if match is None:
            raise ValueError(f'what was varied is {study.varied!r}: it must end with a number, such as "spares 2"')
        policies = found.setdefault((match["name"] or "varied", match["unit"].strip()), {})
        by_name = {each.policy: each for each in summarise(study)}
        for each in (by_name[policy.policy] for policy in study.policies):
            points = policies.setdefault(each.policy, {})
            if float(match["value"]) in points:
                raise ValueError(f"two studies have {study.varied!r} for policy {each.policy}")
            points[float(match["value"])] = each.of_ideal
    return [
        Sensitivity(
            name,
            unit,
            {policy: tuple(Point(*item) for item in sorted(points.items())) for policy, points in policies.items()},
        )
        for (name, unit), policies in found.items()
    ]
