"""Whether the order of an epoch is drawn, so that another one comes where a script begins the epoch anew.

That is measured, as a sampler may be anybody's: an order is drawn from what moves while its first indices are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import IterableDataset

from unicron_elastic.training.snapshot.own_generators import is_just_seeded
from unicron_elastic.training.step.randomness import Generators, generators_of

_UNDRAWN = 624  # where a Mersenne Twister is that was just seeded


class DrawnOrder:
    """`DrawnOrder` finds out which generators, everybody's or of the ``loader``, the order of one epoch comes from."""

    def __init__(self, loader: Any, generators: Generators) -> None:
        self._generators = generators
        self._own = generators_of(loader)
        self._seeded_from = loader.generator
        # No index tells the order of what can only be iterated, and what workers draw nobody sees here.
        self._is_seen_in_batch = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
        self._began = self._latest = self._states()
        self._seeded = {name for name, state in self._began.items() if self._is_just_seeded(name, state)}
        self.moved: list[str] = []

    @property
    def is_drawn(self) -> bool:
        """Return whether something moved that nobody had just seeded."""
        return not self._seeded.issuperset(self.moved)

    def is_as_in(self, began: Mapping[str, Any], own_began: Sequence[Tensor], moved: Sequence[str]) -> bool:
        """Return whether those that moved then are, in the beginning, where they were: the script has seeded them."""
        then = _named(began, own_began)
        return all(name in then and name in self._began and is_same(self._began[name], then[name]) for name in moved)

    def has_begun(self, *, has_drawn_seed: bool) -> None:
        """Hears that the loader has begun, drawn a seed for its workers or not, and asked for indices if it has any."""
        self._compare(self._with_seed() if has_drawn_seed else self._began)

    def before_index(self) -> None:
        """Hears that the first index is about to be made."""
        self._latest = self._states()

    def behind_index(self) -> None:
        """Hears that it was."""
        self._compare(self._latest)

    def behind_batch(self) -> None:
        """Hears that the first batch was read, for which the first index was made."""
        if self._is_seen_in_batch:
            self._compare(self._latest)

    def _compare(self, before: Mapping[str, Any]) -> None:
        now = self._states()
        moved = {name for name, state in before.items() if name in now and not is_same(now[name], state)}
        self.moved = sorted(moved.union(self.moved))

    def _states(self) -> dict[str, Any]:
        return _named(self._generators.states(), [each.get_state() for each in self._own])

    def _with_seed(self) -> dict[str, Any]:
        """Return where they had been if the loader had drawn its seed and nothing else, as each new one does."""
        own = [number for number, each in enumerate(self._own) if each is self._seeded_from]
        name = _own(own[0]) if own else "cpu"
        scratch = Generator()
        scratch.set_state(self._began[name])
        torch.empty((), dtype=torch.int64).random_(generator=scratch)
        return {**self._began, name: scratch.get_state()}

    def _is_just_seeded(self, name: str, state: Any) -> bool:
        if name == "python":
            return bool(state[1][-1] == _UNDRAWN)
        if name == "numpy":
            return bool(state["state"].get("pos") == _UNDRAWN)
        own = {_own(number): each for number, each in enumerate(self._own)}
        return is_just_seeded(own.get(name) or self._generators.of_torch()[name], state)


def _named(of_all: Mapping[str, Any], own: Sequence[Tensor]) -> dict[str, Any]:
    return {**of_all, **{_own(number): state for number, state in enumerate(own)}}


def _own(number: int) -> str:
    return f"own {number}"


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states of one generator are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bool(torch.equal(one, other))
    return bool(_plain(one) == _plain(other))


def _plain(state: Any) -> Any:
    """Return it without NumPy's arrays and numbers."""
    if isinstance(state, dict):
        return {name: _plain(each) for name, each in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
