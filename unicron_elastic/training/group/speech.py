"""What a member says of itself in a meeting, as the text that the others read."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from unicron_elastic.training.group.agreement import Report, Said
from unicron_elastic.training.step.shares import from_ranges, to_ranges


class MismatchError(RuntimeError):
    """The members do not run the same training."""


def written(said: Said, terms: str) -> str:
    """Return what a member says, and the ``terms`` on which it trains, as a text."""
    message = {
        "terms": terms,
        "state": said.state,
        "held": to_ranges(said.held),
        "done": to_ranges(said.done),
        "keeps_last": said.keeps_last,
        "start": said.start,
        "trained": to_ranges(said.trained),
        "buckets": said.buckets,
        "until": said.until,
        "is_new": said.is_new,
        "is_between": said.is_between,
        "has_parted": said.has_parted,
        "report": None if said.report is None else asdict(said.report),
        "place": said.place,
        "lost": to_ranges(said.lost),
    }
    return json.dumps(message, separators=(",", ":"))


def read(text: str, terms: str, micro_batches: int, rank: int) -> Said:
    """Return what member ``rank`` said in ``written``. Raises MismatchError if it trains something else."""
    message = json.loads(text)
    if message["terms"] != terms:
        raise MismatchError(f"rank {rank} trains something else: it has {message['terms']}, this rank has {terms}")
    return Said(
        state=message["state"],
        held=from_ranges(message["held"], micro_batches),
        done=from_ranges(message["done"], message["buckets"]),
        keeps_last=bool(message["keeps_last"]),
        start=message["start"],
        trained=from_ranges(message["trained"], sys.maxsize),
        buckets=message["buckets"],
        until=message["until"],
        is_new=bool(message["is_new"]),
        is_between=bool(message["is_between"]),
        has_parted=bool(message["has_parted"]),
        report=_report(message["report"]),
        place=tuple(message["place"]),
        lost=from_ranges(message["lost"], sys.maxsize),
    )


def _report(message: dict[str, Any] | None) -> Report | None:
    return None if message is None else Report(**{**message, "lacks": tuple(message["lacks"])})
