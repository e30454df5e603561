"""A small deterministic training with the API of tier 2: what the matrix of tier 2 launches under unicron-run.

An MLP with dropout, clipping, AdamW and a schedule; every process logs each micro-batch, the bits of each step's loss,
and its parameters at the end, in a file of its own in the job's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _in_place_cases import MICRO_BATCHES, OVER, STEPS, Strike
from _in_place_strikes import Log, Strikes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

WIDTH = 64
SAMPLES = 8  # of a micro-batch
LATE_S = 0.01  # how long behind its beginning a collective lands, over a back end that is late


def make_model(in_the_middle: Callable[[Tensor], None]) -> nn.Module:
    """The same weights in every process; ``in_the_middle`` is called in each forward pass, with a hidden layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)]
    layers[2].register_forward_hook(lambda _module, _inputs, hidden: in_the_middle(hidden))
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Micro-batch ``index`` of ``step``: inputs (samples, width) and targets (samples, 1), the same whoever asks."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.sin(inputs.sum(dim=1, keepdim=True) / 8)


def train(arguments: argparse.Namespace, log: Log, strikes: Strikes) -> None:
    """All steps."""
    import torch
    from torch import nn

    import unicron_elastic

    torch.set_num_threads(1)
    strikes.install()
    model = make_model(strikes.in_forward)
    early, late = list(model[:4].parameters()), list(model[4:].parameters())  # type: ignore[index]
    optimizer = torch.optim.AdamW([{"params": early}, {"params": late, "weight_decay": 0.1}], lr=1e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    run = unicron_elastic.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reproducible=arguments.mode == "reproducible",
        backend="gloo" if arguments.over == "gloo" else "late",
    )
    for step in run.steps(total=STEPS, micro_batches=MICRO_BATCHES):
        for index in step:
            strikes.begin(step.number, index)
            inputs, targets = batch(step.number, index)
            loss = nn.functional.mse_loss(model(inputs), targets)
            time.sleep(arguments.work_ms / 1e3)
            step.backward(loss)
            log.write("micro", step.number, index)
            strikes.after_micro_batch()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        log.write("step", step.number, run.world_size, step.loss.hex())
        strikes.at("between-steps")
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    log.write("end", bytes(flat.view(torch.uint8).tolist()).hex())


@contextlib.contextmanager
def landing(over: str) -> Iterator[None]:
    """Within it results land as the back end says, in the order of a stream or strictly; with gloo at once."""
    if over == "gloo":
        yield
        return
    from unicron_elastic.testing import late

    late.lateness.delay_s = LATE_S
    with late.StreamOrder() if over == "late" else contextlib.nullcontext():
        yield
        late.synchronize()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the logs")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--over", default="gloo", choices=OVER)
    parser.add_argument("--work-ms", type=float, default=4.0, help="what a micro-batch takes beside its computation")
    parser.add_argument("--strikes", default="[]", help="as JSON")
    parser.add_argument("--deadline", type=int, default=60, metavar="SECONDS", help="die after this long, whatever")
    return parser.parse_args()


def main() -> None:
    """Train as one rank."""
    arguments = parse_arguments()
    signal.alarm(arguments.deadline)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked by the benchmark if the job does not end
    slot = int(os.environ["RANK"])
    life = len(list(arguments.folder.glob(f"log.{slot}.*")))
    log = Log(arguments.folder, slot, life)
    strikes = [Strike.from_message(message) for message in json.loads(arguments.strikes)]
    with landing(arguments.over):
        train(arguments, log, Strikes(strikes, log, slot, life))


if __name__ == "__main__":
    main()
