"""What the in-band parts cost a training step, measured inside one process.

    python benchmarks/in_band.py

Two launches of the same job differ by more than the in-band parts cost: where its memory lies, who shares its core. So
one process steps a small DDP model in blocks that alternate between "with" and "without" the optimizer hook and its
pulse page, and each block is compared with the one beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _exit_when_told import exit_when_told
from _report import confidence
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_module

from unicron_elastic.worker.pulse import Pulse, PulsePage
from unicron_elastic.worker.step_count import count_steps


def main() -> None:
    """Measure and print."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="Cost of the in-band parts per training step.")
    parser.add_argument("--blocks", type=int, default=3000, help="pairs of blocks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model's two layers (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        step = training_step(args.width)
        hooks = hooks_of_in_band_parts()
        print(f"writing the pulse page: {beat_us():.2f} us; the hook that does: {hook_us(hooks):.2f} us")
        compare("with / without", step, hooks, args.blocks, args.steps)
        compare("without / without, to see the noise", step, {}, args.blocks, args.steps)
        del step
        dist.destroy_process_group()


def training_step(width: int) -> Callable[[], None]:
    """A forward, a backward and an optimizer step, as a function."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model)
    batch = torch.randn(32, width)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()

    return step


def hooks_of_in_band_parts() -> dict[int, Callable[..., None]]:
    """The hooks that a worker gets, taken out of torch again."""
    before = set(optimizer_module._global_optimizer_post_hooks)
    count_steps(Pulse(os.dup(PulsePage().fd)), lambda _step: None)
    ours = set(optimizer_module._global_optimizer_post_hooks) - before
    return {key: optimizer_module._global_optimizer_post_hooks.pop(key) for key in ours}


def beat_us(count: int = 200_000) -> float:
    """What writing the pulse page takes, in microseconds."""
    pulse = Pulse(os.dup(PulsePage().fd))
    begun = time.perf_counter_ns()
    for step in range(2, count + 2):
        pulse.beat(step)
    return (time.perf_counter_ns() - begun) / count / 1e3


def hook_us(hooks: dict[int, Callable[..., None]], count: int = 200_000) -> float:
    """What the hooks take for one step, in microseconds."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    begun = time.perf_counter_ns()
    for _ in range(count):
        for hook in hooks.values():
            hook(optimizer, (), {})
    return (time.perf_counter_ns() - begun) / count / 1e3


def compare(
    name: str, step: Callable[[], None], hooks: dict[int, Callable[..., None]], blocks: int, steps: int
) -> None:
    """Print the step time with and without ``hooks``, and the ratio of neighbouring blocks."""
    for _ in range(200):
        step()
    installed = optimizer_module._global_optimizer_post_hooks
    ratios, plain, watched = [], [], []
    for pair in range(blocks):
        took_us = {}
        for is_watched in (pair % 2 == 0, pair % 2 != 0):
            installed.update(hooks if is_watched else {})
            took_us[is_watched] = median_us(step, steps)
            for key in hooks:
                installed.pop(key, None)
        plain.append(took_us[False])
        watched.append(took_us[True])
        ratios.append(took_us[True] / took_us[False])
    low, high = confidence(ratios)
    print(
        f"{name}: median {statistics.median(ratios):.4f} (95 % interval {low:.4f} to {high:.4f}) "
        f"of {len(ratios)} pairs; steps of {statistics.median(watched):.0f} and {statistics.median(plain):.0f} us"
    )


def median_us(step: Callable[[], None], steps: int) -> float:
    """The median time of one of ``steps`` steps, in microseconds."""
    times = []
    for _ in range(steps):
        begun = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1e3


if __name__ == "__main__":
    main()
