"""What test_cpu_stand_in.py asks of the stand-in, in a process of its own, since it replaces parts of torch.cuda.

Prints one line of JSON for each check: its name, and what went wrong or null. With a launcher's environment the checks
whose names begin with ``ranks_`` run in its world, otherwise the others run in a world of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.module import Float16Module

from unicron_elastic.megatron import cpu_stand_in
from unicron_elastic.megatron.random_states import RandomStates

SEQUENCE, VOCABULARY, MICRO_BATCHES = 16, 64, 6


def same(left: Any, right: Any) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


@contextlib.contextmanager
def split(tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> Iterator[None]:
    """Megatron's groups for the time of a check."""
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual)
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def configuration(**settings: Any) -> TransformerConfig:
    """Of a small model, split as the groups are."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    defaults = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "batch_p2p_comm": virtual is None,
        "overlap_p2p_comm": virtual is not None,
    }
    return TransformerConfig(**defaults | settings | cpu_stand_in.CPU_CONFIG)


class Trained:
    """A small model, and its optimizer."""

    def __init__(self, *, distributed: bool = False, bf16: bool = False, **settings: Any) -> None:
        precision = {"bf16": bf16, "params_dtype": torch.bfloat16 if bf16 else torch.float32}
        config = configuration(**settings, **precision)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, check_for_nan_in_grad=True
        )
        virtual = config.virtual_pipeline_model_parallel_size
        self.inner = [self.chunk(config, stage) for stage in ([None] if virtual is None else range(virtual))]
        self.model = [
            DistributedDataParallel(config, ddp_config, Float16Module(config, chunk) if bf16 else chunk)
            for chunk in self.inner
        ]
        config.no_sync_func = [chunk.no_sync for chunk in self.model] if virtual else self.model[0].no_sync
        optimizer_config = OptimizerConfig(
            lr=0.01, use_distributed_optimizer=distributed, log_num_zeros_in_grad=True, **precision
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.model)

    @staticmethod
    def chunk(config: TransformerConfig, stage: int | None) -> GPTModel:
        """Build what a stage of the pipeline has, with one weight for the embedding and the output layer."""
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=True,
            vp_stage=stage,
        )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the weights of all chunks."""
        return [parameter for chunk in self.model for parameter in chunk.parameters()]

    def gradients(self, step: int) -> list[torch.Tensor]:
        """Compute the gradients of a step; its micro-batches suffice for stages to exchange both directions at once."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [iter([(step, index) for index in range(MICRO_BATCHES)]) for _ in self.model]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        return [parameter.main_grad.clone() for parameter in self.parameters]

    def step(self, step: int) -> tuple[float, int]:
        """Make a step; return the norm of the gradient and how many of its elements are zero."""
        self.gradients(step)
        updated, norm, zeros = self.optimizer.step()
        assert updated
        return norm, zeros

    def weights(self) -> list[torch.Tensor]:
        """Return a copy of the weights."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def sharded(self) -> dict[str, Any]:
        """Return what dist_checkpointing saves and loads."""
        return {str(place): chunk.sharded_state_dict() for place, chunk in enumerate(self.inner)}

    def save(self, folder: Path) -> None:
        """Save the weights to a folder that is made for it."""
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save(self.sharded(), str(folder))

    def load(self, folder: Path) -> None:
        """Load weights, whatever the split in which they were saved; the ranks share the reading."""
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)))
        loaded = dist_checkpointing.load(self.sharded(), str(folder), strategy)
        for place, chunk in enumerate(self.inner):
            chunk.load_state_dict(loaded[str(place)])


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Take random tokens through the model."""
    generator = torch.Generator().manual_seed(hash(next(batches)))
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return output, lambda loss: (loss.float().sum(), torch.tensor(loss.numel(), dtype=torch.int), None)


def nothing_is_replaced_where_cuda_is_available() -> None:
    """A machine with a GPU: nothing changes."""
    before = torch.cuda.current_device, schedules.torch
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert cpu_stand_in.stand_in.__wrapped__() is False
    assert (torch.cuda.current_device, schedules.torch) == before


def nothing_is_replaced_if_a_place_is_missing() -> None:
    """A version of Megatron-Core that is not known: one error names the place, and nothing changes."""
    before = torch.cuda.current_device, schedules.torch
    for missing in ("optimizer.optimizer:FP32Optimizer.build", "optimizer.third:Optimizer"):
        places = (*cpu_stand_in.CUDA_ASKED, missing)
        with (
            mock.patch.object(cpu_stand_in, "CUDA_ASKED", places),
            pytest.raises(RuntimeError, match=rf"has no {missing}, which the CPU stand-in knows from 0\.16\.1"),
        ):
            cpu_stand_in.stand_in.__wrapped__()
    assert (torch.cuda.current_device, schedules.torch) == before


def standing_in_again_changes_nothing() -> None:
    """The first call replaces, the second does not."""
    assert cpu_stand_in.stand_in() is True
    replaced = schedules.torch
    assert cpu_stand_in.stand_in() is True
    assert schedules.torch is replaced


def the_gpu_is_the_cpu() -> None:
    """What is asked for on "cuda" is on the CPU; the rest of torch is as it was."""
    assert torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.synchronize()
    assert transformer_utils.get_default_causal_mask(2).tolist() == [[False, True], [False, False]]
    assert schedules.torch.zeros(2, device="meta").device.type == "meta"
    assert schedules.torch.Tensor is torch.Tensor
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert not torch.cuda.is_available()


def _drawn(states: RandomStates, step: int, indices: list[int], draws: int = 0) -> list[list[float]]:
    """What each micro-batch draws of what ranks share, of what is of one rank, and of Python's, behind other draws."""
    tracker, found = tensor_parallel.get_cuda_rng_tracker(), []

    def forward(_data: Any, _model: Any) -> None:
        drawn = [torch.rand(()).item(), random.random()]
        for name in ("data-parallel-rng", "model-parallel-rng"):
            with tracker.fork(name):
                drawn.append(torch.rand(()).item())
        found.append(drawn)

    torch.rand(draws), random.random()
    with states.seeding(forward, step, indices) as forward_step:
        for _ in indices:
            forward_step(None, "chunk")
    return found


def a_micro_batch_draws_the_same_whoever_computes_it() -> None:
    """Behind other draws, and beside other micro-batches; what is drawn outside of passes is not touched."""
    with split():
        states = RandomStates(["chunk"], torch.device("cpu"))
        all_of_it = _drawn(states, 3, [0, 1, 2])
        assert len({number for drawn in all_of_it for number in drawn}) == 12
        assert _drawn(states, 3, [2, 0], draws=5) == [all_of_it[2], all_of_it[0]]
        assert _drawn(states, 4, [0]) != all_of_it[:1]
        before = [torch.get_rng_state(), random.getstate(), tensor_parallel.get_cuda_rng_tracker().get_states()]
        with states.seeding(lambda _data, _model: torch.rand(3), 5, [0]) as forward_step:
            forward_step(None, "chunk")
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        after = tensor_parallel.get_cuda_rng_tracker().get_states()
        assert all(torch.equal(state, after[name]) for name, state in before[2].items())


def named_random_states_are_independent() -> None:
    """Each state goes on where it stopped, and the one around it does not notice."""
    with split():
        tracker = tensor_parallel.get_cuda_rng_tracker()
        shared, own = "data-parallel-rng", "model-parallel-rng"
        expected = {name: torch.Generator() for name in (shared, own)}
        for name, generator in expected.items():
            generator.set_state(tracker.get_states()[name])
        outside = torch.Generator()
        outside.set_state(torch.get_rng_state())
        for name in (own, shared, own):
            with tracker.fork(name):
                assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[name]))
            assert torch.equal(torch.rand(3), torch.rand(3, generator=outside))
        with tracker.fork(own):
            torch.rand(3), torch.rand(3, generator=expected[own])
            with tracker.fork(shared):
                assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[shared]))
            assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[own]))
        for name, seed in ((own, 12345), ("another", 7)):
            with pytest.raises(ValueError, match="there is a random state"):
                tracker.add(name, seed)


def recomputing_draws_the_same_dropout() -> None:
    """Gradients with dropout are the same, bit for bit, whether activations are kept or computed again."""
    found = []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for settings in ({}, recompute):
        with split():
            found.append(Trained(hidden_dropout=0.2, attention_dropout=0.2, **settings).gradients(0))
    assert same(*found)
    with split():
        assert not same(found[0], Trained().gradients(0))


def optimizers_agree() -> None:
    """Clipped steps are the same with the plain and with the distributed optimizer, in float32 and bfloat16."""
    for bf16 in (False, True):
        found = []
        for distributed in (False, True):
            with split():
                trained = Trained(distributed=distributed, bf16=bf16)
                before = trained.weights()
                norms = [trained.step(step)[0] for step in range(2)]
                assert not same(before, trained.weights())
                found.append((trained.weights(), torch.tensor(norms)))
        # They add the squares of the gradient, which is clipped by its norm, in different orders.
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def a_checkpoint_is_loaded() -> None:
    """Weights saved by dist_checkpointing come back."""
    folder = Path(sys.argv[1]) / "alone"
    with split():
        saved, loaded = Trained(), Trained()
        saved.step(0)
        saved.save(folder)
        assert not same(saved.weights(), loaded.weights())
        loaded.load(folder)
        assert same(saved.weights(), loaded.weights())


def ranks_compute_the_same_in_every_split() -> None:
    """Weights go from split to split by dist_checkpointing, and a step has the same gradient in each."""
    folder = Path(sys.argv[1]) / "first"
    with split(tensor=2):
        first = Trained()
        first.save(folder)
        norm, _ = first.step(0)
    for name, sizes in {"replicas": {}, "stages": {"pipeline": 2}, "chunks": {"pipeline": 2, "virtual": 2}}.items():
        with split(**sizes):
            trained = Trained(distributed=name == "stages")
            trained.load(folder)
            assert trained.step(0)[0] == pytest.approx(norm, rel=1e-5), name
            trained.save(folder.with_name(name))


CHECKS: tuple[Callable[[], None], ...] = (
    nothing_is_replaced_where_cuda_is_available,
    nothing_is_replaced_if_a_place_is_missing,
    standing_in_again_changes_nothing,
    the_gpu_is_the_cpu,
    a_micro_batch_draws_the_same_whoever_computes_it,
    named_random_states_are_independent,
    recomputing_draws_the_same_dropout,
    optimizers_agree,
    a_checkpoint_is_loaded,
)
RANKS_CHECKS: tuple[Callable[[], None], ...] = (ranks_compute_the_same_in_every_split,)


def main() -> None:
    """Run the checks in their order."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        cpu_stand_in.stand_in()
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for check in RANKS_CHECKS if "RANK" in os.environ else CHECKS:
        try:
            check()
        except Exception:
            print(json.dumps([check.__name__, traceback.format_exc()]), flush=True)
        else:
            print(json.dumps([check.__name__, None]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
