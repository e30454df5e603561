"""What DataLoaders' own generators have come to, for a script that goes on between two epochs.

A loader draws the order of each epoch from its generator, which goes on from one epoch to the next. A script that is
started again makes it anew, so the next epoch would have the order of the first. Who seeds it for each epoch, by number
or always alike, is left alone: it does not stand where it stood when the training began, or did so in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Generator, Tensor

from unicron_elastic.training.step.randomness import generators_of

_GONE_MAX = 64  # loaders that are gone of which something is known, for others like them
_SAMPLERS = "torch.utils.data.sampler"


@dataclass(kw_only=True, eq=False)
class OwnDraws:
    """`OwnDraws` is what is known of one loader with generators of its own, which ``mark`` tells in another process.

    ``first`` and ``latest`` is where they were when it began its first epoch and its latest one. ``repeats``: it has
    begun several at the same place. ``kept`` is where they were in a state that was taken over, until the script
    trains on what it has begun. ``draws_seed`` says of a latest epoch there, all of whose batches were given, but whose
    end the loader had not heard, whether it began with a seed for workers.
    """

    mark: list[Any]
    first: list[Tensor]
    latest: list[Tensor]
    repeats: bool = False
    kept: list[Tensor] | None = None
    draws_seed: bool | None = None
    first_to_come: list[Tensor] | None = None  # where the next epoch began if there were no state, if not at first
    has_begun: bool = False  # since the state was taken over
    loader: Any = field(default=lambda: None)  # refers to it


class OwnGenerators:
    """`OwnGenerators` knows those of all loaders that a script has begun."""

    def __init__(self) -> None:
        self._draws: list[OwnDraws] = []

    def state_dict(
        self, at_end: Sequence[tuple[Any, bool]], early: Sequence[tuple[Any, list[Tensor]]] = ()
    ) -> list[dict[str, Any]]:
        """Return where they are. ``at_end``: loaders that have given all of an epoch, and whether it drew a seed.

        ``early``: those that have begun one which they are yet to begin, and where their generators were before that.
        """
        found = [(each, each.loader()) for each in self._draws]
        return [
            {
                "mark": each.mark,
                "first": each.first,
                "latest": each.latest,
                "repeats": each.repeats,
                "kept": next((began for begun, began in early if begun is loader), _states(generators_of(loader))),
                "draws_seed": next((draws for given, draws in at_end if given is loader), None),
            }
            for each, loader in found
            if loader is not None
        ]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Takes it over; each is put to its place when the script begins its loader."""
        before, self._draws = self._draws, [OwnDraws(**each) for each in state]
        for draws in self._draws:
            same = [each for each in before if each.mark == draws.mark and _are_same(each.first, draws.first)]
            if same and (loader := same[0].loader()) is not None:  # whose first epoch is not to come any more
                draws.loader, draws.first_to_come = same[0].loader, _states(generators_of(loader))

    def begins(self, loader: Any, mark: list[Any], *, is_again: bool, has_skipped: bool) -> None:
        """Notes where those of a loader are, or puts them to where they were when the state was kept.

        ``is_again``: it begins the epoch in whose middle it was, and others do that. ``has_skipped``: the script has
        skipped epochs of it since, and may be where the state was kept.
        """
        own = generators_of(loader)
        if not own:
            return
        draws = self._of(loader, mark, _states(own))
        if draws is None:
            draws = OwnDraws(mark=mark, first=_states(own), latest=_states(own))
            gone = [each for each in self._draws if each.kept is None and each.loader() is None]
            for each in gone[: max(len(gone) - _GONE_MAX, 0)]:
                self._draws.remove(each)
            self._draws.append(draws)
        elif draws.kept is not None and not is_again and _goes_on(draws, own, has_skipped=has_skipped):
            _put_on(draws, loader, own)
            draws.latest, draws.kept, draws.draws_seed = _states(own), _states(own), None
        else:
            if is_again or has_skipped or not draws.has_begun:  # else the script only looks at some batches
                draws.kept = None
            draws.repeats = draws.repeats or (not is_again and _are_same(draws.latest, _states(own)))
            draws.latest = _states(own)
        draws.has_begun, draws.loader = True, ref(loader)

    def is_put_back(self, loader: Any) -> None:
        """Notes that those of this loader were put to where it began the epoch that it begins again."""
        for each in self._draws:
            if each.loader() is loader:
                each.latest = _states(generators_of(loader))

    def before_step(self) -> None:
        """The script trains: it has skipped what epochs it skips, of the loaders that it has begun."""
        for each in self._draws:
            if each.has_begun:
                each.kept = None

    def _of(self, loader: Any, mark: list[Any], states: Sequence[Tensor]) -> OwnDraws | None:
        """Return what is known of it, or of one like it that is gone: the one that began there, or the first."""
        same = [each for each in self._draws if each.loader() is loader]
        others = [each for each in self._draws if each.mark == mark and each.loader() is None]
        alike = [each for each in others if _are_same(each.first, states)]
        return next(iter((*same, *alike, *others)), None)


def draw_seed(loader: Any) -> None:
    """Draw what a loader draws for its workers when it begins, from its own generator or torch's."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def is_just_seeded(generator: Generator, state: Tensor) -> bool:
    """Return whether nothing was drawn from a generator in this state since it was seeded."""
    seeded: Tensor = Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
    return bool(torch.equal(state, seeded))


def _goes_on(draws: OwnDraws, own: Sequence[Generator], *, has_skipped: bool) -> bool:
    """Return whether the script leaves it to its generators to come from one epoch to the next, as far as is known.

    Before it has begun one, they are where they were in the beginning; between those that it skips nobody seeds them.
    """
    if draws.has_begun:
        return has_skipped and not any(is_just_seeded(each, each.get_state()) for each in own)
    return not draws.repeats and _are_same(_states(own), draws.first_to_come or draws.first)


def _put_on(draws: OwnDraws, loader: Any, own: Sequence[Generator]) -> None:
    """Put the generators to where they were when the state was kept, or where the epoch ended that was at its end.

    The order may have been drawn to its end or not: its samplers, if they are torch's, draw it once more.
    """
    assert draws.kept is not None
    indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_drawn_again = draws.draws_seed is not None and all(
        type(each).__module__ == _SAMPLERS for each in (indices, getattr(indices, "sampler", indices))
    )
    for generator, state in zip(own, draws.latest if is_drawn_again else draws.kept, strict=False):
        generator.set_state(state)
    if is_drawn_again:
        if draws.draws_seed and loader.generator is not None:
            draw_seed(loader)
        for _ in indices:
            pass


def _states(own: Iterable[Generator]) -> list[Tensor]:
    return [each.get_state() for each in own]


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
