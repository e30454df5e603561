"""What a PromQL expression asks for, by a real parser of PromQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

from unicron_elastic.metrics.definitions import METRICS

OF_SCRAPE = {"instance", "cluster", "job", "le"}  # labels that the scrape adds, and that of buckets
LABELS = {series: {*metric.labels, *OF_SCRAPE} for metric in METRICS for series in metric.series}


def _below(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (child := getattr(node, name, None)) is not None and not isinstance(child, str | float):
            yield from _below(child)
    for argument in getattr(node, "args", None) or ():
        yield from _below(argument)


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Each series that an expression names, and the labels that it selects by. Raises ValueError for no PromQL."""
    found = []
    for node in _below(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
    return found


def grouped_by(expression: str) -> set[str]:
    """The labels that its aggregations and joins keep or match by."""
    found = set[str]()
    for node in _below(promql_parser.parse(expression)):
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            found |= set(modifier.labels)
        if isinstance(node, promql_parser.BinaryExpr) and modifier is not None and modifier.matching is not None:
            found |= set(modifier.matching.labels)
    return found


def check(expression: str) -> None:
    """Fails unless it asks for series that are served, by labels that they have."""
    asked = selectors(expression)
    assert asked, expression
    known = set[str]()
    for name, labels in asked:
        assert name in LABELS, f"{name} is served by nobody: {expression}"
        assert labels <= LABELS[name], f"{labels} of {name}: {expression}"
        known |= LABELS[name]
    assert grouped_by(expression) <= known, expression
