"""Who has which part of the optimizer's state, for Megatron-Core's distributed optimizer, and who sends what: pure.

It cuts each bucket of parameters into as many equal parts as there are replicas (ZeRO-1), and replica k has the
k-th of each. Its guardian, replica k + 1, has a copy. In terms of parameters a part does not depend on how long the
buckets are: a range is (parameter, first element, end).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unicron_elastic.engine.protocol.replica_layout import Cut

Range = tuple[int, int, int]


class NoShardLeft(RuntimeError):
    """A part of the optimizer's state was lost with its copy."""


@dataclass(frozen=True, slots=True)
class Span:
    """A parameter in a bucket: its number, and where it begins and ends there."""

    parameter: int
    begin: int
    end: int


def shard(buckets: Sequence[tuple[Sequence[Span], int]], cut: Cut) -> list[Range]:
    """The ranges of a part. ``buckets``: of each, its parameters and its length without padding.

    Megatron-Core pads it to a multiple of the parts and of 128 (``_ParamAndGradBuffer``, 0.16.1).
    """
    parts, number = cut
    found: list[Range] = []
    for spans, unpadded in buckets:
        multiple = math.lcm(parts, 128)
        part = -(-unpadded // multiple) * multiple // parts
        first, end = number * part, (number + 1) * part
        for span in spans:
            low, high = max(span.begin, first), min(span.end, end)
            if low < high:
                found.append((span.parameter, low - span.begin, high - span.begin))
    return found


@dataclass(frozen=True, slots=True)
class PartTransfer:
    """What one member gives another, or itself, from its part or copy ``cut`` for its new part or copy ``target``."""

    source: int
    destination: int
    cut: Cut
    target: Cut
    ranges: tuple[Range, ...]


def holders(have: dict[int, Sequence[Cut]]) -> tuple[int, list[int]]:
    """How the state is cut that can be put together, and who has each part; ``have``: of each member, what it has.

    Each member also guards the part before. Raises NoShardLeft.
    """
    for parts in sorted({parts for cuts in have.values() for parts, _ in cuts}):
        owners = {number: member for member, cuts in have.items() for count, number in cuts if count == parts}
        found = [owners.get(number, owners.get((number + 1) % parts, -1)) for number in range(parts)]
        if -1 not in found:
            return parts, found
    raise NoShardLeft(
        "two neighbouring replicas were lost at once, and with them a part of the distributed optimizer's state"
    )


def transfers(
    buckets: Sequence[tuple[Sequence[Span], int]], have: dict[int, Sequence[Cut]], wanted: Sequence[tuple[int, Cut]]
) -> list[PartTransfer]:
    """What has to be sent so that each member has the parts that it is ``wanted`` to have. Raises NoShardLeft."""
    parts, sources = holders(have)
    before = [shard(buckets, (parts, number)) for number in range(parts)]
    return [
        PartTransfer(source, destination, (parts, number), cut, tuple(common))
        for destination, cut in wanted
        for number, source in enumerate(sources)
        if (common := _common(before[number], shard(buckets, cut)))
    ]


def _common(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    by_parameter: dict[int, list[Range]] = {}
    for each in others:
        by_parameter.setdefault(each[0], []).append(each)
    found: list[Range] = []
    for parameter, begin, end in some:
        for _, first, last in by_parameter.get(parameter, ()):
            low, high = max(begin, first), min(end, last)
            if low < high:
                found.append((parameter, low, high))
    return found
