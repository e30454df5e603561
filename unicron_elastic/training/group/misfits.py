"""Parameters that a state trains, or has frozen, and for which a DistributedDataParallel of the script was not built.

It reduces what was trained when it was built. What is unfrozen later differs from rank to rank, and nobody says so;
what is frozen later it waits for.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic.compat.groups import BuiltFor, reduced_by


class Misfits(NamedTuple):
    """`Misfits` are the positions of parameters for which what reduces them was not built."""

    trained: frozenset[int]  # and would not be reduced
    frozen: frozenset[int]  # and would be waited for


def unfit(parameters: Sequence[Tensor], trained: Collection[int], frozen: Collection[int]) -> Misfits:
    """Return which of those that are to be ``trained`` from now on, and ``frozen``, a living reducer is not for.

    One that the script has dropped does not count.
    """
    found = _unfit(parameters, trained, frozen)
    if any(found):
        gc.collect()
        found = _unfit(parameters, trained, frozen)
    return found


def _unfit(parameters: Sequence[Tensor], trained: Collection[int], frozen: Collection[int]) -> Misfits:
    # By type(), as isinstance() would ask the objects, and some answer with a warning. Each refers to its class.
    kinds = _kinds(DistributedDataParallel)
    living = [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
    places = {id(each): position for position, each in enumerate(parameters)}
    reducers = [reduced for each in living if (reduced := reduced_by(each)) is not None]
    return Misfits(
        frozenset(place for each in reducers for place in _not_reduced(each, places)).intersection(trained),
        frozenset(place for each in reducers for place in _waited_for(each, places)).intersection(frozen),
    )


def _kinds(kind: type) -> set[type]:
    """Return a class with all that are made from it."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _not_reduced(reduced: BuiltFor, places: dict[int, int]) -> set[int]:
    if reduced.is_alone:
        return set()
    return _places(reduced.parameters, places) - _places(reduced.reduced, places)


def _waited_for(reduced: BuiltFor, places: dict[int, int]) -> set[int]:
    return set() if reduced.may_lack else _places(reduced.reduced, places)


def _places(parameters: Sequence[Tensor], places: dict[int, int]) -> set[int]:
    return {places[id(each)] for each in parameters if id(each) in places}
