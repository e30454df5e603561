"""Random numbers: the same for a micro-batch whoever computes it, and untouched outside of micro-batches.

Those are meant that come from what all code of a process draws from: torch's generators, Python's and NumPy's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

OF_SCRIPT = "script"  # a seed: what the script has seeded its generators with
_KINDS = ("torch", "python", "numpy")
_SEEDS = "seeds"  # in a state, beside those of generators
_CPU = torch.device("cpu")


class Generators:
    """`Generators` are those of torch for the CPU and ``device``, of ``random``, and of NumPy where it draws any."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device

    def states(self) -> dict[str, Any]:
        """Where they are."""
        found: dict[str, Any] = {name: each.get_state() for name, each in self.of_torch().items()}
        found["python"] = random.getstate()
        if numpy := sys.modules.get("numpy.random"):  # where it is not loaded, nothing is drawn from it
            found["numpy"] = numpy.get_state(legacy=False)
        return found

    def set(self, states: Mapping[str, Any]) -> None:
        """Puts those in ``states`` there."""
        for name, generator in self.of_torch().items():
            if name in states:
                generator.set_state(states[name])
        if "python" in states:
            random.setstate(states["python"])
        if "numpy" in states:  # whose script draws from it: if it is not loaded here, that is still to come
            importlib.import_module("numpy.random").set_state(states["numpy"])

    def seed(self, number: int, of_python: int | None = None, of_numpy: int | None = None) -> None:
        """Seeds all of them with 64 bits, or each kind with its own."""
        for generator in self.of_torch().values():
            generator.manual_seed(number)
        random.seed(number if of_python is None else of_python)
        if numpy := sys.modules.get("numpy.random"):
            numpy.seed((number if of_numpy is None else of_numpy) & 0xFFFFFFFF)

    @contextmanager
    def kept(self, seed: int | None = None) -> Iterator[None]:
        """Put them back when this ends to where they are now; meanwhile they are seeded, if there is a ``seed``."""
        before = self.states()
        if seed is not None:
            self.seed(seed)
        try:
            yield
        finally:
            self.set(before)

    def of_torch(self) -> dict[str, torch.Generator]:
        """Return those of torch, by the names that they have in ``states``."""
        found = {"cpu": torch.default_generator}
        if self._device.type == "cuda":
            found["cuda"] = torch.cuda.default_generators[self._device.index or 0]
        return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return those of torch that a data loader and its samplers have, by whatever name, each once.

    So have samplers within samplers.
    """
    of_batches = loader.batch_sampler
    samplers: list[Any] = []
    found = [getattr(loader, "generator", None)]
    left = [loader.sampler, getattr(of_batches, "sampler", None), of_batches]
    while left:
        sampler = left.pop(0)
        if sampler is None or any(sampler is each for each in samplers):
            continue
        samplers.append(sampler)
        values = [getattr(sampler, "generator", None), *getattr(sampler, "__dict__", {}).values()]
        found += values
        left += [each for each in values if isinstance(each, Sampler)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def packed(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """States of ``Generators``, each as bytes, as all that is kept of random numbers is."""
    return {name: each if isinstance(each, Tensor) else _bytes_of(each) for name, each in states.items()}


def unpacked(states: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undoes ``packed``."""
    found: dict[str, Any] = dict(states)
    if "python" in found:
        version, words, gauss = _value_of(found["python"])
        found["python"] = (version, tuple(words), gauss)
    if "numpy" in found:
        found["numpy"] = _value_of(found["numpy"])
    return found


def _seeds_of_script() -> list[int]:
    """Return seeds for torch, by its own, and for ``random`` and NumPy, by where they are: they do not tell theirs."""
    of_torch = torch.initial_seed()
    numpy = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state(legacy=False) if numpy else of_torch
    return [_mixed(of_torch), _digest(random.getstate()), _digest(of_numpy)]


def _mixed(*numbers: int) -> int:
    """Return 63 bits in which each of these numbers changes all."""
    return _digest(numbers)


def _digest(value: Any) -> int:
    text = json.dumps(value, default=lambda array: array.tolist())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _bytes_of(state: Any) -> Tensor:
    text = json.dumps(state, default=lambda array: array.tolist(), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _value_of(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))


class Randomness:
    """`Randomness` is what a micro-batch draws from torch's generators, ``random`` and NumPy's: by step and index.

    ``seed`` seeds all of them; ``OF_SCRIPT``: each goes by its own seed, as the script has set it when steps begin, and
    all ranks by those of the first one. With None only ``load_state_dict`` changes anything. ``part`` is which part of
    a micro-batch this process computes.
    """

    def __init__(self, seed: int | str | None, device: torch.device, part: int = 0) -> None:
        self._is_seeding = seed is not None
        self._part = part
        self.seeds = torch.zeros(len(_KINDS), dtype=torch.int64)
        self._has_seeds = self._are_agreed = not isinstance(seed, str)
        if isinstance(seed, int):
            self.seeds.fill_(seed % 2**63)
        self.generators = Generators(device)
        self._kept: dict[str, Any] | None = None
        self._yielded: dict[str, Any] = {}

    def take_seeds(self, share: Callable[[str], Sequence[str]] | None = None) -> None:
        """Take the script's own seeds, if they are to be its own and are not there yet; once, in all of a replica.

        ``share`` gives what all processes of a replica say: the first one has those of all, or the first that has them
        of a state, which may be of a smaller replica.
        """
        if self._are_agreed:
            return
        own = [self._has_seeds, self.seeds.tolist() if self._has_seeds else _seeds_of_script()]
        said = [json.loads(each) for each in share(json.dumps(own))] if share else [own]
        self.seeds.copy_(torch.tensor(next((seeds for is_known, seeds in said if is_known), said[0][1])))
        self._has_seeds = self._are_agreed = True

    @property
    def yielded(self) -> dict[str, Tensor]:
        """Where the generators were when the script was given the present step."""
        return packed(self._yielded)

    def note_yield(self) -> None:
        """Remembers where the generators are when the script is given a step, in which it may draw at once."""
        if self._is_seeding:
            self._yielded = self.generators.states()

    def rewind(self, yielded: dict[str, Tensor]) -> None:
        """Puts the generators to where another's were when its script was given the step."""
        self.generators.set(unpacked(yielded))

    def keep(self) -> None:
        """Remembers where the generators are, at the beginning of a step."""
        if self._is_seeding:
            self._kept = self.generators.states()

    def seed(self, step: int, index: int) -> None:
        """Seeds the generators for a micro-batch."""
        if self._is_seeding:
            assert self._has_seeds, "take_seeds() comes before"
            self.generators.seed(*(_mixed(each, self._part, step, index) for each in self.seeds.tolist()))

    def give_back(self) -> None:
        """Puts the generators back to where they were at the beginning of the step."""
        if self._kept is not None:
            self.generators.set(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Tensor]:
        """Where the generators are outside of micro-batches, and the seeds of micro-batches."""
        states = self._between()
        return {**states, _SEEDS: self.seeds.view(torch.uint8).clone()} if self._has_seeds else states

    def drawn(self) -> dict[str, str]:
        """Where each generator is outside of micro-batches, as a digest."""
        found = self._between().items()
        return {name: hashlib.blake2b(bytes(each.tolist()), digest_size=8).hexdigest() for name, each in found}

    def _between(self) -> dict[str, Tensor]:
        return packed(self._kept if self._kept is not None else self.generators.states())

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Puts the generators there, after the present step if one has begun."""
        if _SEEDS in states:
            own = self.seeds.view(torch.uint8)
            if states[_SEEDS].shape == own.shape:  # else of a version that storage has cut off
                own.copy_(states[_SEEDS])
                self._has_seeds = True
            states = {name: each for name, each in states.items() if name != _SEEDS}
        if self._kept is not None:
            self._kept = unpacked(states)
        else:
            self.generators.set(unpacked(states))
