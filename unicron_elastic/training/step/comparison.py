"""What replicas conclude from digests of their states: whether they are the same, and if not, who is wrong. Pure.

A digest travels in the notes behind the gradients, which are summed up over all ranks: its digits, and the squares of
its digits. All have the same digit exactly if the sum of the squares, times the number of ranks, is the square of the
sum; so all conclude the same from the sums. Then they tell each other the digests of their tensors, and most are right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MODEL = "model."  # with which the names of the model's own tensors begin

_DIGITS, _BITS = 16, 4  # whose squares, of 50,000 ranks, sum up to less than 2**24, which is exact in fp32
_NAMES = ("caches", "own", "unsent", "changed")  # of which a rank tells names
NOTES = 2 * _DIGITS + 1  # how many numbers they are


class ReplicasDifferError(RuntimeError):
    """This process must not train on: its parameters, buffers or optimizer state are not those of the others."""


class OddReplicaError(ReplicasDifferError):
    """The same, where most are alike: it is this process that is wrong, and perhaps what it runs on."""


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
    """What a rank tells of its state: of each tensor or value, by name, its type and shape, and its digest.

    ``caches`` are those that may have another shape, or not be there, on each rank; those that are ``own`` may have
    another content as well. What is ``unsent`` no rank can give another; some of it the script has ``changed`` here
    since its first step. ``kind``: all on which the rounding of an optimizer step may depend. ``is_copy``: it has
    the state from another rank, and has been compared with nobody since.
    """

    tensors: Mapping[str, tuple[str, int]]
    caches: frozenset[str]
    own: frozenset[str]
    unsent: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    kind: str
    is_copy: bool

    def to_json(self) -> str:
        """Return the digest as text."""
        of = {name: sorted(getattr(self, name)) for name in _NAMES}
        return json.dumps({"tensors": self.tensors, **of, "kind": self.kind, "is_copy": self.is_copy})

    @classmethod
    def of_places(cls, told: Sequence[Told]) -> Told:
        """Return what a replica tells, of which each process ``told`` its part, by its place."""
        tensors = {name + _of(place): each for place, one in enumerate(told) for name, each in one.tensors.items()}
        of = {
            names: frozenset(name + _of(place) for place, one in enumerate(told) for name in getattr(one, names))
            for names in _NAMES
        }
        kind = "; ".join(dict.fromkeys(each.kind for each in told))
        return cls(tensors=tensors, **of, kind=kind, is_copy=any(each.is_copy for each in told))

    @classmethod
    def parse(cls, text: str) -> Told:
        """Undoes ``to_json``."""
        told = json.loads(text)
        tensors = {name: (str(what), int(digest)) for name, (what, digest) in told["tensors"].items()}
        of = {name: frozenset(told[name]) for name in _NAMES}
        return cls(tensors=tensors, **of, kind=told["kind"], is_copy=told["is_copy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonVerdict:
    """``wrong`` are the ranks that must not train on; ``sentence`` says why, or what else there is to say.

    ``left_out`` are the tensors that each rank may have as it likes. ``is_last``: they are not to be compared any more.
    ``is_unsent``: who is wrong differs in nothing but what a rank cannot give another.
    """

    wrong: frozenset[int] = frozenset()
    sentence: str = ""
    left_out: frozenset[str] = frozenset()
    is_last: bool = False
    is_unsent: bool = False


def _of(place: int) -> str:
    return f" of place {place}"


def in_place(names: Iterable[str], place: int) -> frozenset[str]:
    """Return those of ``names`` that are of this process of a replica, as it calls them itself."""
    return frozenset(name.removesuffix(_of(place)) for name in names if name.endswith(_of(place)))


def judge(told: Sequence[Told], steps: int, who: str = "rank") -> ComparisonVerdict:
    """Return who is wrong of those who ``told`` this of their states after ``steps`` optimizer steps, by rank.

    Most are right, of those that have a state of their own: a copy is as wrong as what it was made of. ``who`` is what
    one of them is called.
    """
    made = "1 step" if steps == 1 else f"{steps} steps"
    left_out = _different_caches(told) | _shards(told) | _of_some(told)
    tables = [_without(each.tensors, left_out) for each in told]
    keys = [frozenset(table.items()) for table in tables]
    if len(set(keys)) == 1:
        return ComparisonVerdict(left_out=left_out, sentence=_about_own(told, left_out, who))
    voting = [key for key, each in zip(keys, told, strict=True) if not each.is_copy] or keys
    (most, count), *_ = Counter(voting).most_common(1)
    others = frozenset(rank for rank, key in enumerate(keys) if key != most)
    different = [n for n in {**tables[keys.index(most)], **tables[min(others)]} if _is_different(tables, n)]
    what, is_unsent = _listed(different), all(name in each.unsent for name in different for each in told)
    if len({each.kind for each in told}) > 1:
        sentence = f"after {made} {_differing(others, who)} in {what}; {_kinds(told, who)}"
        return ComparisonVerdict(sentence=sentence, is_last=True)
    if 2 * count > len(voting):
        sentence = f"after {made} {_differing(others, who)} in {what}"
        return ComparisonVerdict(wrong=others, sentence=sentence, is_unsent=is_unsent)
    return ComparisonVerdict(
        wrong=frozenset(range(len(keys))),
        sentence=f"after {made} the {who}s differ in {what}, and no majority says who is right",
    )


def _without(tensors: Mapping[str, tuple[str, int]], left_out: frozenset[str]) -> dict[str, tuple[str, int]]:
    return {name: tensors[name] for name in sorted(tensors) if name not in left_out}


def _different_caches(told: Sequence[Told]) -> frozenset[str]:
    """The caches that are not the same kind of thing everywhere, and those whose content may differ and does."""
    tables = [each.tensors for each in told]
    caches, own = (frozenset().union(*each) for each in zip(*((each.caches, each.own) for each in told), strict=True))
    others = {name for name in caches if len({table.get(name, ("", 0))[0] for table in tables}) > 1}
    return frozenset(others | {name for name in own if _is_different(tables, name)})


def _of_some(told: Sequence[Told]) -> frozenset[str]:
    """What cannot be sent and is not the same everywhere, unless a copy alone has not what all others have changed."""
    made = [each for each in told if not each.is_copy] or told
    asked = frozenset[str]().union(*(each.changed for each in made))
    lasting = {name for name in asked if not _is_different([each.tensors for each in made], name)}
    tables = [each.tensors for each in told]
    unsent = frozenset[str]().union(*(each.unsent for each in told))
    return frozenset(name for name in unsent - lasting if _is_different(tables, name))


def _shards(told: Sequence[Told]) -> frozenset[str]:
    """The optimizer states that are not everywhere, if no rank has all: then each has a part, and means to."""
    parts = [{name for name in each.tensors if not name.startswith(MODEL)} for each in told]
    whole, common = set[str]().union(*parts), set[str].intersection(*parts)
    return frozenset(whole - common if whole not in parts else ())


def _about_own(told: Sequence[Told], left_out: frozenset[str], who: str) -> str:
    """What is to be said of tensors of one shape and type with another content on each rank."""
    kinds = {name: {each.tensors.get(name, ("", 0))[0] for each in told} for name in sorted(left_out)}
    names = [name for name, each in kinds.items() if len(each) == 1]
    if not names:
        return ""
    is_cache = all(any(name in each.caches for each in told) for name in names)
    what = "a cache as it seems, " if is_cache else ""
    return f"{who}s differ in {_listed(names)}, {what}which is not compared any more"


def _is_different(tables: Sequence[Mapping[str, tuple[str, int]]], name: str) -> bool:
    return len({table.get(name) for table in tables}) > 1


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 1
    return names[0] + (f" (and {more} more)" if more else "")


def _differing(others: frozenset[int], who: str) -> str:
    *first, last = map(str, sorted(others))
    return (
        f"{who}s {', '.join(first)} and {last} differ from the others"
        if first
        else f"{who} {last} differs from the others"
    )


def _kinds(told: Sequence[Told], who: str) -> str:
    listed = "; ".join(f"{who} {number}: {each.kind}" for number, each in enumerate(told))
    return f"as the {who}s do not compute alike ({listed}), that may be rounding, and they are not compared any more"
