"""Which of several held states is taken, when the sources do not hold the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source holds: the state of a step, the digest of its layout, and its size in bytes."""

    step: int
    digest: str
    bytes: int


def choose(offers: Mapping[int, Offer], step: int | None) -> Offer | None:
    """The state to take: of ``step``, or of the newest one; of several the one that most sources hold.

    ``offers``: by source, a nearer one having a smaller number, which decides between equals. None if there is none.
    """
    wanted = max((offer.step for offer in offers.values()), default=None) if step is None else step
    fitting = [offers[source] for source in sorted(offers) if offers[source].step == wanted]
    votes = Counter(fitting)
    return max(fitting, key=lambda offer: (votes[offer], -fitting.index(offer)), default=None)


def why_not(offer: Offer, chosen: Offer | None, step: int | None = None) -> str:
    """Why a source that offers this is left out, as what it does; empty if it is not."""
    wanted = step if chosen is None else chosen.step
    if offer.step != wanted:
        return f"holds the state of step {offer.step}, not of step {wanted}"
    return "" if offer == chosen else "holds a state of another layout"
