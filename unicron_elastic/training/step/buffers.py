"""The buffers of a model, which forward passes change: made independent of which rank computes what.

Every micro-batch begins with the buffers that the step began with. After the step the running statistics of
normalization layers are those of the global batch (``running_statistics.py``), and every other buffer is what
micro-batch 0 has made of it, whoever computed that; DistributedDataParallel gives all ranks what rank 0 has. A buffer
that ``state_dict`` leaves out and that gets another shape is a cache: it is each process's own affair. So is the
content of one that a forward pass makes or the script changes between steps, as an evaluation by one rank does.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import changes_of, copy_each, expanded_axes, is_plain
from unicron_elastic.state.digest import digest_of
from unicron_elastic.state.exact import bits, check_same
from unicron_elastic.training.step.module_values import has_extra_state
from unicron_elastic.training.step.running_statistics import Statistics
from unicron_elastic.training.step.wrong_use import WrongUseError

_Seen = tuple[int, int]  # the id of a tensor, and how often it was changed


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer was when the step began: ``tensor`` is that one, and ``before`` a copy of what it was."""

    name: str
    module: nn.Module
    leaf: str
    tensor: Tensor
    before: Tensor

    @property
    def is_cache(self) -> bool:
        """Whether ``state_dict`` leaves it out."""
        return self.leaf in self.module._non_persistent_buffers_set

    @property
    def now(self) -> Tensor | None:
        """What is there."""
        return self.module._buffers.get(self.leaf)

    @property
    def is_intact(self) -> bool:
        """Whether what is there has the shape and type that it had."""
        return self.now is not None and _fits(self.now, self.before) and self.now.device == self.before.device


class Buffers:
    """`Buffers` are those of ``model``, in steps of ``micro_batches`` micro-batches.

    ``changes`` are tensors whose ``.grad`` is to be reduced with the parameters'. Raises TypeError for a layer whose
    forward pass does what cannot be had here.
    """

    def __init__(self, model: nn.Module, micro_batches: int, *, is_reproducible: bool) -> None:
        _check_layers(model)
        self._model = model
        self._statistics = Statistics(micro_batches)
        self._is_reproducible = is_reproducible
        self._modules: list[tuple[str, nn.Module]] = []  # of the present step
        self._places: dict[str, _Place] = {}  # by name; of the present step
        self._before: dict[tuple[int, str], Tensor] = {}
        self._extra: dict[str, int] = {}  # by the names of modules: what they give besides tensors
        self._is_in_step = False
        self._is_used = False  # whether a micro-batch of this step has begun
        self._left: dict[str, _Seen] | None = None  # the caches, as the step before left them; None: there was none
        self.own: set[str] = set()  # the names of the caches whose content is this process's own affair
        self.look(model.modules())

    @property
    def changes(self) -> list[Tensor]:
        """Those of the layers that were there at the last look."""
        return self._statistics.changes

    def take_count(self, micro_batches: int) -> None:
        """Takes it that the step that begins has so many micro-batches."""
        self._statistics.micro_batches = micro_batches

    def look(self, modules: Iterable[nn.Module]) -> bool:
        """Looks at the layers of the model, before ``begin``; whether ``changes`` are other tensors than before.

        Raises TypeError as when it was made.
        """
        if not self._statistics.look(modules):
            return False
        _check_layers(self._model)
        return True

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins with the buffers as they are."""
        known = {id(place.tensor): place.before for place in self._places.values()}
        copies: dict[int, Tensor] = {}
        places: dict[str, _Place] = {}
        self._modules = list(self._model.named_modules())
        for name, module, leaf, tensor in _found(self._modules):
            if id(tensor) not in copies:
                copy = known.get(id(tensor))
                is_good = copy is not None and _fits(copy, tensor) and copy.device == tensor.device
                copies[id(tensor)] = copy if copy is not None and is_good else torch.empty_like(tensor)
            places[name] = _Place(name, module, leaf, tensor, copies[id(tensor)])
        self._places = places
        copy_each([place.before for place in places.values()], [place.tensor.detach() for place in places.values()])
        self._before = {(id(place.module), place.leaf): place.before for place in places.values()}
        self._extra = self._extra_states() if self._is_reproducible else {}
        self._is_in_step, self._is_used = True, False
        if self._left is not None:
            self.own |= {name for name, seen in _caches(places).items() if self._left.get(name) != seen}
        self._left = None  # until the step is over: a state that comes meanwhile is not the script's doing

    def begin_micro_batch(self) -> None:
        """Puts back what another micro-batch has changed."""
        if self._is_used:
            self._put_back()
        self._is_used = True

    def end_micro_batch(self) -> None:
        """Takes what this micro-batch has changed. Raises RuntimeError where ``reproducible`` cannot hold."""
        self._statistics.end_micro_batch(self._before)
        if self._is_reproducible:
            self._check_shapes()
            self._check_extra()

    def settle(self, made: dict[str, Tensor]) -> None:
        """The buffers as they are after the step, when the changes are reduced; ``made``: by micro-batch 0."""
        self._put_back()
        self._statistics.settle(self._before)
        self._take(made)
        self.end()

    def end(self) -> None:
        """Leave the step: the state is what the buffers are."""
        self._is_in_step = False
        self._left = _caches(self._places)

    def _put_back(self) -> None:
        intact = [place for place in self._places.values() if place.is_intact]
        for place in intact:
            place.module._buffers[place.leaf] = place.tensor  # which may have been replaced
        copy_each([place.tensor.data for place in intact], [place.before for place in intact])

    def made(self) -> dict[str, Tensor]:
        """Return what the micro-batch that has just ended has changed, by name.

        Those of normalization layers are not in it, nor are caches.
        """
        own = [place for place in self._places.values() if not self._statistics.looks_after(place.module, place.leaf)]
        intact = [place for place in own if place.is_intact]
        others = [place for place in own if not place.is_intact and not place.is_cache]
        pairs = [(place.now, place.before) for place in intact if place.now is not None]
        changed = [place for place, is_other in zip(intact, _differ(pairs), strict=True) if is_other]
        named = {place.name: place.now for place in (*changed, *others) if place.now is not None}
        return named | self._new()

    def _new(self) -> dict[str, Tensor]:
        """Those that ``state_dict`` has, and that were not there when the step began."""
        return {
            name: tensor
            for name, module, leaf, tensor in _found(self._modules)
            if name not in self._places and leaf not in module._non_persistent_buffers_set
        }

    def _check_shapes(self) -> None:
        changed = [place for place in self._places.values() if not place.is_intact and not place.is_cache]
        names = [place.name for place in changed] or list(self._new())
        if names:
            path, _, leaf = names[0].rpartition(".")
            kind = type(self._model.get_submodule(path)).__name__
            raise WrongUseError(
                f"reproducible=True cannot hold: a forward pass makes the buffer {leaf} of {path or 'the model'}, a "
                f"{kind}, or changes its shape or type; what the next one finds then depends on who computes it. Make "
                "it before the run, or register it with persistent=False if it is a cache"
            )

    def _extra_states(self) -> dict[str, int]:
        """Return digests of what modules give besides tensors, by their names; of none that cannot be sent."""
        found = dict[str, int]()
        for name, module in self._modules:
            if has_extra_state(module):
                with contextlib.suppress(TypeError):
                    found[name] = digest_of(module.get_extra_state())
        return found

    def _check_extra(self) -> None:
        now = self._extra_states()
        names = [name for name, each in self._extra.items() if now.get(name) != each]
        if names:
            raise WrongUseError(
                f"reproducible=True cannot hold: a forward pass changes the extra state of {names[0] or 'the model'}; "
                "what the next one finds then depends on who computes it. Have that in a buffer, or change it between "
                "steps, the same on all ranks"
            )

    def _take(self, made: Mapping[str, Tensor]) -> None:
        """Set the buffers to what micro-batch 0 made of them."""
        tied: dict[int, set[str]] = {}
        for known in self._places.values():
            tied.setdefault(id(known.tensor), set()).add(known.name)
        for name, value in made.items():
            place = self._places.get(name)
            if place is None:
                _put(self._model, name, value.to(device_of(self._model)), is_persistent=True)
            elif place.is_intact and _holds(place.tensor, value) and tied[id(place.tensor)] <= _same(made, name):
                place.tensor.data.copy_(value)
            elif place.is_intact or place.now is None or place.now.shape == value.shape:
                place.module._buffers[place.leaf] = value.to(place.before.device)  # reshaped, or tied no longer
            # else it has another shape here already, made of another micro-batch

    # -- what is given away -------------------------------------------------------------------------------------------

    def at_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        """A model's state_dict with the buffers that the present step began with; as it is between steps."""
        if not self._is_in_step:
            return state
        lying = {_memory(place.tensor): place.before for place in self._places.values()}
        rest = OrderedDict[str, Any]()
        for name, value in state.items():
            if name in self._places:
                rest[name] = self._places[name].before
            else:
                rest[name] = lying.get(_memory(value), value) if isinstance(value, Tensor) else value
        for name in self._new():
            rest.pop(name, None)
        if hasattr(state, "_metadata"):
            rest._metadata = state._metadata  # type: ignore[attr-defined]
        return rest

    def named(self) -> dict[str, Tensor]:
        """All of them, at rest: those that the present step began with, or as they are between steps."""
        if self._is_in_step:
            return {name: place.before for name, place in self._places.items()}
        return named_buffers(self._model)


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that are plain numbers, also those that are tied."""
    return {name: tensor for name, _, _, tensor in _found(model.named_modules())}


def given(buffers: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """``buffers`` by name; None for those that are in ``state``, the model's state_dict, and so in what is given."""
    return {name: None if name in state else tensor for name, tensor in buffers.items()}


def take(model: nn.Module, buffers: Mapping[str, Tensor | None], state: Mapping[str, Any]) -> None:
    """Load into ``model`` what another's ``given`` gave, of which ``state`` is the state_dict.

    A buffer of another shape or type is replaced, as is what is tied to it. Raises ValueError for a name that does not
    fit this model.
    """
    own = named_buffers(model)
    replaced: dict[int, Tensor] = {}
    for name, value in buffers.items():
        received = state[name] if value is None else value
        buffer = own.get(name)
        if buffer is not None and _holds(buffer, received):
            buffer.data.copy_(received)
            continue
        if buffer is None:
            _put(model, name, received.to(device_of(model), copy=True), is_persistent=value is None)
            continue
        if id(buffer) not in replaced:
            replaced[id(buffer)] = received.to(buffer.device, copy=True)
        _put(model, name, replaced[id(buffer)], is_persistent=value is None)
    for name in own.keys() - buffers.keys():
        _put(model, name, None, is_persistent=name in state)
    hidden = {name: value for name, value in buffers.items() if value is not None}
    check_same(named_buffers(model), hidden, "model")


def _caches(places: Mapping[str, _Place]) -> dict[str, _Seen]:
    """Those that are where they were when the step began, in the same shape."""
    own = {name: place for name, place in places.items() if place.is_cache and place.now is place.tensor}
    return {name: (id(place.tensor), changes_of(place.tensor)) for name, place in own.items()}


def _check_layers(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"{name} is a SyncBatchNorm, whose forward pass is a collective, and within a step there must be none: "
                "BatchNorm's running statistics are those of the global batch here"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise TypeError(
                f"{name} is an {type(layer).__name__} with max_norm, whose forward pass changes its weights, so that "
                "they would differ from rank to rank: make rows shorter after optimizer.step()"
            )


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _found(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, str, Tensor]]:
    """The buffers that are plain numbers, with their names, also those that are tied; others stay as they are made."""
    return [
        (f"{path}.{leaf}" if path else leaf, module, leaf, tensor)
        for path, module in modules
        for leaf, tensor in list(module._buffers.items())  # another thread may ask, while a forward pass makes one
        if tensor is not None and _is_plain(tensor)
    ]


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether the two of each pair differ in any bit; one synchronisation with each device that is not the host."""
    found = [False] * len(pairs)
    elsewhere: dict[torch.device, list[int]] = {}
    for number, (one, other) in enumerate(pairs):
        if one.device.type == "cpu":
            found[number] = not torch.equal(bits(one), bits(other))
        else:
            elsewhere.setdefault(one.device, []).append(number)
    for numbers in elsewhere.values():
        flags = torch.stack([(bits(pairs[number][0]) != bits(pairs[number][1])).any() for number in numbers])
        for number, is_other in zip(numbers, flags.tolist(), strict=True):
            found[number] = is_other
    return found


def _same(made: Mapping[str, Tensor], name: str) -> set[str]:
    """The names of all buffers that are one tensor with this one."""
    return {other for other, each in made.items() if each is made[name]}


def _fits(value: Tensor, buffer: Tensor) -> bool:
    return (value.shape, value.dtype) == (buffer.shape, buffer.dtype)


def _holds(buffer: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` can be copied to it: what is expanded has not a place for each number."""
    return _fits(value, buffer) and not expanded_axes(buffer)


def _put(model: nn.Module, name: str, value: Tensor | None, *, is_persistent: bool) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"the buffer {name} was received, and the model has no place for it: {error}") from None
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module.register_buffer(leaf, value, persistent=is_persistent)


def _is_plain(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and is_plain(buffer)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
