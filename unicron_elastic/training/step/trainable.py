"""Which parameters of a model are trained, in which order they are used, and which modules are in training mode.

Scripts change both between steps, as in gradual unfreezing, often in one step alone. A newcomer that begins later has
not run those lines, and gets what they did together with the state.

A model need not name its parameters in the order in which it uses them. The first backward pass of micro-batch 0 shows
that order; all ranks take it over with what that micro-batch has made, and with the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unicron_elastic.compat.tensors import walked
from unicron_elastic.engine.protocol.shares import from_ranges, to_ranges

_NAMES_MAX = 3


def _identity(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return what tells a parameter from another one, and from itself before ``.half()``."""
    return id(parameter), parameter.dtype, None if is_lazy(parameter) else parameter.shape


def _counted(what: str, names: Sequence[str], count: int) -> str:
    """Return how many they are, of which these are the first."""
    return f"{count} {what}{'s' * (count > 1)} ({', '.join(names)}{', ...' if count > len(names) else ''})"


class Trainable:
    """`Trainable` knows what of ``model`` was trained when it was last looked at: at the beginning of a step.

    ``prefix``: what its names begin with for people.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self._model = model
        self._prefix = prefix
        self._key: tuple[list[Any], list[bool], tuple[int, ...]] = ([], [], ())
        self.modules: list[nn.Module] = []  # all, each once
        self.parameters: list[nn.Parameter] = []  # all, each once; positions are those in this list
        self.trained: list[nn.Parameter] = []
        self.frozen: list[nn.Parameter] = []
        self.positions: frozenset[int] = frozenset()  # of those that are trained
        self.in_order: list[nn.Parameter] = []  # what is trained, in the order of use as far as that is known
        self._order: tuple[int, ...] = ()  # their positions, if it is another order than the model's own
        self._ordered = frozenset[int]()  # the positions of those whose order is known
        self.look()

    def look(self) -> bool:
        """Looks at the model; whether it has other parameters, or of another type, or trains others, than before."""
        modules, parameters = walked(self._model)
        self.modules = modules
        self._modes = [module.training for module in modules]
        flags = [parameter.requires_grad for parameter in parameters]
        key = ([_identity(each) for each in parameters], flags, self._order)
        if key == self._key:
            return False
        self._key = key
        self.parameters = parameters
        self.positions = frozenset(position for position, is_trained in enumerate(flags) if is_trained)
        self.trained = [self.parameters[position] for position in sorted(self.positions)]
        self.frozen = [parameter for parameter, is_trained in zip(parameters, flags, strict=True) if not is_trained]
        self._ranges = to_ranges(self.positions)
        is_known = self.positions == frozenset(self._order)
        self.in_order = [self.parameters[position] for position in self._order] if is_known else self.trained
        self._layout = f"{self._ranges} {self._order if is_known else ()}"
        return True

    def is_as_seen(self) -> bool:
        """Whether the model has the parameters of the last look, and not others for a while.

        It has those of a call within ``torch.func.functional_call``. May be asked in any thread.
        """
        try:
            return [*map(id, walked(self._model)[1])] == [*map(id, self.parameters)]
        except RuntimeError:  # it gets others in this moment
            return False

    def stamp(self, step: int) -> bytes:
        """Four bytes that tell this step, with these parameters, from others."""
        return hashlib.sha256(f"{step} {self._layout}".encode()).digest()[:4]

    # -- the order of use ---------------------------------------------------------------------------------------------

    @property
    def knows_order(self) -> bool:
        """Return whether it is known in which order the parameters that are trained are used."""
        return self._ordered == self.positions

    def order_of(self, came: Sequence[Tensor]) -> Tensor:
        """Return the positions of what is trained in the order of use, by the gradients that ``came`` in one pass.

        A backward pass comes to what was used last first. What got no gradient counts as used before all else.
        """
        place = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        back = dict.fromkeys(place[id(each)] for each in reversed(came))  # to one that is added to twice at the end
        rest = sorted(self.positions - back.keys())
        return torch.tensor([*rest, *(position for position in back if position in self.positions)])

    def take_order(self, order: Tensor) -> None:
        """Take over the order that one rank has seen; the next look tells whether it is another than before."""
        positions = tuple(order.tolist())
        self._ordered = frozenset(positions)
        self._order = () if positions == tuple(sorted(positions)) else positions

    def _known(self) -> dict[str, Any]:
        """Return what a newcomer must know as well: it may be the next to tell the order, in as many bytes."""
        return {"order": list(self._order), "ordered": to_ranges(self._ordered)}

    def terms(self, counts: str, *, is_reproducible: bool) -> str:
        """What must be the same for all members, in a few words; ``counts``: of how many micro-batches steps are."""
        of = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in self.parameters]
        shapes = hashlib.sha256(repr(of).encode()).hexdigest()[:12]
        numbers = sum(parameter.numel() for parameter in self.parameters)
        how = ", reproducible" if is_reproducible else ""
        return f"{counts} and {len(of)} parameters of {numbers} numbers ({shapes}){how}"

    def name(self, parameter: Tensor) -> str:
        """What the model calls a parameter."""
        names = (name for name, each in self._model.named_parameters() if each is parameter)
        return next((f"{self._prefix}{name}" for name in names), "a parameter")

    def tell_apart(self, trained: frozenset[int]) -> str:
        """What whoever trains the parameters at these positions does otherwise than this process."""
        verbs = (
            ("trains {} that this rank has frozen", trained - self.positions),
            ("has frozen {} that this rank trains", self.positions - trained),
        )
        return " and ".join(verb.format(self._named(positions)) for verb, positions in verbs if positions)

    def tell_modes_apart(self, in_training: frozenset[int]) -> str:
        """What whoever has the modules at these positions in training mode does otherwise than this process."""
        own = frozenset(position for position, is_training in enumerate(self._modes) if is_training)
        verbs = (
            ("has {} in training mode that this rank has in evaluation mode", in_training - own),
            ("has {} in evaluation mode that this rank has in training mode", own - in_training),
        )
        names = {id(module): f"{self._prefix}{name}" for name, module in self._model.named_modules()}

        def named(positions: frozenset[int]) -> str:
            found = [
                names.get(id(self.modules[position]), "").strip(".") or "the model"
                for position in sorted(positions)[:_NAMES_MAX]
            ]
            return _counted("module", found, len(positions))

        return " and ".join(verb.format(named(positions)) for verb, positions in verbs if positions)

    def _named(self, positions: frozenset[int]) -> str:
        names = [self.name(self.parameters[position]) for position in sorted(positions)[:_NAMES_MAX]]
        return _counted("parameter", names, len(positions))

    # -- for newcomers ------------------------------------------------------------------------------------------------

    @property
    def is_in_training(self) -> bool:
        """Return whether the model as a whole is in training mode now."""
        return bool(self._model.training)

    def state_dict(self) -> dict[str, Any]:
        """What was seen at the last look."""
        in_training = [position for position, is_training in enumerate(self._modes) if is_training]
        return {"trained": self._ranges, "in_training": to_ranges(in_training), **self._known()}

    def present(self) -> dict[str, Any]:
        """The same, as it is now."""
        modules, parameters = walked(self._model)
        trained = [position for position, parameter in enumerate(parameters) if parameter.requires_grad]
        in_training = [position for position, module in enumerate(modules) if module.training]
        return {"trained": to_ranges(trained), "in_training": to_ranges(in_training), **self._known()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the model so. Raises ValueError if it has fewer parameters or modules."""
        modules, parameters = walked(self._model)
        trained = positions_of(state["trained"], len(parameters), "parameters")
        for position, parameter in enumerate(parameters):
            if parameter.requires_grad != (position in trained):  # that of a tensor made for inference cannot be set
                parameter.requires_grad_(position in trained)
        self._order = tuple(state.get("order", ()))
        self._ordered = from_ranges(state.get("ordered", ()), len(parameters))
        if "in_training" in state:
            in_training = positions_of(state["in_training"], len(modules), "modules")
            for position, module in enumerate(modules):
                module.training = position in in_training


def positions_of(ranges: Sequence[Sequence[int]], count: int, what: str) -> frozenset[int]:
    """Return those that a state names of a model's ``what``, of which there are so many here. Raises ValueError."""
    end = max((end for _, end in ranges), default=0)
    if end > count:
        raise ValueError(f"they are of a model with {end} {what} or more, and this one has {count}")
    return from_ranges(ranges, count)
