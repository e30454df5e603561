"""Samples as a line of JSON, by which a job tells them to the agent of the cluster that runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from unicron_elastic.base.text import shown
from unicron_elastic.metrics.definitions import METRICS, RECOVERY_BUCKETS_S, Metric
from unicron_elastic.metrics.figures import (
    Distribution,
)
from unicron_elastic.metrics.samples import MetricSample

_NUMBER_MAX = sys.float_info.max  # a whole number of JSON may be larger, which no figure is
_KNOWN = {metric.name: metric for metric in METRICS}


def samples_text(samples: Iterable[MetricSample]) -> bytes:
    """The samples as JSON."""
    return json.dumps([[each.metric.name, each.labels, _plain(each.value)] for each in samples]).encode()


def parse_samples(text: bytes) -> tuple[MetricSample, ...]:
    """What ``samples_text`` made. Raises ValueError for anything else; nothing of it is believed then."""
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("not samples: nested too deeply") from None
    if not isinstance(told, list):
        raise ValueError("not samples: a list was expected")
    return tuple(_sample(row) for row in told)


def _plain(value: float | Distribution) -> object:
    return [value.counts, value.total] if isinstance(value, Distribution) else value


def _sample(row: object) -> MetricSample:
    match row:
        case [str(name), [*labels], value] if name in _KNOWN and len(labels) == len(_KNOWN[name].labels):
            told = tuple(label for label in labels if isinstance(label, str))
            if len(told) == len(labels):
                return MetricSample(_KNOWN[name], told, _value(_KNOWN[name], value))
    raise ValueError(f"not a sample: {shown(row)}")


def _value(metric: Metric, told: object) -> float | Distribution:
    if not metric.is_histogram:
        return _number(told)
    match told:
        case [[*counts], total] if len(counts) == len(RECOVERY_BUCKETS_S) + 1:
            known = tuple(count for count in counts if isinstance(count, int) and count >= 0)
            if len(known) == len(counts):
                return Distribution(known, _number(total))
    raise ValueError(f"not a distribution: {shown(told)}")


def _number(told: object) -> float:
    if isinstance(told, int | float) and not isinstance(told, bool) and abs(told) <= _NUMBER_MAX:
        return told
    raise ValueError(f"not a number: {shown(told)}")
