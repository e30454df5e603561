"""Whether all ranks have the same state but for what is of a rank alone, so that one may go on from another's.

A script with its model in DistributedDataParallel need not say so. It has others beside that model: what each rank has
for itself, as its part of an embedding table, is found when all ranks compare, where they begin or come back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unicron_elastic.compat.groups import hook_states
from unicron_elastic.state.digest import digest_of
from unicron_elastic.state.snapshot.gather import Gather

_APART = frozenset({"PostLocalSGDState", "PostLocalSGDOptimizer"})  # with which ranks train apart between two averages


class _Living:
    """`_Living` are those of some reducers that the script has not dropped."""

    def __init__(self, reducers: Iterable[DistributedDataParallel]) -> None:
        self._references = [ref(each) for each in reducers]

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        return (each for reference in self._references if (each := reference()) is not None)


class Replication:
    """`Replication` knows whether the state of a run is the same on all ranks: as it is ``said``, or as it is found.

    ``digests`` gives those of ``objects``, of what is registered, by name; ``reducers`` are what modules are in.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        reducers: Iterable[DistributedDataParallel],
        *,
        said: bool | None,
        digests: Callable[[Iterable[str]], Mapping[str, str]],
    ) -> None:
        self._objects = objects
        self._digests_of = digests
        self._reducers = _Living(reducers)
        self._said = said
        self._is_same = bool(list(self._reducers)) if said is None else said
        self.may_be_lost = bool(said)  # any state of others will do, though what is of a rank alone is not in it

    @property
    def holds(self) -> bool:
        """Return whether it is the same now."""
        return self._is_same and (self._said is not None or not self._train_apart())

    def begin_steps(self) -> None:
        """Ranks in ``steps()`` have the same."""
        self._is_same = self._said = True

    def take(self, *, is_replicated: bool) -> None:
        """A state was taken over from memory, which knows whether it was so on all ranks when it was made."""
        if self._said is None:
            self._is_same = self._is_same and is_replicated

    def compare(self, gather: Gather) -> str:
        """Compare with all ranks what is beside the model; return what people are to hear, "" if it is the same."""
        if self._said is not None or not self._is_same:
            return ""
        heard = [json.loads(each) for each in gather(json.dumps(self._digests()))]
        apart = [name for name in heard[0] if any(each.get(name) != heard[0][name] for each in heard)]
        self._is_same = not apart
        return _about(apart) if apart else ""

    def _train_apart(self) -> bool:
        states = [state for each in self._reducers for state in hook_states(each)]
        kinds = {kind.__name__ for each in (*states, *self._objects.values()) for kind in type(each).__mro__}
        return not kinds.isdisjoint(_APART)

    def _digests(self) -> dict[str, str]:
        """Return those of modules and optimizers that the reducers do not make the same."""
        beside = [name for name, each in self._objects.items() if name != "model" and _is_beside(each)]
        ignored = {
            f"model.{name}": f"{digest_of(parameter.detach()):x}"
            for each in self._reducers
            for name, parameter in each.module.named_parameters()
            if name in each.parameters_to_ignore
        }
        return {**self._digests_of(beside), **ignored}


class BufferSync:
    """`BufferSync` keeps whether each reducer will give all ranks the buffers of rank 0 in its next forward pass.

    Between two passes of an accumulation it does not; one that was made anew would, and change them.
    """

    def __init__(self, reducers: Iterable[DistributedDataParallel]) -> None:
        self._reducers = _Living(reducers)

    def state_dict(self) -> list[bool]:
        """Return it, by reducer."""
        return [bool(each.require_forward_param_sync) for each in self._reducers]

    def load_state_dict(self, state: Iterable[bool]) -> None:
        """Have it so again."""
        for each, is_synced in zip(self._reducers, state, strict=False):
            each.require_forward_param_sync = is_synced


def reducers_of(objects: Iterable[Any]) -> list[DistributedDataParallel]:
    """Return those among what was registered."""
    return [each for each in objects if isinstance(each, DistributedDataParallel)]


def _is_beside(registered: Any) -> bool:
    return isinstance(registered, nn.Module | Optimizer) and not isinstance(registered, DistributedDataParallel)


def _about(names: Iterable[str]) -> str:
    return (
        f"not the same on all ranks, beside what is in DistributedDataParallel: {', '.join(names)}. So each rank goes "
        "on from snapshots of its own alone, and saves its own; Run(replicated=True) says that any rank's state will do"
    )
