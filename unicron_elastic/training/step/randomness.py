"""Random numbers: the same for a micro-batch whoever computes it, and untouched outside of micro-batches.

Those are meant that come from what all code of a process draws from: torch's generators, Python's and NumPy's.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_STEP_FACTOR, _INDEX_FACTOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, so that different pairs differ
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

    def seed(self, number: int) -> None:
        """Seeds all of them with 64 bits."""
        for generator in self.of_torch().values():
            generator.manual_seed(number)
        random.seed(number)
        if numpy := sys.modules.get("numpy.random"):
            numpy.seed(number & 0xFFFFFFFF)

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


def packed(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """States of ``Generators``, each as bytes."""
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


def _bytes_of(state: Any) -> Tensor:
    text = json.dumps(state, default=lambda array: array.tolist(), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _value_of(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))


class Randomness:
    """Of the generators of the CPU and of ``device``. With ``seed`` None only ``load_state_dict`` changes anything."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed = seed
        self.generators = Generators(device)
        self._kept: dict[str, Any] | None = None
        self._yielded: dict[str, Any] = {}

    @property
    def yielded(self) -> dict[str, Tensor]:
        """Where the generators were when the script was given the present step."""
        return packed(self._yielded)

    def note_yield(self) -> None:
        """Remembers where the generators are when the script is given a step, in which it may draw at once."""
        if self._seed is not None:
            self._yielded = self.generators.states()

    def rewind(self, yielded: dict[str, Tensor]) -> None:
        """Puts the generators to where another's were when its script was given the step."""
        self.generators.set(unpacked(yielded))

    def keep(self) -> None:
        """Remembers where the generators are, at the beginning of a step."""
        if self._seed is not None:
            self._kept = self.generators.states()

    def seed(self, step: int, index: int) -> None:
        """Seeds the generators for a micro-batch."""
        if self._seed is not None:
            self.generators.seed((self._seed + step * _STEP_FACTOR + index * _INDEX_FACTOR) % 2**63)

    def give_back(self) -> None:
        """Puts the generators back to where they were at the beginning of the step."""
        if self._kept is not None:
            self.generators.set(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Tensor]:
        """Where the generators are outside of micro-batches."""
        return packed(self._kept if self._kept is not None else self.generators.states())

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Puts the generators there, after the present step if one has begun."""
        if self._kept is not None:
            self._kept = unpacked(states)
        else:
            self.generators.set(unpacked(states))
