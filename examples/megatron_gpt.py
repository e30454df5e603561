"""Train Megatron-Core's GPT with data, tensor and pipeline parallelism, and go on in the step in which a rank is lost.

The text is the source code of Python's own standard library, so there is nothing to download. The script is written for
GPUs, as with any Megatron-Core model; without one, ``cpu_stand_in`` places the model on the CPU. It needs
``pip install -e '.[megatron]'`` and runs the same under each of these:

    python megatron_gpt.py
    torchrun --standalone --nproc-per-node=4 megatron_gpt.py --tensor 2 --pipeline 2
    unicron-run --standalone --nproc-per-node=4 --max-restarts=3 megatron_gpt.py --pipeline 2

To watch a recovery, let a rank die on the way: ``--kill 1:50`` makes rank 1 kill itself in step 50. What
``unicron_elastic.megatron.attach`` gives is called as Megatron-Core's own function would be. With ``--checkpoint DIR``
the job also survives what no rank is left of: it goes on from there, with whatever ``--tensor`` and ``--pipeline``.

A step has ``--micro-batches`` micro-batches, whatever the number of ranks. Each is a function of its step and its index
alone, and losses are summed over bytes and divided once, so a step does not depend on who computes which. On a cluster
whose plan knows how the model is best divided, it decides what ``--tensor`` and so on do not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

import unicron_elastic.megatron
from unicron_elastic.megatron import cpu_stand_in
from unicron_elastic.planning.model.configurations import Configuration

VOCABULARY = 256  # the tokens are bytes
MICRO_BATCH = 4
CORPUS_BYTES = 2_000_000
BUCKET_PARAMETERS = 100_000  # a small model has several buckets too, so that there is something to overlap
Batch = dict[str, Tensor]


def join_world() -> torch.device:
    """Join the launcher's world, or make a world of one without a launcher; return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    return device


def transformer_config(args: argparse.Namespace, *, on_cpu: bool) -> TransformerConfig:
    """Return the configuration of the model and of its schedule."""
    precision = torch.bfloat16 if args.bf16 else torch.float32
    settings = {
        "tensor_model_parallel_size": args.tensor,
        "pipeline_model_parallel_size": args.pipeline,
        "virtual_pipeline_model_parallel_size": args.virtual_pipeline,
        # Interleaved stages exchange both directions at once, and one batch between two ranks would mix them up.
        "batch_p2p_comm": args.virtual_pipeline is None,
        "overlap_p2p_comm": args.virtual_pipeline is not None,
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "hidden_dropout": args.dropout,
        "attention_dropout": args.dropout,
        "bf16": args.bf16,
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "use_cpu_initialization": True,  # the weights do not depend on the split by tensors
        "calculate_per_token_loss": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "finalize_model_grads_func": finalize_model_grads,
    }
    return TransformerConfig(**settings | (cpu_stand_in.CPU_CONFIG if on_cpu else {}))


def build_model(args: argparse.Namespace, config: TransformerConfig, device: torch.device) -> list[Any]:
    """Build this rank's part of the model: one chunk, or several if its pipeline stages are interleaved."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        bucket_size=BUCKET_PARAMETERS,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
    )
    chunks = []
    for stage in [None] if args.virtual_pipeline is None else range(args.virtual_pipeline):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=args.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not args.untied,
            vp_stage=stage,
        ).to(device)
        if args.bf16:
            chunk = Float16Module(config, chunk)
        chunks.append(DistributedDataParallel(config, ddp_config, chunk))
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return chunks


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Return the configuration of Adam."""
    return OptimizerConfig(
        lr=1e-3,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.distributed_optimizer,
    )


def read_corpus() -> Tensor:
    """Return the training text, one byte per element."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES])
    return torch.frombuffer(text, dtype=torch.uint8)


def micro_batch(text: Tensor, args: argparse.Namespace, device: torch.device, step: int, index: int) -> Batch:
    """Draw a micro-batch; it depends on nothing but (seed, step, index), so it does not matter which rank draws it."""
    generator = torch.Generator().manual_seed(hash((args.seed, step)))
    samples = args.micro_batches * args.micro_batch_size  # the same in a step, however large micro-batches are
    starts = torch.randint(len(text) - args.sequence - 1, (samples,), generator=generator)
    starts = starts[index * args.micro_batch_size :][: args.micro_batch_size]
    cut = text[starts[:, None] + torch.arange(args.sequence + 1)].to(device, torch.long)
    positions = torch.arange(args.sequence, device=device).expand(args.micro_batch_size, -1)
    return {"tokens": cut[:, :-1].contiguous(), "labels": cut[:, 1:].contiguous(), "positions": positions}


def killed_at(draw: Callable[[int, int], Batch], kill: list[str], step: int, index: int) -> Batch:
    """Draw a micro-batch, or die, as ``--kill RANK:STEP`` says; the rank's replacement does not."""
    if f"{os.environ.get('RANK')}:{step}" in kill and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(step, index)


def summed_loss(loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of a micro-batch's losses, its number of bytes, and both to report."""
    total, count = loss.float().sum(), torch.tensor(loss.numel(), dtype=torch.int, device=loss.device)
    return total, count, torch.stack([total.detach(), count])


def forward_step(batches: Iterator[Batch], chunk: Any) -> tuple[Tensor, Any]:
    """Take the next micro-batch through one chunk of the model."""
    batch = next(batches)
    # Without a mask the layers make the causal one.
    return chunk(batch["tokens"], batch["positions"], None, labels=batch["labels"]), summed_loss


def train(args: argparse.Namespace, config: TransformerConfig, device: torch.device) -> list[Any]:
    """Train from the first step, or from that of the checkpoint, to the last, and return the model."""
    model = build_model(args, config, device)
    optimizer = get_megatron_optimizer(optimizer_config(args), model)
    draw = partial(killed_at, partial(micro_batch, read_corpus(), args, device), args.kill)
    begun = unicron_elastic.megatron.load(args.checkpoint, model, optimizer) if args.checkpoint else 0
    forward_backward = unicron_elastic.megatron.attach(
        model, optimizer, steps=args.steps, micro_batches=args.micro_batches, micro_batch=draw, step=begun
    )
    counts = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    while not forward_backward.is_over:
        began = time.perf_counter()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step,
            model=model,
            seq_length=args.sequence,
            micro_batch_size=args.micro_batch_size,
        )
        optimizer.step()
        step, step_s = forward_backward.step, time.perf_counter() - began
        if step % args.log_every == 0 or step in (1, args.steps):
            total = forward_backward.sum(
                torch.stack(reports).sum(0) if counts and reports else torch.zeros(2, device=device)
            )
            if dist.get_rank() == 0 and total[1]:
                part = " (of this rank's micro-batches alone)" if forward_backward.is_partial else ""
                print(f"step {step} loss {total[0] / total[1]:.4f} {step_s * 1e3:.0f} ms{part}", flush=True)
        if args.checkpoint and step % args.checkpoint_every == 0:
            forward_backward.save(args.checkpoint)
    return model


def write_digest(folder: Path, model: list[Any]) -> None:
    """Write the SHA-256 of this rank's weights to a file that is named after the rank's place in the split."""
    weights = (weight.detach().cpu().contiguous() for chunk in model for weight in chunk.parameters())
    digest = hashlib.sha256(b"".join(weight.view(torch.uint8).numpy().tobytes() for weight in weights))
    tensor_rank, data_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    name = f"tp{tensor_rank}-pp{parallel_state.get_pipeline_model_parallel_rank()}-dp{data_rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(digest.hexdigest())


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT of Megatron-Core.")
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--tensor", help="ranks that share each layer (default: as planned, else 1)")
    number("--pipeline", help="stages of the pipeline (default: as planned, else 1)")
    number("--virtual-pipeline", help="chunks of the model in each stage (default: stages are not interleaved)")
    number("--micro-batches", default=8, help="in a step, over all ranks (default: %(default)s)")
    number("--micro-batch-size", help=f"samples (default: as planned, else {MICRO_BATCH})")
    sizes = {"sequence": 64, "layers": 4, "hidden": 128, "heads": 4}
    numbers = sizes | {"steps": 100, "log-every": 10, "clip-grad": 1.0, "dropout": 0.0, "seed": 1}
    numbers |= {"checkpoint-every": 50}
    for name, default in numbers.items():
        number(f"--{name}", type=type(default), default=default, help="(default: %(default)s)")
    for name in ("distributed-optimizer", "overlap-grad-reduce", "bf16", "untied"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="begin with what is there, and write more")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:STEP", help="let a rank die there")
    parser.add_argument("--digest", type=Path, metavar="DIR", help="write a digest of each rank's weights there")
    return parser.parse_args()


def fill_in(args: argparse.Namespace) -> None:
    """Take what was not given from the cluster's plan, if there is one; a step has as many samples as without it."""
    samples = args.micro_batches * (args.micro_batch_size or MICRO_BATCH)
    plan = unicron_elastic.megatron.configuration() or Configuration(replicas=1, micro_batch=MICRO_BATCH)
    args.tensor = args.tensor or plan.tensor
    args.pipeline = args.pipeline or plan.pipeline
    args.micro_batch_size = args.micro_batch_size or plan.micro_batch
    args.micro_batches = samples // args.micro_batch_size


def main() -> None:
    """Join, and train."""
    args = parse_arguments()
    fill_in(args)
    torch.set_num_threads(1)
    on_cpu = cpu_stand_in.stand_in()
    device = join_world()
    parallel_state.initialize_model_parallel(args.tensor, args.pipeline, args.virtual_pipeline)
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model = train(args, transformer_config(args, on_cpu=on_cpu), device)
    if args.digest:
        write_digest(args.digest, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
