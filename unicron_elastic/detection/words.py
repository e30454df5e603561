"""The words that verdicts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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


def who(ranks: Sequence[int], nodes: Mapping[int, str] | None = None) -> str:
    """Ranks as the middle of a sentence: "rank 3", "ranks 1, 2 and 5", "rank 5 on node-b".

    ``nodes`` has the host of those that are elsewhere; a host that all share is named once.
    """
    hosts = [(nodes or {}).get(rank, "") for rank in ranks]
    shared = hosts[0] if len(set(hosts)) == 1 else ""
    place = f" on {shared}" if shared else ""
    places = ["" if shared or not host else f" (on {host})" for host in hosts]
    names = [f"{rank}{each}" for rank, each in zip(ranks, places, strict=True)]
    if len(names) == 1:
        return f"rank {names[0]}{place}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}{place}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """The form of a verb, or of a pronoun, that goes with so many ranks."""
    return one if len(ranks) == 1 else many


def sentence(words: str) -> str:
    """The words as a sentence; it begins in lower case, as all sentences about ranks do."""
    return f"{words}."
