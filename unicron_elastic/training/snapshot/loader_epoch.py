"""One epoch of a DataLoader: where the random numbers were, how much of it was given, and what tells it from others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unicron_elastic.compat.watching.batches import batches_given, keeps_workers
from unicron_elastic.training.snapshot.drawn_order import DrawnOrder


@dataclass(kw_only=True, eq=False)
class LoaderEpoch:
    """A `LoaderEpoch` is one of a loader, which ``mark`` and ``place`` tell in another process, too.

    ``is_drawn``: its order comes from random numbers that nobody had just seeded; ``moved`` are the generators that it
    comes from. ``began`` and ``own_began`` is where the generators were, those of all and the loader's own, and
    ``behind_begin`` where those of all were when it had begun; ``first`` and ``read`` where they were before its first
    batch and its latest one, if this process reads them. ``count`` is how many were given, of one that was open in a
    state; it ``is_recent`` if some of them were since the call before that. ``keeps_workers``: its loader had its
    workers already, and drew nothing for them.
    """

    mark: list[Any]
    place: int = 0  # among the loaders with this mark that are there, in the order in which the script began them
    loader: Any = field(default=lambda: None)  # refers to it
    is_drawn: bool
    began: dict[str, Any]
    own_began: list[Any]
    behind_begin: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)
    since: int = 0  # the first batch behind the latest optimizer step
    read_since: dict[str, Any] = field(default_factory=dict)  # where the generators were before that one
    count: int = 0
    is_recent: bool = True
    batches: Any = field(default=lambda: None)  # refers to what gives them
    keeps_workers: bool = False
    moved: list[str] = field(default_factory=list)
    order: DrawnOrder | None = None  # until its first batch was given
    draws_seed: bool = True  # for workers
    reads: bool = True  # whether this process reads them
    first_index: str = ""  # a digest of what is in its first batch, if that is known
    last_index: str = ""  # ... and in its latest, of one that was open in a state
    index: Any = None  # what is in its latest batch, if this process reads it
    offset: int = 0  # how many batches the script had had of it before it began it in its middle
    rest_of: LoaderEpoch | None = None  # of the state: what is left of that one would be as long as this one
    is_at_last: bool = False  # whether it begins with the latest batch of that one, until that was given
    within: LoaderEpoch | None = None  # of the state: in the midst of which this one has begun
    earlier: LoaderEpoch | None = None  # of the state that was taken over, which this one is again
    again: LoaderEpoch | None = None  # the latest one that is this one, of the state that was taken over, again
    is_of_before: bool = False  # whether it was begun before a state was taken over, until it gives a batch
    is_early: bool = False  # whether it was begun before the place behind which it was to begin
    has_ended: bool = False
    trained: int = 0  # how many were given by the latest optimizer step
    looked: int = 0  # ... and by the latest look
    advances: bool = False  # ... and whether there were more than by the look before
    is_look: bool = False  # whether the script looks at some of them, and trains on those of a later epoch
    looks: int = 0  # how many epochs of such loaders came before that it has not trained on
    is_in_midst: bool = False  # whether it has begun this one in the midst of another one, as who evaluates there
    passer: LoaderEpoch | None = None  # the latest one that the script has begun of the same loader in the midst of it
    passed_at: int = 0  # how many were given by then

    @property
    def given(self) -> int:
        """Return how many batches were given."""
        return batches_given(self.batches())

    @property
    def had(self) -> int:
        """Return how many batches of the whole epoch the script has had."""
        return self.offset + self.given

    def is_rest(self, mark: Sequence[Any], *, had: int) -> bool:
        """Return whether a loader with this mark is as long as what is left of this epoch behind so many batches."""
        length = self.mark[0]
        if length is None or not 0 < had < length or mark[0] != length - had:
            return False
        return list(mark[1:3]) == list(self.mark[1:3]) or mark[3] == self.mark[3]

    def has_order_of(self, earlier: LoaderEpoch) -> bool:
        """Return whether the first batch and the latest one are those of the earlier one, as far as both are known."""
        pairs = (self.first_index, earlier.first_index), (digest_of(self.index), earlier.last_index)
        return all(here == then or not (here and then) for here, then in pairs)

    @property
    def is_left(self) -> bool:
        """Return whether the script takes no more of them."""
        return self.has_ended or self.batches() is None

    @property
    def is_passed(self) -> bool:
        """Return whether the script has gone on with another epoch of the same loader, as after it has looked."""
        passer = self.passer
        if passer is None or self.given != self.passed_at:
            return False
        return passer.trained > 0 or not passer.is_left

    @property
    def is_looked_at(self) -> bool:
        """Return whether the script has taken some of them, and trained on those of another epoch instead."""
        return self.is_passed and not self.trained and self.passer is not None and self.passer.trained > 0

    def is_left_for(self, loader: Any) -> bool:
        """Return whether the script takes no more of them, as far as is known where it begins this loader now."""
        if self.is_left or self.loader() is not loader:
            return self.is_left
        return keeps_workers(loader) or self.has_given_all or (self.given > 0 and self.is_look)

    @property
    def has_given_all(self) -> bool:
        """Return whether the script has all of them; it need not ask whether there is one more."""
        return self.mark[0] is not None and self.had >= self.mark[0]

    def note_order(self) -> None:
        """Notes from what its order comes, as is known by now."""
        if self.order is not None:
            self.is_drawn, self.moved = self.order.is_drawn, self.order.moved


def digest_of(index: Any) -> str:
    """Return the same for the same samples in each process; nothing where they are named by no value."""
    text = repr(index)
    return "" if index is None or " at 0x" in text else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def mark_of(loader: Any) -> list[Any] | None:
    """Return what tells a loader from others, first how many batches it has, or None; or None alone if it raises."""
    try:
        lengths = _length(loader), _length(loader.dataset)
        return [*lengths, type(loader.dataset).__name__, loader.batch_size or 0, type(_sampler(loader)).__name__]
    except Exception:  # whatever a script's own raises
        return None


def _length(of: Any) -> int | None:
    """Return it; None for what can only be iterated."""
    try:
        return len(of)
    except TypeError:
        return None


def _sampler(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
