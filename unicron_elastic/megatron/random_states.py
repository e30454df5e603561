"""Random numbers of a pass: the same for a micro-batch, whichever replica computes it.

Megatron-Core keeps random states by name beside torch's own: for what the ranks of a tensor-parallel group draw alike,
and for what each draws for itself (megatron-core 0.16.1: ``tensor_parallel.random``). Each is seeded from the seed with
which the script of the first replica began it, so who drew alike still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from unicron_elastic.training.group.assembly import BROKEN
from unicron_elastic.training.step.randomness import Generators, packed, unpacked

RANDOM_STATES = "random states"  # the name that they have in the state of a run
_OWN = ""  # torch's own generators, which have no name
_SHARED = "data-parallel-rng"  # the state of what all ranks of a tensor-parallel group draw alike
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)  # odd, of step to stage
_SEED_BYTES = 8  # with which the states of generators begin, on the CPU and on GPUs

ForwardStep = Callable[..., Any]  # of the script: (data iterator, model chunk, ...)


class RandomStates:
    """`RandomStates` are those of one rank, of what ``chunks`` draw on ``device``."""

    def __init__(self, chunks: Sequence[Any], device: torch.device) -> None:
        self._chunks = chunks
        self._device = device
        self._generators = Generators(device)
        self._stage = 1 + parallel_state.get_pipeline_model_parallel_rank()  # 0: of a state with a name
        self._seeds: dict[str, int] = {}  # by the names of states, those that all replicas have agreed on

    def agree(self) -> None:
        """Have all replicas draw by the seeds of the first one, which others of a script may have not.

        All call it before they train. Where one is lost on the way, each of the others keeps its own.
        """
        own = self._own_seeds()
        seeds = torch.tensor([own[name] for name in sorted(own)], device=self._device)
        group = parallel_state.get_data_parallel_group()
        with suppress(*BROKEN):
            dist.broadcast(seeds, dist.get_global_rank(group, 0), group=group)
            self._seeds = dict(zip(sorted(own), seeds.tolist(), strict=True))

    def _own_seeds(self) -> dict[str, int]:
        named = get_cuda_rng_tracker().get_states().items()
        found = {_OWN: torch.initial_seed(), **{name: _seed_of(_state_of(each)) for name, each in named}}
        return {name: seed % 2**63 for name, seed in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return where they are, between passes: a replacement may be seeded otherwise, and is to draw as the others.

        A micro-batch goes by the seeds alone; what the script draws itself goes on from there.
        """
        named = {name: _state_of(each) for name, each in get_cuda_rng_tracker().get_states().items()}
        return {"own": packed(self._generators.states()), "named": named, "seeds": dict(self._seeds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what another rank of this seat gave."""
        self._generators.set(unpacked(state_dict["own"]))
        _put(get_cuda_rng_tracker(), state_dict["named"])
        self._seeds = dict(state_dict["seeds"])

    @contextmanager
    def seeding(self, forward_step: ForwardStep, step: int, indices: Sequence[int]) -> Iterator[ForwardStep]:
        """Yield what to call in the place of ``forward_step`` in passes for these micro-batches of a step.

        Behind them all states are where they were.
        """
        tracker = get_cuda_rng_tracker()
        own, named = self._generators.states(), {name: _state_of(each) for name, each in tracker.get_states().items()}
        seeds = {**self._own_seeds(), **self._seeds}
        shared = seeds.get(_SHARED, seeds[_OWN])
        begun = [0] * len(self._chunks)

        def seeded(data: Any, model: Any, *rest: Any, **others: Any) -> Any:
            chunk = next((number for number, each in enumerate(self._chunks) if each is model), 0)
            index = indices[begun[chunk]]
            begun[chunk] += 1
            self._generators.seed(_mixed(shared, step, index, chunk, self._stage))
            _put(tracker, {name: _begun(_mixed(seeds[name], step, index, chunk), named[name]) for name in named})
            return forward_step(data, model, *rest, **others)

        try:
            yield seeded
        finally:
            self._generators.set(own)
            _put(tracker, named)


def _mixed(seed: int, *numbers: int) -> int:
    return (seed + sum(number * factor for number, factor in zip(numbers, _FACTORS, strict=False))) % 2**63


def _seed_of(state: Tensor) -> int:
    """Return the seed with which a state began, whatever was drawn since."""
    return int.from_bytes(bytes(state[:_SEED_BYTES].tolist()), "little")


def _state_of(kept: Any) -> Tensor:
    """Return what a tracker keeps, as a state; where CUDA graphs are captured it keeps generators."""
    state: Tensor = kept.get_state() if isinstance(kept, torch.Generator) else kept
    return state


def _begun(seed: int, like: Tensor) -> Tensor:
    """Return the state of a generator of the kind of one with the state ``like`` that begins with this seed."""
    is_of_cpu = like.numel() == torch.default_generator.get_state().numel()
    device = torch.device("cpu") if is_of_cpu else torch.device("cuda", torch.cuda.current_device())
    return torch.Generator(device).manual_seed(seed).get_state()


def _put(tracker: Any, states: dict[str, Tensor]) -> None:
    kept = tracker.get_states()
    for name, state in states.items():
        if isinstance(kept[name], torch.Generator):
            kept[name].set_state(state)
        else:
            kept[name] = state
    tracker.set_states(kept)
