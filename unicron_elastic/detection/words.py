"""The words that verdicts are made of."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["duration", "sentence", "times", "verb", "who"]


def duration(seconds: float) -> str:
    """A duration as people say it: "84 ms", "3.2 s", "4 min 10 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def times(factor: float) -> str:
    """A factor: "1.31x", "12x"."""
    return f"{factor:.3g}x" if factor < 100 else f"{factor:.0f}x"


def who(ranks: Sequence[int]) -> str:
    """Ranks as the middle of a sentence: "rank 3", "ranks 1, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = [str(rank) for rank in ranks]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """The form of a verb, or of a pronoun, that goes with so many ranks."""
    return one if len(ranks) == 1 else many


def sentence(words: str) -> str:
    """The words as a sentence; it begins in lower case, as all sentences about ranks do."""
    return f"{words}."
