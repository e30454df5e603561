"""torch's random numbers: the same for a micro-batch whoever computes it, and untouched outside of micro-batches."""

from __future__ import annotations

from typing import Any

import torch

_STEP_FACTOR, _INDEX_FACTOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, so that different pairs differ


class Randomness:
    """Of the CPU and of ``device``. With ``seed`` None nothing is ever changed but by ``load_state_dict``."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._kept: dict[str, Any] | None = None
        self.yielded: dict[str, Any] = {}  # where the generators were when the script was given the present step

    def note_yield(self) -> None:
        """Remembers where the generators are when the script is given a step, in which it may draw at once."""
        if self._seed is not None:
            self.yielded = self._states()

    def rewind(self, yielded: dict[str, Any]) -> None:
        """Puts the generators to where another's were when its script was given the step."""
        self._set(yielded)

    def keep(self) -> None:
        """Remembers where the generators are, at the beginning of a step."""
        if self._seed is not None:
            self._kept = self._states()

    def seed(self, step: int, index: int) -> None:
        """Seeds the generators for a micro-batch."""
        if self._seed is not None:
            mixed = (self._seed + step * _STEP_FACTOR + index * _INDEX_FACTOR) % 2**63
            for generator in self._generators().values():
                generator.manual_seed(mixed)

    def give_back(self) -> None:
        """Puts the generators back to where they were at the beginning of the step."""
        if self._kept is not None:
            self._set(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Any]:
        """Where the generators are outside of micro-batches."""
        return self._kept if self._kept is not None else self._states()

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Puts the generators there, after the present step if one has begun."""
        if self._kept is not None:
            self._kept = states
        else:
            self._set(states)

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"cpu": torch.default_generator}
        if self._device.type == "cuda":
            found["cuda"] = torch.cuda.default_generators[self._device.index or 0]
        return found

    def _states(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._generators().items()}

    def _set(self, states: dict[str, Any]) -> None:
        for name, generator in self._generators().items():
            if name in states:
                generator.set_state(states[name])
