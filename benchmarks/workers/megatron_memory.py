"""What ``attach`` holds besides Megatron-Core, counted in the memory of tensors that are really there.

Each rank trains some steps as Megatron-Core does, counts, attaches, trains on, and counts again. Counted are storages,
so that views count once: those of all tensors of the process, and of those that ``attach``'s own objects have, by name.
Each rank writes a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterable
from typing import Any

from megatron_common import Plain, arguments_of_worker, make, rank

STEPS = 3  # of each


def main() -> None:
    """Train, count, attach, train, count."""
    arguments = arguments_of_worker(argparse.ArgumentParser())
    model, optimizer = make(arguments)
    import torch.distributed as dist
    from megatron_gpt import micro_batch, read_corpus

    import unicron_elastic.megatron

    text, device = read_corpus(), next(model[0].parameters()).device

    def draw(step: int, index: int) -> Any:
        return micro_batch(text, arguments, device, step, index)

    arguments.steps = STEPS
    _train(arguments, model, optimizer, Plain(arguments, draw))
    before = bytes_of(all_tensors())
    attached = unicron_elastic.megatron.attach(
        model, optimizer, steps=2 * STEPS + 1, micro_batches=arguments.micro_batches, micro_batch=draw, step=STEPS
    )
    _train(arguments, model, optimizer, attached, STEPS)
    after = bytes_of(all_tensors())
    line = {
        "rank": rank(),
        "parameters": sum(parameter.numel() for chunk in model for parameter in chunk.parameters()),
        "all_before": before,
        "all_after": after,
        **parts_of(attached._run),
    }
    (arguments.folder / f"memory-{rank()}").write_text(json.dumps(line))
    _train(arguments, model, optimizer, attached)  # the last step, after which all leave
    dist.destroy_process_group()


def _train(
    arguments: argparse.Namespace, model: list[Any], optimizer: Any, trained: Any, steps: int | None = None
) -> None:
    from megatron_gpt import forward_step

    made = 0
    while not trained.is_over and made != steps:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        trained(
            forward_step_func=forward_step,
            model=model,
            seq_length=arguments.sequence,
            micro_batch_size=arguments.micro_batch_size,
        )
        optimizer.step()
        made += 1
        if isinstance(trained, Plain):
            trained.step += 1


def parts_of(run: Any) -> dict[str, int]:
    """The bytes of what ``attach`` keeps: sums before they are reduced, the guarded copy, and its gradients."""
    kept = [tensor for tensors in run._buckets._kept for tensor in tensors]
    copy = None if run._sharded is None else run._sharded._copy
    if copy is None:
        return {"kept": bytes_of(kept), "copy": 0, "gradients": 0}
    state = [value for main in copy.mains for value in copy.inner.state[main].values()]
    gradients = [main.grad for main in copy.mains if main.grad is not None]
    return {"kept": bytes_of(kept), "copy": bytes_of([*copy.mains, *state]), "gradients": bytes_of(gradients)}


def all_tensors() -> list[Any]:
    """All of the process, with gradients, which only their parameters know."""
    import torch

    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]


def bytes_of(tensors: Iterable[Any]) -> int:
    """Of their storages, each once."""
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(sizes.values())


if __name__ == "__main__":
    main()
