"""What the workers of the benchmark of Megatron-Core have in common: the model of ``examples/megatron_gpt.py``."""

from __future__ import annotations

import argparse
import os
from typing import Any

from recovery_common import parse_arguments

LAYERS, HIDDEN, HEADS, SEQUENCE = 4, 64, 4, 64
BUCKET_PARAMETERS = 30_000  # so that each rank has several


def arguments_of_worker(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; the result is also what the example's functions take."""
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name, default in {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": SEQUENCE}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--distributed-optimizer", action="store_true")
    arguments = parse_arguments(parser)
    settings = {"virtual_pipeline": None, "dropout": 0.0, "clip_grad": 1.0, "seed": 1, "bf16": False, "untied": False}
    vars(arguments).update(settings, overlap_grad_reduce=True, micro_batch_size=arguments.batch_size, kill="")
    return arguments


def make(arguments: argparse.Namespace) -> tuple[list[Any], Any]:
    """Join the world that the launcher made, and build this rank's part of the model, and its optimizer."""
    import megatron_gpt
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron_gpt import build_model, join_world, optimizer_config, transformer_config

    from unicron_elastic.megatron import cpu_stand_in

    megatron_gpt.BUCKET_PARAMETERS = BUCKET_PARAMETERS
    torch.set_num_threads(1)
    on_cpu = cpu_stand_in.stand_in()
    device = join_world()
    parallel_state.initialize_model_parallel(arguments.tensor, arguments.pipeline)
    seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model = build_model(arguments, transformer_config(arguments, on_cpu=on_cpu), device)
    return model, get_megatron_optimizer(optimizer_config(arguments), model)


def rank() -> int:
    """This process's rank at the launch, which a replacement inherits."""
    return int(os.environ["RANK"])


class Plain:
    """What Megatron-Core's users write themselves, with the face of what ``attach`` gives."""

    def __init__(self, arguments: argparse.Namespace, draw: Any, step: int = 0) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.step = step
        self._steps = arguments.steps
        self._draw = draw
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self._indices = range(replica, arguments.micro_batches, replicas)
        self._passes = get_forward_backward_func()

    @property
    def is_over(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self._steps

    def __call__(self, **settings: Any) -> Any:
        """Forward and backward passes, and the reduction of their gradients."""
        batches = (self._draw(self.step, index) for index in self._indices)
        return self._passes(data_iterator=batches, num_microbatches=len(self._indices), forward_only=False, **settings)
