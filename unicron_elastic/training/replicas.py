"""This rank's state, as far as it must be that of all ranks: its digests, and in which steps they are compared."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.base.text import one_line
from unicron_elastic.compat.tensors import is_plain, local_of
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.state.digest import digest_of, digests
from unicron_elastic.state.exact import tensors_of
from unicron_elastic.training.step.buffers import Buffers
from unicron_elastic.training.step.code_of import code_of, flags
from unicron_elastic.training.step.comparison import MODEL, ComparisonVerdict, Told
from unicron_elastic.training.step.module_values import asks_mode, decisive, has_extra_state

T = TypeVar("T")
OFTENER = 10  # so much more often than once in ``every`` steps they are compared at most because calls end
_SCALER = ("_scale", "_growth_tracker")


class Replicas:
    """Of one run: ``model``, and of what is ``registered`` the optimizers of its parameters and the scaler.

    ``every``: in so many steps they are compared once; 0: never. They are compared more often where scripts make them
    differ: in the first step, in the first one with newcomers and 1, 2, 4, 8 ... steps after it, and in the last one.
    Raises ValueError for a number below 0.
    """

    def __init__(self, model: nn.Module, registered: Mapping[str, Any], every: int) -> None:
        if every < 0:
            raise ValueError(f"compare_every must be 0 or more, got {every}")
        self.every = every
        self.buffers: Buffers | None = None  # of the model
        self._model = model
        self._registered = registered
        self._step = 0
        self._is_last = False
        self._is_anyone_new = True
        self._since = 0  # the first step with those who are here
        self._compared = 0  # the latest step in which all were
        self._is_copy = False
        self._left_out: set[str] = set()
        self._digest: int | None = None
        self._is_fixed = False  # that there is no other digest in this step
        self._read: dict[str, tuple[str, int]] | None = None  # of what each step reads once
        self._first_code: dict[str, str] = {}  # when the script began
        self._told: Told | None = None
        self._none_told: Told | None = None  # what is told if the comparison has failed

    def begin_training(self) -> None:
        """The script asks for its first step, or for those of one more call."""
        if self.every and not self._first_code:
            self._first_code = self._safely(lambda: dict(self._code())) or {}

    def begin(self, step: int, *, is_last: bool) -> None:
        """Step ``step`` begins, maybe the last of its call of ``steps()``; until its optimizer step the state stays."""
        self._step, self._is_last = step, is_last
        self._digest = self._read = self._told = None
        self._is_fixed = False

    def meet(self) -> None:
        """Newcomers have joined."""
        self._is_anyone_new = True

    def copy(self) -> None:
        """This rank has taken the state of another."""
        self._is_copy = True

    def end(self, *, is_compared: bool) -> None:
        """The step is over; ``is_compared``: all ranks were in it, and differ in nothing in which they must not."""
        if is_compared:
            self._since = self._step if self._is_anyone_new else self._since
            self._compared = self._step
            self._is_anyone_new = self._is_copy = False

    def accept(self, verdict: ComparisonVerdict, *, is_silent: bool) -> None:
        """The ranks differ, and may."""
        self._left_out |= verdict.left_out
        self.every = 0 if verdict.is_last else self.every
        if verdict.sentence and not is_silent:
            sys.stderr.write(f"unicron: {verdict.sentence}.\n")

    def digest(self) -> int | None:
        """That of the state, in 64 bits, computed once a step; None if it is not to be compared in this one."""
        if self._digest is None and not self._is_fixed and self._is_due():
            self._digest = self._own_digest()
        return self._digest

    def share_digest(self, share: Callable[[str], list[str]]) -> None:
        """Have the digest of a replica of several processes, which tell each other what they ``share`` at this place.

        It has no other in this step: within a reduction one may fail, and would not be waited for.
        """
        self._is_fixed = True
        if self._is_due():
            by_place = enumerate(map(int, share(str(self._own_digest()))))
            self._digest = sum(each * _factor("place", str(place)) for place, each in by_place) % 2**64

    def _own_digest(self) -> int:
        told = self.told()
        return _combined(told.tensors) if self._none_told is None else secrets.randbits(64)  # others are to hear of it

    def _is_due(self) -> bool:
        """Return whether states are compared in this step; short calls of ``steps()`` do not make that frequent."""
        if not self.every or self._is_anyone_new or self._step % self.every == 0:
            return self.every > 0
        steps = self._step - self._since
        is_early = 0 < steps < self.every and steps.bit_count() == 1
        return is_early or (self._is_last and self._step - self._compared >= min(steps, self.every) / OFTENER)

    def by_name(self) -> dict[str, int]:
        """Return the digest of each thing that is registered, for a rank that has copied the state, or gives it.

        None of them if they cannot be computed here, which is said once. What decides how modules compute is not in
        them: the script may be about to change it.
        """
        found = Counter[str]()
        for name, (what, digest) in (self._safely(self._read_once) or {}).items():
            found[name.partition(".")[0]] += _combined({name: (what, digest)})
        return {name: each % 2**64 for name, each in found.items()}

    def told(self) -> Told:
        """What the others are told if the digests differ."""
        if self._told is None:
            self._told = self._safely(self._tell) or self._none_told
        assert self._told is not None
        return self._told

    def told_of_all(self, share: Callable[[str], list[str]]) -> Told:
        """What a replica of several processes tells, which tell each other what they ``share``."""
        return Told.of_places([Told.parse(each) for each in share(self.told().to_json())])

    def _safely(self, read: Callable[[], T]) -> T | None:
        """Return what it reads; None if that fails, which is said once, and ranks are compared no more."""
        if self._none_told is not None:
            return None
        try:
            return read()
        except Exception as error:
            if is_of_script(error):
                raise
            self._cannot_tell(error)
            return None

    def _read_once(self) -> dict[str, tuple[str, int]]:
        if self._read is None:
            self._read = self._digests(dict(self._others()))
        return self._read

    def _tell(self) -> Told:
        others, extra, modes = dict(self._others()), dict(self._extra_states()), list(self._modes())
        tensors = self._read_once() | {
            name: (what, digest)
            for name, what, digest in (*self._decisive(), *modes, *_states(extra))
            if name not in self._left_out
        }
        code = {name: each for name, each in self._code() if name not in self._left_out}
        tensors |= {name: (each, 0) for name, each in code.items()}
        changed = frozenset(name for name, each in code.items() if each != self._first_code.get(name))
        own = {*others, *extra, *self._buffers_of_modules(), *(name for name, *_ in modes)}
        if self.buffers is not None:
            own |= {MODEL + name for name in self.buffers.own}
        caches, kind = frozenset(self._caches()), _kind(self._model)
        return Told(
            tensors=tensors,
            caches=caches,
            own=frozenset(own),
            unsent=frozenset(code),
            changed=changed,
            kind=kind,
            is_copy=self._is_copy,
        )

    def _digests(self, others: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[str, int]]:
        """Return those of all tensors, of what changes them, and of ``others``."""
        named = {name: local_of(tensor) for name, tensor in self._tensors()}
        named = {name: each for name, each in named.items() if _is_compared(each) and name not in self._left_out}
        found = zip(named.items(), digests(list(named.values())), strict=True)
        tensors = {name: (_what(tensor), digest) for (name, tensor), digest in found}
        tensors |= {name: ("values", digest_of(give())) for name, give in self._values() if name not in self._left_out}
        tensors |= {name: ("state", digest_of(give())) for name, give in others.items() if name not in self._left_out}
        return tensors

    def _cannot_tell(self, error: Exception) -> None:
        """Say once that the comparison failed, and compare no more: it is no part of the script.

        What is told is of another kind than what the others tell, so that they hear why, and nobody is wrong.
        """
        why = f"cannot compare: {type(error).__name__}: {one_line(str(error))}"
        if self.every:
            sys.stderr.write(f"unicron: this rank {why}. The training goes on, and ranks are not compared any more.\n")
        none = frozenset[str]()
        self._none_told = Told(tensors={}, caches=none, own=none, kind=why, is_copy=self._is_copy)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        buffers = {} if self.buffers is None else self.buffers.named()
        yield from ((MODEL + name, tensor) for name, tensor in (*self._model.named_parameters(), *buffers.items()))
        for name, module in self._modules().items():
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield f"{name}.{path}", tensor
        own = self._parameters()
        for name, optimizer in self._optimizers().items():
            yield from _of_optimizer(name, optimizer, own)
        scaler = self._registered.get("scaler")
        for leaf in _SCALER:
            if isinstance(tensor := getattr(scaler, leaf, None), Tensor):
                yield f"scaler.{leaf}", tensor

    def _values(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The settings of optimizers, and the state of what changes them."""
        own = self._parameters()
        for name, optimizer in self._optimizers().items():
            if any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
                yield f"{name}.param_groups", partial(_settings, optimizer)
        for name, each in self._registered.items():
            if _is_scheduler(name, each):
                yield f"{name}.state", each.state_dict

    def _others(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What is registered besides, and may be of a kind that differs from rank to rank, as what counts the time."""
        known = {"scaler", *self._modules(), *(name for name, each in self._registered.items() if each is self._model)}
        for name, each in self._registered.items():
            if name not in known and not isinstance(each, Optimizer) and not _is_scheduler(name, each):
                yield f"{name}.state", each.state_dict

    def _decisive(self) -> Iterator[tuple[str, str, int]]:
        """What decides how modules compute and is no tensor: the name, what it is, and a digest of it."""
        for path, module in self._named_modules():
            for name, value in decisive(module, is_trained=path.startswith(MODEL)).items():
                yield f"{path}{name}", "setting", _digest_of_text(repr(value))

    def _modes(self) -> Iterator[tuple[str, str, int]]:
        """The modes of modules of the script's own that ask them."""
        for path, module in self._named_modules():
            if path.startswith(MODEL) and asks_mode(module):
                yield f"{path}training", "setting", int(module.training)

    def _code(self) -> Iterator[tuple[str, str]]:
        """What runs in the modules of the model, and the flags of all that runs."""
        yield from flags()
        for path, module in self._model.named_modules():
            yield from code_of(f"{MODEL}{path}." if path else MODEL, module)

    def _extra_states(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What modules give besides tensors, which a forward pass of one rank may have moved."""
        for path, module in self._named_modules():
            if has_extra_state(module):
                yield f"{path}extra_state", module.get_extra_state

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All of the model and of the other modules, by the beginning of the names of what they have."""
        others = [(f"{name}.", each) for name, each in self._modules().items()]
        for name, module in [(MODEL, self._model), *others]:
            yield from ((f"{name}{path}." if path else name, each) for path, each in module.named_modules())

    def _modules(self) -> dict[str, nn.Module]:
        """Those but the model, by name."""
        return {
            name: each
            for name, each in self._registered.items()
            if isinstance(each, nn.Module) and each is not self._model
        }

    def _parameters(self) -> set[nn.Parameter]:
        """All, of all modules."""
        return {parameter for each in (self._model, *self._modules().values()) for parameter in each.parameters()}

    def _buffers_of_modules(self) -> Iterator[str]:
        """Those that a forward pass of one rank may have moved: only the model's are kept the same."""
        for name, module in self._modules().items():
            yield from (f"{name}.{path}" for path, _ in module.named_buffers())

    def _optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by name, and each once: a scheduler has its optimizer, too."""
        found = {name: _optimizer_in(each) for name, each in self._registered.items()}
        names = {id(optimizer): name for name, optimizer in reversed(found.items())}
        return {name: each for name, each in found.items() if each is not None and names[id(each)] == name}

    def _caches(self) -> Iterator[str]:
        for path, module in self._model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                yield MODEL + (f"{path}.{leaf}" if path else leaf)


def _optimizer_in(registered: Any) -> Optimizer | None:
    """What is registered, or what that is a wrapper of."""
    optimizer = registered if isinstance(registered, Optimizer) else getattr(registered, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None


def _of_optimizer(name: str, optimizer: Optimizer, own: set[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Its state of the parameters in ``own``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if parameter in own and parameter in optimizer.state:
            yield from tensors_of(optimizer.state[parameter], f"{name}.state[{number}]")


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group has besides its parameters."""
    return [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]


def _is_scheduler(name: str, registered: Any) -> bool:
    return name == "scheduler" or isinstance(registered, LRScheduler)


def _states(extra: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, str, int]]:
    yield from ((name, "state", digest_of(give())) for name, give in extra.items())


def _digest_of_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big")


def _combined(tensors: Mapping[str, tuple[str, int]]) -> int:
    return sum(digest * _factor(name, what) + _factor(what, name) for name, (what, digest) in tensors.items()) % 2**64


@lru_cache(maxsize=100_000)
def _factor(one: str, other: str) -> int:
    """An odd number."""
    return int.from_bytes(hashlib.sha256(f"{one} {other}".encode()).digest()[:8], "big") | 1


def _is_compared(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and is_plain(tensor)


def _what(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _kind(model: nn.Module) -> str:
    """On what the rounding of an optimizer step may depend."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "some processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "some processor")
