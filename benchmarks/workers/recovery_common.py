"""What the workers of the benchmark of recovery have in common: the model, the batches, and the log of events.

All processes of a job append to one file, ``events`` in the job's folder, one line for every micro-batch and step; a
line is one ``write`` of less than a page, so lines of different processes do not mix. The times are CLOCK_MONOTONIC
nanoseconds, which all processes of a machine share. This module imports torch only inside its functions, so that the
line ``start`` stands for the beginning of the script.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = 0
PR_SET_PDEATHSIG = 1


class EventLog:
    """This process's pen on the job's log of events.

    ``slot`` is the place in the job that this process holds: its rank at the launch, which a replacement inherits. A
    line is ``<ns> <pid> <slot> <kind> <step> <index> <generation> <world size>``.
    """

    def __init__(self, folder: Path, slot: int) -> None:
        self._slot = slot
        self._file = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write("start", 0, 0, 0, 0)

    def micro_batch(self, step: int, index: int, generation: int, world: int) -> None:
        """The gradient of micro-batch ``index`` of ``step`` has been computed."""
        self._write("micro", step, index, generation, world)

    def step(self, step: int, generation: int, world: int) -> None:
        """The optimizer has finished ``step``, with gradients of ``world`` ranks."""
        self._write("step", step, 0, generation, world)

    def moment(self, kind: str, step: int = 0) -> None:
        """Something else has happened."""
        self._write(kind, step, 0, 0, 0)

    def _write(self, kind: str, step: int, index: int, generation: int, world: int) -> None:
        words = (time.monotonic_ns(), os.getpid(), self._slot, kind, step, index, generation, world)
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


class Batches:
    """The global batch of every step, cut into micro-batches; the same whoever asks."""

    def __init__(self, batch_size: int) -> None:
        from gpt import read_corpus

        self._text, _ = read_corpus()
        self._batch_size = batch_size

    def loss(self, model: nn.Module, step: int, index: int) -> Tensor:
        """The mean loss of ``model`` on micro-batch ``index`` of ``step``."""
        import torch
        from gpt import GPT, windows

        module = getattr(model, "module", model)
        assert isinstance(module, GPT)
        generator = torch.Generator().manual_seed(1_000_003 * step + index)
        starts = torch.randint(len(self._text) - module.context - 1, (self._batch_size,), generator=generator)
        loss: Tensor = model(*windows(self._text, starts, module.context, torch.device("cpu")))
        return loss


def make_model(arguments: argparse.Namespace) -> tuple[nn.Module, Batches]:
    """The GPT of the example, the same weights in every process, and its batches; torch gets one thread."""
    import torch
    from gpt import GPT

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return GPT(), Batches(arguments.batch_size)


def parse_arguments(extend: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Read the options that every worker has, and see to it that the process ends."""
    parser = extend or argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the log of events and the checkpoints")
    parser.add_argument("--micro-batches", type=int, default=16, help="of one step, all ranks together")
    parser.add_argument("--batch-size", type=int, default=6, help="sequences per micro-batch")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS", help="0: never")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--deadline", type=int, default=120, metavar="SECONDS", help="die after this long, whatever")
    arguments = parser.parse_args()
    # torchrun's workers outlive a killed launcher; without these, a benchmark that was itself killed would leave them
    # running.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(arguments.deadline)
    sys.path.insert(0, str(EXAMPLES))
    return arguments
