"""What replicas conclude from digests of their states: whether they are the same, and if not, who is wrong. Pure.

A digest travels in the notes behind the gradients, which are summed up over all ranks: its digits, and the squares of
its digits. All have the same digit exactly if the sum of the squares, times the number of ranks, is the square of the
sum; so all conclude the same from the sums. Then they tell each other the digests of their tensors, and most are right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NOTES", "ReplicasDifferError", "Told", "Verdict", "differ", "judge", "written"]

_DIGITS, _BITS = 16, 4  # whose squares, of 50,000 ranks, sum up to less than 2**24, which is exact in fp32
NOTES = 2 * _DIGITS + 1  # how many numbers they are


class ReplicasDifferError(RuntimeError):
    """This process must not train on: its parameters, buffers or optimizer state are not those of the others."""


def written(digest: int | None) -> list[float]:
    """A digest of 64 bits as numbers that can be summed up; of a rank that compares nothing, zeros."""
    if digest is None:
        return [0.0] * NOTES
    digits = [float(digest >> _BITS * place & 2**_BITS - 1) for place in range(_DIGITS)]
    return [1.0, *digits, *(digit * digit for digit in digits)]


def differ(notes: Sequence[float]) -> bool:
    """Whether the digests of which these are the sums differ."""
    count, digits, squares = int(notes[0]), notes[1 : 1 + _DIGITS], notes[1 + _DIGITS :]
    return any(count * int(square) != int(digit) ** 2 for digit, square in zip(digits, squares, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank tells of its state: of each tensor, by name, its type and shape, and its digest.

    ``caches`` are those that may have another shape, or not be there, on each rank. ``kind``: all on which the rounding
    of an optimizer step may depend.
    """

    tensors: Mapping[str, tuple[str, int]]
    caches: frozenset[str]
    kind: str

    def to_json(self) -> str:
        """As text."""
        return json.dumps({"tensors": self.tensors, "caches": sorted(self.caches), "kind": self.kind})

    @classmethod
    def parse(cls, text: str) -> Told:
        """Undoes ``to_json``."""
        told = json.loads(text)
        tensors = {name: (str(what), int(digest)) for name, (what, digest) in told["tensors"].items()}
        return cls(tensors=tensors, caches=frozenset(told["caches"]), kind=told["kind"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``wrong`` are the ranks that must not train on; ``sentence`` says why, or what else there is to say."""

    wrong: frozenset[int] = frozenset()
    sentence: str = ""


def judge(told: Sequence[Told], steps: int) -> Verdict:
    """Who is wrong of those who ``told`` this of their states after ``steps`` optimizer steps, by rank."""
    tables = _comparable(told)
    keys = [frozenset(table.items()) for table in tables]
    (most, count), *_ = Counter(keys).most_common(1)
    if count == len(keys):
        return Verdict()
    others = frozenset(rank for rank, key in enumerate(keys) if key != most)
    names = [name for name in {**tables[keys.index(most)], **tables[min(others)]} if _is_different(tables, name)]
    more = len(names) - 1
    what = names[0] + (f" (and {more} more tensor{'s' * (more > 1)})" if more else "")
    if len({each.kind for each in told}) > 1:
        return Verdict(sentence=f"after {steps} steps {_ranks(others)} in {what}; {_kinds(told)}")
    if 2 * count > len(keys):
        return Verdict(wrong=others, sentence=f"after {steps} steps {_ranks(others)} in {what}")
    return Verdict(
        wrong=frozenset(range(len(keys))),
        sentence=f"after {steps} steps the ranks differ in {what}, and no majority says who is right",
    )


def _comparable(told: Sequence[Told]) -> list[dict[str, tuple[str, int]]]:
    """The tensors without caches that are not the same kind of thing everywhere."""
    caches = frozenset().union(*(each.caches for each in told))
    kinds = {name: {each.tensors.get(name, ("nothing", 0))[0] for each in told} for name in caches}
    return [
        {name: each.tensors[name] for name in sorted(each.tensors) if len(kinds.get(name, ())) < 2} for each in told
    ]


def _is_different(tables: Sequence[Mapping[str, tuple[str, int]]], name: str) -> bool:
    return len({table.get(name) for table in tables}) > 1


def _ranks(ranks: frozenset[int]) -> str:
    *first, last = map(str, sorted(ranks))
    return (
        f"ranks {', '.join(first)} and {last} differ from the others"
        if first
        else f"rank {last} differs from the others"
    )


def _kinds(told: Sequence[Told]) -> str:
    listed = "; ".join(f"rank {rank}: {each.kind}" for rank, each in enumerate(told))
    return f"as the ranks do not compute alike ({listed}), that may be rounding, and they are not compared any more"
