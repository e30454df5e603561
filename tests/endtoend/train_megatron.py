"""Trains a tiny GPT of Megatron-Core through ``unicron_elastic.megatron.attach`` and breaks ranks at chosen points.

    train_megatron.py --tensor 2 --steps 4 --micro-batches 8 --strike RANK:STEP:POINT:HOW ...

Each strike happens once, to the first process that gets there with that rank in the launcher's environment. STEP is how
many optimizer steps its parameters have behind them (-1: a newcomer without any), or * for any. At the end each rank
writes ``PROBE/final-RANK.json`` and its part of the model, ``PROBE/parameters-RANK.pt``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import unicron_elastic.megatron
from unicron_elastic.base.world import World
from unicron_elastic.megatron import buckets, cpu_stand_in, groups, members
from unicron_elastic.megatron import run as running
from unicron_elastic.worker.worlds import link

FOLDER = Path(os.environ["PROBE"])
RANK = int(os.environ.get("RANK", "0"))
DEADLINE_S = 40.0
VOCABULARY, SEQUENCE, HIDDEN, HEADS, MICRO_BATCH = 64, 16, 32, 4, 2
BUCKET = 6000  # parameters; the first stage has three buckets or more
LEARNING_RATE = 1e-2
EVALUATED = 3  # micro-batches


class Strikes:
    """What is to go wrong here. ``step`` tells in which one this process is."""

    def __init__(self, texts: list[str]) -> None:
        self.step: Callable[[], int] = lambda: -1
        self._left = [text.split(":") for text in texts]
        self._counts: Counter[tuple[int, str]] = Counter()
        for rank, *_ in self._left:
            assert rank.isdigit(), rank

    def nth(self, number: int, point: str) -> None:
        """Strikes the time of that ``number`` that this process gets to the point in its step."""
        here = self.step(), point
        self._counts[here] += 1
        if self._counts[here] == number:
            self.at(point)

    def at(self, point: str) -> None:
        """Strikes if this is the point, and nobody has struck here before."""
        for rank, step, where, how in self._left:
            if (int(rank), where) == (RANK, point) and step in ("*", str(self.step())):
                self._strike(f"{rank}-{step}-{where}", how)

    def _strike(self, name: str, how: str) -> None:
        try:
            (FOLDER / f"struck-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        if how == "raise":
            raise OSError(f"struck at {name.rpartition('-')[2]}")
        if how == "fail":  # as gloo complains
            raise RuntimeError("Connection closed by peer [127.0.0.1]:44696")
        assert how == "kill", how
        os.kill(os.getpid(), signal.SIGKILL)


def wrapped(owner: Any, name: str, before: Callable[..., object] | None, after: Callable[..., object] | None) -> None:
    """Has ``before`` and ``after`` called around a function of the product."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = function(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, call)


def arm(strikes: Strikes) -> None:
    """Puts the points that are inside of the product in place."""

    def point(name: str) -> Callable[..., None]:
        return lambda *_, **__: strikes.at(name)

    def third(name: str) -> Callable[..., None]:
        return lambda *_, **__: strikes.nth(3, name)

    def bucket(own: buckets.Buckets, *_: Any, **__: Any) -> None:
        if len(own.done) == 1:
            strikes.nth(1, "reduce")

    def summed(tokens: str, nothing: str) -> Callable[..., None]:
        return lambda _, tensor: strikes.at(nothing if tensor.is_floating_point() else tokens)

    wrapped(running.MegatronRun, "_count", point("before"), None)
    wrapped(buckets.Buckets, "_finish", None, bucket)
    wrapped(buckets.Buckets, "reduce", None, point("reduced"))
    wrapped(members.Members, "sum", summed("tokens", "commit"), summed("counted", "committed"))
    wrapped(members.Members, "say", point("meet"), None)
    wrapped(groups, "connect_group", point("connect"), point("connecting"))
    wrapped(groups.Groups, "enter", None, point("connected"))
    wrapped(members.Members, "send", None, third("give"))
    wrapped(members.Members, "receive", None, third("take"))


def arm_model(strikes: Strikes, chunk: Any) -> None:
    """The points in the middle of the passes of a rank's first chunk, with its second micro-batch of a step."""

    def is_trained(output: Tensor) -> bool:
        return bool(torch.is_grad_enabled() and output.requires_grad)

    def watch(_module: Any, _inputs: Any, outputs: Any) -> None:
        if is_trained(outputs[0]):
            outputs[0].register_hook(lambda _gradient: strikes.nth(2, "backward"))

    middle = chunk.module.decoder.layers[-1].mlp
    middle.register_forward_pre_hook(lambda *_: strikes.nth(2, "forward" if torch.is_grad_enabled() else "evaluate"))
    middle.register_forward_hook(watch)


def arm_optimizer(strikes: Strikes, optimizer: Any) -> None:
    """The points around the update of the parameters."""
    for inner in inner_optimizers(optimizer):
        inner.register_step_pre_hook(lambda *_: strikes.at("optimizer"))
        inner.register_step_post_hook(lambda *_: strikes.at("stepped"))


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Torch's, within Megatron's."""
    return [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]


def micro_batch(asked: argparse.Namespace, step: int, index: int) -> dict[str, Any]:
    """Of the step and index alone: (MICRO_BATCH, SEQUENCE) of a sequence that can be learnt."""
    waits = len(asked.wait_for_worlds) - (asked.steps - step)
    if waits >= 0:
        wait_for_world(asked.wait_for_worlds[waits])
    generator = torch.Generator().manual_seed(1000 * step + index)
    start = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
    stride = torch.randint(1, 8, (MICRO_BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)
    return {
        "index": index,
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "positions": positions,
    }


def wait_for_world(number: int) -> None:
    """Waits until the agent has told of that world, or of a later one, with all ranks."""
    to_agent = link()
    end = time.monotonic() + DEADLINE_S
    while number > 1 and to_agent is not None and not _is_whole(to_agent._world, number):
        assert time.monotonic() < end, f"world {number} has not come, or not with all ranks"
        time.sleep(0.005)


def _is_whole(world: World | None, number: int) -> bool:
    return world is not None and world.number >= number and world.size == int(os.environ["WORLD_SIZE"])


def forward_step(batches: Iterator[dict[str, Any]], chunk: Any) -> tuple[Tensor, Any]:
    """Takes the next micro-batch through one chunk of the model."""
    batch = next(batches)

    def summed(loss: Tensor) -> tuple[Tensor, Tensor, tuple[int, float]]:
        total, tokens = loss.float().sum(), torch.tensor(loss.numel(), dtype=torch.int)
        return total, tokens, (batch["index"], total.item() / loss.numel())

    return chunk(batch["tokens"], batch["positions"], None, labels=batch["labels"]), summed


def build(asked: argparse.Namespace) -> tuple[list[Any], Any, Any]:
    """This rank's chunks of the model, the optimizer, and the scheduler."""
    config = TransformerConfig(
        tensor_model_parallel_size=asked.tensor,
        pipeline_model_parallel_size=asked.pipeline,
        virtual_pipeline_model_parallel_size=asked.virtual_pipeline,
        batch_p2p_comm=asked.virtual_pipeline is None,
        overlap_p2p_comm=asked.virtual_pipeline is not None,
        num_layers=asked.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=asked.dropout,
        attention_dropout=asked.dropout,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        **cpu_stand_in.CPU_CONFIG,
    )
    ddp_config = DistributedDataParallelConfig(
        bucket_size=BUCKET,
        overlap_grad_reduce=asked.overlap_grad_reduce,
        use_distributed_optimizer=asked.distributed_optimizer,
    )
    chunks = []
    for stage in [None] if asked.virtual_pipeline is None else range(asked.virtual_pipeline):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=asked.tied,
            vp_stage=stage,
        )
        chunks.append(DistributedDataParallel(config, ddp_config, chunk))
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=0.0,
        adam_eps=1e-5,  # else it turns what only rounding leaves of a gradient, as of keys' biases, into whole steps
        clip_grad=asked.clip_grad,
        use_distributed_optimizer=asked.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=LEARNING_RATE,
        max_lr=LEARNING_RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=20,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )
    return chunks, optimizer, scheduler


def train(asked: argparse.Namespace, strikes: Strikes) -> None:
    """Trains, and writes what came out."""
    model, optimizer, scheduler = build(asked)
    if asked.dropout:  # each replica is seeded otherwise, as by --data-parallel-random-init, and each newcomer
        stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        began = len(list(FOLDER.glob(f"began-{RANK}-*")))
        model_parallel_cuda_manual_seed(1 + 100 * stage + 10 * replica + 1000 * began)
    arm_model(strikes, model[0])
    arm_optimizer(strikes, optimizer)
    forward_backward = unicron_elastic.megatron.attach(
        model,
        optimizer,
        steps=asked.steps,
        micro_batches=asked.micro_batches,
        micro_batch=partial(micro_batch, asked),
        reproducible=asked.reproducible,
        scheduler=scheduler,
    )
    run = forward_backward._run
    strikes.step = lambda: run.step if run.has_state else -1
    losses: dict[int, dict[int, float]] = {}
    behind: dict[int, str] = {}  # each optimizer step, the parameters
    while not forward_backward.is_over:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        strikes.at("begin")
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model if len(model) > 1 else model[0],
            num_microbatches=None,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        losses.setdefault(forward_backward.step, {}).update(reports)
        optimizer.step()
        behind[forward_backward.step] = digest([parameter for chunk in model for parameter in chunk.parameters()])
        scheduler.step(increment=1)
        strikes.at("between")
        if asked.evaluate:
            evaluate(asked, forward_backward, model)
    tell(model, optimizer, scheduler, {"steps": forward_backward.step, "losses": losses, "behind": behind})


def evaluate(asked: argparse.Namespace, forward_backward: Any, model: list[Any]) -> None:
    """Forward passes only, with micro-batches of their own."""
    with torch.no_grad():
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=map(partial(micro_batch, asked, 0), range(EVALUATED)),
            model=model[0],
            num_microbatches=EVALUATED,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=True,
        )


def tell(model: list[Any], optimizer: Any, scheduler: Any, result: dict[str, Any]) -> None:
    """Writes what came out."""
    parameters = {
        f"{number}.{name}": parameter.detach()
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    kept = [
        value
        for inner in inner_optimizers(optimizer)
        for group in inner.param_groups
        for parameter in group["params"]
        for _, value in sorted(inner.state[parameter].items())
    ]
    torch.save(parameters, FOLDER / f"parameters-{RANK}.pt")
    result |= {
        "pid": os.getpid(),
        "seat": [
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        ],
        "replica": parallel_state.get_data_parallel_rank(),
        "replicas": parallel_state.get_data_parallel_world_size(),
        "parameters": digest(list(parameters.values())),
        "optimizer": digest(kept),
        "scheduler": scheduler.num_steps,
        "rates": [group["lr"] for inner in inner_optimizers(optimizer) for group in inner.param_groups],
    }
    (FOLDER / f"written-{RANK}").write_text(json.dumps(result))
    (FOLDER / f"written-{RANK}").rename(FOLDER / f"final-{RANK}.json")


def digest(tensors: list[Tensor]) -> str:
    """Of their bits."""
    return hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()[
        :16
    ]


def refuse(*_: Any, **__: Any) -> None:
    """In the place of ``torch.load``."""
    raise AssertionError("a file was read, where the state is in the memory of other ranks")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--virtual-pipeline", type=int)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--untied", action="store_false", dest="tied")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--strike", action="append", default=[])
    parser.add_argument(
        "--wait-for-worlds",
        type=int,
        nargs="*",
        default=[],
        help="the last step waits for the last of these worlds, the one before for the one before, ...",
    )
    return parser.parse_args()


def main() -> None:
    """Joins, trains, leaves."""
    asked = options()
    strikes = Strikes(asked.strike)
    before = len(list(FOLDER.glob(f"began-{RANK}-*")))
    (FOLDER / f"began-{RANK}-{os.getpid()}").touch()
    arm(strikes)
    torch.load = refuse
    torch.set_num_threads(1)
    cpu_stand_in.stand_in()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(asked.tensor, asked.pipeline, asked.virtual_pipeline)
    seed = 1 + 100 * parallel_state.get_pipeline_model_parallel_rank() + 1000 * before  # what a newcomer has is no good
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    train(asked, strikes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
