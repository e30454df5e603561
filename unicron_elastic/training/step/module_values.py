"""What decides what modules compute and is in no state_dict: settings of torch's layers, and a script's own values.

Scripts change both on the way, often in one step alone, which is past when a newcomer begins. A setting is what a layer
of torch's is made with, as the ``p`` of a Dropout: it is the same on all ranks. A value of a script's own may be a
count, a cache or the number of a rank: whether it is to be the same nobody can see.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from ctypes import string_at
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import NormBase
from unicron_elastic.state.skeleton import is_plain

_OF_TORCH = ("torch.nn.modules.", "torch.nn.utils.")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PER_RANK = frozenset({"device"})  # what layers are made with, and where they are
_PARTS_MAX, _CHARACTERS_MAX, _ELEMENTS_MAX = 64, 1000, 2**16  # what is longer is data


@dataclass(frozen=True, slots=True)
class _Seen:
    """`_Seen` is one look at the modules: by path their plain values, and by name what is no plain value."""

    values: dict[str, dict[str, Any]]
    objects: dict[str, dict[str, Any]]


class ModuleValues:
    """`ModuleValues` gives newcomers the values of ``modules``, which are registered under these names.

    Values are plain ones, and small tensors and arrays that are neither parameters nor buffers. Newcomers get all
    settings. Of other values they get those that the script has changed since it asked for the giver's first step, if
    they have themselves what the giver had then. What the first forward passes change does not count: they make what
    they need, of which a value may tell, and those of the newcomer make it, too.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._start: _Seen | None = None  # when the script asked for the first step
        self._computing: _Seen | None = None  # before the first forward pass
        self._first: _Seen | None = None  # with what counts as the first values, once the first step was computed
        self._before: dict[str, dict[str, list[Any]]] = {}  # of what was taken: what the giver had first
        self._own: dict[str, dict[str, Any]] | None = None  # what was here when something was taken first

    def begin(self) -> None:
        """Notes what there is when the script asks for its first step."""
        if self._first is None:
            self._start = self._start or self._seen()

    def begin_step(self) -> None:
        """Notes what the script has made of it before the first forward pass."""
        if self._first is None:
            self._computing = self._computing or self._seen()

    def end_step(self) -> None:
        """Notes what there is after the first step."""
        if self._first is None:
            self._first = self._seen()
            for path, values in list(self._first.values.items()):
                changed = self._changed_by_script(path, values)
                kept = {key: each for key, each in values.items() if key not in changed}
                self._first.values[path] = kept | {key: was[0] for key, was in changed.items() if was}
                self._first.objects[path] = dict.fromkeys(self._first.objects[path])  # their names
            self._start = self._computing = None

    def _seen(self) -> _Seen:
        named = list(self._named())
        return _Seen({path: _others(module) for path, module in named}, {path: _objects(each) for path, each in named})

    def _changed_by_script(self, path: str, values: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the values that the script changed before the first forward pass, which left them alone, as they were.

        None of a module for which the script made or replaced objects with that, as in an evaluation.
        """
        start, computing = self._start, self._computing
        if start is None or computing is None:
            return {}
        were, are = (each.objects.get(path, {}) for each in (start, computing))
        if were.keys() != are.keys() or any(were[name] is not each for name, each in are.items()):
            return {}
        before, then = start.values.get(path, {}), computing.values.get(path, {})
        left_alone = [key for key in values if _is_same(_had(then, key), [values[key]])]
        return {key: _had(before, key) for key in left_alone if not _is_same(_had(before, key), _had(then, key))}

    def state_dict(self) -> dict[str, Any]:
        """All settings, and of each other value that has changed what it was, in a list or none, and what it is."""
        named = list(self._named())
        found = {path: settings(module) for path, module in named}
        changed = {path: self._changed(path, module) for path, module in named}
        return {
            "settings": {path: each for path, each in found.items() if each},
            "changed": {path: each for path, each in changed.items() if each},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes them over."""
        named = list(self._named())
        if self._own is None:
            self._own = {path: _others(module) for path, module in named}
        for path, module in named:
            here = settings(module)
            _set(module, {key: value for key, value in state["settings"].get(path, {}).items() if key in here})
            changed = state["changed"].get(path, {})
            same = {key for key, (was, _) in changed.items() if _is_same(_had(self._own.get(path, {}), key), was)}
            _set(module, {key: now for key, (_, now) in changed.items() if key in same})
            self._before[path] = {key: was for key, (was, _) in changed.items() if key in same}

    def _changed(self, path: str, module: nn.Module) -> dict[str, tuple[list[Any], Any]]:
        """None of a module that has made objects since: its values may tell of those, which cannot be given."""
        taken = self._before.get(path, {})
        now = _others(module)
        if self._first is None:
            return {key: (was, now[key]) for key, was in taken.items() if key in now}
        if not _objects(module).keys() <= self._first.objects.get(path, {}).keys():
            return {}
        first = self._first.values.get(path, {})
        was = {key: taken.get(key, _had(first, key)) for key in now}
        return {key: (was[key], value) for key, value in now.items() if not _is_same(was[key], [value])}

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._modules.items():
            yield from ((f"{name}.{path}", each) for path, each in module.named_modules())


def settings(module: nn.Module) -> dict[str, Any]:
    """Return what a layer of torch's, or of a class that is derived from one, is made with, as far as it is plain."""
    names, values = _names_of_settings(_kind(module)), vars(module)
    return {name: _copied(values[name]) for name in names if name in values and _is_value(values[name])}


def decisive(module: nn.Module, *, is_trained: bool) -> dict[str, Any]:
    """Return what must be the same on all ranks: the settings, and the mode of one that trains if it changes a result.

    That is known of layers of torch's alone.
    """
    found = settings(module)
    if is_trained and _mode_decides(module):
        found["training"] = module.training
    return found


def asks_mode(module: nn.Module) -> bool:
    """Return whether a class that is not torch's reads ``training``: what for, nobody can see."""
    kind = _kind(module)
    return not f"{kind.__module__}.".startswith("torch.") and not _mode_decides(module) and _asks_mode(kind)


def has_extra_state(module: nn.Module) -> bool:
    """Return whether its class gives state besides tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


@lru_cache(maxsize=10_000)
def _names_of_settings(kind: Any) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith(_OF_TORCH) and each is not nn.Module and "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters.values()
            names |= {p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return tuple(name for name in names if name not in _PER_RANK | _OF_EVERY_MODULE)


@lru_cache(maxsize=10_000)
def _asks_mode(kind: Any) -> bool:
    """Return whether a function of the class reads ``training``: a Linear may be in one mode or the other."""
    of = [each for base in kind.__mro__ if base not in nn.Module.__mro__ for each in vars(base).values()]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in of if callable(each)]
    return any(_reads(code, "training") for code in codes if code is not None)


def _mode_decides(module: nn.Module) -> bool:
    """Return whether a layer of torch's gives something else in the other mode, as a Dropout of 0 does not."""
    match module:
        case nn.Dropout() | nn.Dropout1d() | nn.Dropout2d() | nn.Dropout3d():
            return bool(module.p > 0)
        case nn.AlphaDropout() | nn.FeatureAlphaDropout():
            return bool(module.p > 0)
        case nn.RNNBase() | nn.MultiheadAttention():
            return bool(module.dropout > 0)
        case _ if isinstance(module, NormBase):
            return module.running_mean is not None
        case _:
            return isinstance(module, nn.RReLU)


def _reads(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_reads(each, name) for each in code.co_consts if isinstance(each, CodeType))


def _kind(module: nn.Module) -> Any:
    return type(module)


def _others(module: nn.Module) -> dict[str, Any]:
    """Return the plain values that are no settings."""
    known = {*_OF_EVERY_MODULE, *_names_of_settings(_kind(module))}
    items = list(vars(module).items())  # at once: a forward pass may add to them
    return {name: _copied(value) for name, value in items if name not in known and _is_value(value)}


def _objects(module: nn.Module) -> dict[str, Any]:
    items = list(vars(module).items())
    return {name: value for name, value in items if name not in _OF_EVERY_MODULE and not _is_value(value)}


def _is_value(value: Any) -> bool:
    if type(value) in (tuple, list):
        return len(value) <= _PARTS_MAX and all(map(_is_value, value))
    if type(value) is float or _is_tensor(value) or _is_array(value):
        return True
    return is_plain(value) and (type(value) is not str or len(value) <= _CHARACTERS_MAX)


def _is_tensor(value: Any) -> bool:
    """Return whether it is a small tensor of nothing but numbers, which no graph leads to."""
    if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
        return False
    return value.numel() <= _ELEMENTS_MAX and not (value.is_quantized or value.is_meta)


def _is_array(value: Any) -> bool:
    """Return whether it is a small array of NumPy's, of numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    return bool(value.size <= _ELEMENTS_MAX and value.dtype.kind in "biufc")


def _copied(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    if _is_tensor(value):
        return value.clone()
    return value.copy() if _is_array(value) else value


def _had(values: Mapping[str, Any], name: str) -> list[Any]:
    return [values[name]] if name in values else []


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return _told(one) == _told(other)


def _told(value: Any) -> str:
    """Write a value so that others differ in it: 1, 1.0 and True are different, and NaN is like NaN."""
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(_told, value))})"
    if _is_tensor(value):
        here = value.resolve_conj().resolve_neg().cpu().contiguous()
        digest = sha256(string_at(here.data_ptr(), here.nbytes)).hexdigest()
        return f"tensor {value.dtype} {tuple(value.shape)} {digest}"
    if _is_array(value):
        return f"array {value.dtype} {value.shape} {sha256(value.tobytes()).hexdigest()}"
    return repr(value)


def _set(module: nn.Module, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not _is_same(_had(vars(module), name), [value]) and not _write(vars(module).get(name), value):
            setattr(module, name, _copied(value))


def _write(there: Any, value: Any) -> bool:
    """Write into what is there, which the script may know by another name; return whether that can be done."""
    if not _is_alike(there, value):
        return False
    if isinstance(value, Tensor):
        there.copy_(value)
    else:
        there[...] = value
    return True


def _is_alike(there: Any, value: Any) -> bool:
    """Return whether one tensor, or array, can be written into the other."""
    if _is_tensor(value) and _is_tensor(there):
        may_be_written = not there.is_inference()
    elif _is_array(value) and _is_array(there):
        may_be_written = bool(there.flags.writeable)
    else:
        return False
    return may_be_written and (there.shape, there.dtype) == (value.shape, value.dtype)
