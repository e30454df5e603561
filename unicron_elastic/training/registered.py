"""What a run has registered, object by object: its state, with what ``state_dict`` leaves out, and digests of it.

A dict is registered as it is, for counters and the like of a script's own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unicron_elastic.state.digest import digest_of
from unicron_elastic.state.exact import load_exactly, tensors_of
from unicron_elastic.training.found_twice import found_twice
from unicron_elastic.training.group.sendable import NotSendableError, Stateful, state_of
from unicron_elastic.training.loose_parameters import loose_state, take_loose
from unicron_elastic.training.step import buffers
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.wrapped.engine_progress import loads_all_ranks

MODEL = "model"  # the name of what is trained, which the engine looks after
_OWN_NAMES = frozenset({MODEL, "optimizer", "scheduler", "scaler"})


class ValuesOfScript:
    """`ValuesOfScript` is a dict that a script keeps, whose values are its state."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        """Return what is in it."""
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Change it, and what is in it, to what was in another: a script may know those by other names."""
        _change(self.values, state_dict)


def _change(here: Any, taken: Any) -> Any:
    """Return what is to stand in the place of ``here``: itself, changed to what was ``taken``, if it can be.

    What was taken is of a plain type, as a tensor where a parameter was.
    """
    match here, taken:
        case dict(), dict():
            changed = {key: _change(here[key], value) if key in here else value for key, value in taken.items()}
            here.clear()
            here.update(changed)
        case list(), list():
            here[:] = [*map(_change, here, taken), *taken[len(here) :]]
        case Tensor(), Tensor() if (here.shape, here.dtype, here.layout) == (taken.shape, taken.dtype, taken.layout):
            return here if _copied_into(here, taken) else taken
        case _ if _are_arrays(here, taken) and (here.shape, here.dtype) == (taken.shape, taken.dtype):
            if not here.flags.writeable:
                return taken
            here[...] = taken
        case _:
            return taken
    return here


def _copied_into(here: Tensor, taken: Tensor) -> bool:
    """Copy the numbers, unless that cannot be: of an expanded tensor, or one that was made for inference alone."""
    try:
        with torch.no_grad():
            here.copy_(taken)
    except RuntimeError:
        return False
    return True


def _are_arrays(*values: Any) -> bool:
    """Return whether all are arrays of NumPy's, which may not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and all(type(each) is numpy.ndarray for each in values)


class Registered:
    """The ``objects`` of one run, by name.

    Raises TypeError for one that has no state_dict or cannot load one, and WrongUseError for one whose state_dict has
    not what this rank has.
    """

    def __init__(self, objects: Mapping[str, Stateful | dict[str, Any]]) -> None:
        self.objects: dict[str, Stateful] = {name: with_state(name, each) for name, each in objects.items()}
        self._lazy = {name: each for name, each in self.objects.items() if isinstance(each, nn.Module)}

    def found_twice(self) -> str:
        """Say which two places of registered dicts, or of one and a module or an optimizer, are one; "" if none are."""
        dicts = {name: each.values for name, each in self.objects.items() if isinstance(each, ValuesOfScript)}
        return found_twice(dicts, self.objects) if dicts else ""

    def uninitialised(self) -> str:
        """Say which parameter or buffer of a lazy module has no shape yet; "" if none is like that."""
        for name, module in self._lazy.items():
            for part, tensor in (*module.named_parameters(), *module.named_buffers()):
                if is_lazy(tensor):
                    return f"{name}.{part} is of a lazy module, and gets its shape in the first forward pass"
        self._lazy = {}
        return ""

    def state(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the state_dict of each, or of each with these ``names``.

        Raises NotSendableError if one gives none, or if two places are one object.
        """
        if why := self.found_twice():
            raise NotSendableError(why)
        return {name: state_of(name, self.objects[name]) for name in (self.objects if names is None else names)}

    def hidden(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the buffers of modules other than the model that are not in their ``state``."""
        return {
            name: buffers.given(buffers.named_buffers(each), state[name])
            for name, each in self.objects.items()
            if name in state and name != MODEL and isinstance(each, nn.Module)
        }

    def loose(self, state: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Return the parameters of the optimizers in ``state`` which the state of no registered module has."""
        return {name: each for name, each in loose_state(self.objects, state).items() if name in state}

    def load(
        self,
        state: Mapping[str, Any],
        hidden: Mapping[str, Any],
        loose: Mapping[str, list[Tensor]] | None = None,
    ) -> None:
        """Load each named in ``state`` with what it has there, and the parameters that are ``loose``.

        Raises ValueError if a tensor of a module, an optimizer, the scheduler or the scaler is not what was received.
        """
        take_loose(self.objects, loose or {})
        for name, given in state.items():
            each = self.objects[name]
            # Others may keep what they are given, and change it, and it is loaded once more.
            taken = given if isinstance(each, nn.Module | Optimizer) else copy.deepcopy(given)
            try:
                with torch.inference_mode(mode=_was_made_for_inference(name, each)):
                    if name in hidden and isinstance(each, nn.Module):
                        buffers.take(each, hidden[name], taken)
                    if name in _OWN_NAMES or isinstance(each, nn.Module | Optimizer):
                        load_exactly(each, taken, name)
                    else:
                        each.load_state_dict(taken)
            except Exception as error:
                _name(error, name)
                raise

    # -- what all ranks begin with, besides the model -----------------------------------------------------------------

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return that of each but the model, or of those with these ``names``: the same exactly where the state is."""
        names = [name for name in self.objects if name != MODEL] if names is None else list(names)
        whole = self.some(self.objects if names is None else names).state_dict()
        parts = {name: {what: {name: each[name]} for what, each in whole.items() if name in each} for name in names}
        return {name: f"{digest_of(part):x}" for name, part in parts.items()}

    def some(self, names: Iterable[str]) -> _Some:
        """Return those with these names, as what can be sent."""
        return _Some(self, [name for name in self.objects if name in set(names)])


class _Some:
    """`_Some` is what is registered with some ``names``, as what can be sent."""

    def __init__(self, registered: Registered, names: Sequence[str]) -> None:
        self._registered = registered
        self._names = names

    def state_dict(self) -> dict[str, Any]:
        """Return all of their state."""
        state = self._registered.state(self._names)
        return {
            "state": state,
            "hidden": self._registered.hidden(state),
            "loose": self._registered.loose(state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it over."""
        self._registered.load(state["state"], state["hidden"], state["loose"])


def with_state(name: str, each: Stateful | dict[str, Any]) -> Stateful:
    """Return what is registered with this ``name``, or what stands for a dict. Raises what ``Registered`` raises.

    A class of the script's that is a dict may have a state_dict of its own.
    """
    if isinstance(each, dict) and not (hasattr(each, "state_dict") or hasattr(each, "load_state_dict")):
        if found := next((key for key, part in each.items() if hasattr(part, "load_state_dict")), None):
            kind = type(each[found]).__name__
            raise TypeError(
                f"{name} is a dict, whose values are kept as they are, and {name}[{found!r}] is a {kind}, which has a "
                f"state_dict of its own: register it by a name of its own, as Run(..., {found}=...)"
            )
        return ValuesOfScript(each)
    if isinstance(each, type):
        raise TypeError(f"{name} must be an object with a state, and not the class {each.__name__}")
    if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
        raise TypeError(f"{name} must have state_dict and load_state_dict, and a {type(each).__name__} has not")
    if hasattr(each, "consolidate_state_dict"):  # whose state_dict has that of all ranks, on one of them
        raise WrongUseError(
            f"{name} is a {type(each).__name__}, of whose state each rank has a part, and its state_dict does "
            "not give that part: shard with fully_shard(), whose state Run keeps, or leave the optimizer out "
            "of Run and keep its checkpoints in the script"
        )
    if loads_all_ranks(each):
        raise WrongUseError(
            f"{name} is a {type(each).__name__}, which loads the states of all ranks at once: use Run.of(engine), with "
            "what deepspeed.initialize() has given"
        )
    return cast("Stateful", each)


def _was_made_for_inference(name: str, registered: Stateful) -> bool:
    """Return whether its tensors, as those of an average, may be changed in inference mode only."""
    if isinstance(registered, nn.Module):
        there = (each for each in (*registered.parameters(), *registered.buffers()) if not is_lazy(each))
        return any(each.is_inference() for each in there)
    if name in _OWN_NAMES or isinstance(registered, Optimizer):
        return False
    tensors = [tensor for _, tensor in tensors_of(state_of(name, registered), name)]
    return bool(tensors) and all(tensor.is_inference() for tensor in tensors)


def _name(error: Exception, name: str) -> None:
    """Have the error say what was loaded: of two modules of one class torch's words are the same."""
    if len(error.args) == 1 and isinstance(error.args[0], str) and not error.args[0].startswith(name):
        error.args = (f"{name}: {error.args[0]}",)


def to_tell(unlike: Sequence[str], objects: Mapping[str, Any]) -> list[str]:
    """Return those names of which people are told: what ``follows_first`` is the first rank's whenever ranks agree."""
    return [name for name in unlike if not getattr(objects[name], "follows_first", False)]


def about_unlike(names: Sequence[str], rank: int) -> str:
    """Return what people are told of what was not the same on all ranks when they began."""
    *first, last = names
    listed = f"{', '.join(first)} and {last} were" if first else f"{last} was"
    return (
        f"{listed} not the same on all ranks when the training began: all have now what rank {rank} had, as a "
        "replacement of a lost rank would. What is to differ from rank to rank must not be registered"
    )
