"""What the micro-batches of a step have logged, and how ranks tell each other: a number and its weight for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # over all ranks


class Logged(NamedTuple):
    """`Logged` is what a micro-batch has logged by one name, of so many samples."""

    value: float
    weight: int


class LoggedValues:
    """`LoggedValues` are what the micro-batches of one step have logged, by name and number of the micro-batch.

    ``ways`` says for each name how it was logged.
    """

    def __init__(self) -> None:
        self.ways: dict[str, dict[str, Any]] = {}
        self._of: dict[str, dict[int, Logged]] = {}

    def note(self, name: str, index: int, logged: Logged, way: dict[str, Any]) -> None:
        """Note what a micro-batch logs, once more perhaps."""
        self.ways[name] = way
        found = self._of.setdefault(name, {})
        found[index] = added(found[index], logged, way["reduce_fx"]) if index in found else logged

    def numbers(self, names: Sequence[str], micro_batches: int) -> Tensor:
        """Return all of these names as numbers, (names, micro_batches, 2): 0 where this rank has none."""
        numbers = torch.zeros(len(names), micro_batches, 2, dtype=torch.float64)
        for row, name in enumerate(names):
            for index, logged in self._of.get(name, {}).items():
                numbers[row, index] = torch.tensor(logged, dtype=torch.float64)
        return numbers


def added(one: Logged, other: Logged, reduction: str) -> Logged:
    """Return what two values of one micro-batch are together."""
    weight = one.weight + other.weight
    if reduction == "mean":
        return Logged((one.value * one.weight + other.value * other.weight) / weight, weight)
    return Logged(of_step((one.value, other.value), reduction), weight)


def of_step(values: Sequence[float], reduction: str) -> float:
    """Return what all micro-batches of a step are together."""
    if reduction == "mean":
        return sum(values) / len(values)
    if reduction == "sum":
        return sum(values)
    return min(values) if reduction == "min" else max(values)


class LogExchange:
    """`LogExchange` has all ranks know what was logged in a step, whoever has computed it.

    Ranks know the same ``ways``, by name, in the same order: what was logged before. A rank that logs by a new name
    tells it to all.
    """

    def __init__(self) -> None:
        self.ways: dict[str, dict[str, Any]] = {}

    def of_all(
        self, own: LoggedValues, micro_batches: int, add: Sum, rank: int, ranks: int
    ) -> dict[str, dict[int, Logged]]:
        """Return what all ranks have logged, by name and micro-batch. All ranks call it."""
        known = list(self.ways)
        new = _text({name: way for name, way in own.ways.items() if name not in self.ways})
        told = add(torch.cat([own.numbers(known, micro_batches).flatten(), torch.tensor([float(len(new))])]))
        found = _values(known, told[:-1].reshape(len(known), micro_batches, 2))
        if length := int(told[-1]):
            rows = torch.zeros(ranks, length, dtype=torch.int64)
            rows[rank, : len(new)] = torch.tensor(list(new), dtype=torch.int64)
            for row in add(rows).tolist():
                self.ways |= json.loads(bytes(row).rstrip(b"\0") or b"{}")
            names = list(self.ways)[len(known) :]
            found |= _values(names, add(own.numbers(names, micro_batches)))
        return found


def _text(ways: Mapping[str, dict[str, Any]]) -> bytes:
    return json.dumps(ways).encode() if ways else b""


def _values(names: Sequence[str], numbers: Tensor) -> dict[str, dict[int, Logged]]:
    found = {}
    for name, row in zip(names, numbers.tolist(), strict=True):
        found[name] = {index: Logged(value, int(weight)) for index, (value, weight) in enumerate(row) if weight}
    return found
