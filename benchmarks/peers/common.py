"""What the peers' example scripts have in common, so that a script shows only what its launcher asks of it.

A script's micro-batches, its finished steps and the fault it is asked for go to the job's log of events
(``workers/recovery_common.py``).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed.nn  # DDP imports it too, but after the group exists, which it would then keep alive for ever
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "workers"), str(ROOT / "examples")]

from checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from gpt import GPT  # noqa: E402
from recovery_common import Batches, EventLog  # noqa: E402

__all__ = ["Job", "StruckError", "load_checkpoint", "save_checkpoint"]


class StruckError(RuntimeError):
    """The fault "exception"."""


class Job:
    """The options of the command line, the model and its batches, and the pen on the log of events.

    ``slot`` is the place in the job, which whoever comes after this process inherits.
    """

    def __init__(self) -> None:
        arguments = _parse()
        self.folder: Path = arguments.folder
        self.checkpoint = self.folder / "checkpoint.pt"
        self.checkpoint_every: int = arguments.checkpoint_every
        self.steps: int = arguments.steps
        self.micro_batches: int = arguments.micro_batches
        self.timeout = timedelta(seconds=arguments.timeout_s)
        self.slot = int(os.environ.get("PEERS_FIRST_SLOT", "0")) + int(os.environ.get("LOCAL_RANK", "0"))
        self.log = EventLog(self.folder, self.slot)
        torch.set_num_threads(1)
        self._batches = Batches(arguments.batch_size)
        signal.signal(signal.SIGUSR1, self._strike)
        signal.alarm(arguments.deadline)

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        return GPT()

    def loss(self, model: nn.Module, step: int, index: int, *, is_logged: bool = True) -> Tensor:
        """The mean loss of micro-batch ``index`` of ``step``, which is logged as begun."""
        if is_logged:
            self.log.micro_batch(step, index, 0, 0)
        return self._batches.loss(model, step, index)

    def done(self, step: int, generation: int, world: int) -> None:
        """The optimizer has finished ``step`` in a world of so many, this process's ``generation``-th."""
        self.log.step(step, generation, world)

    def _strike(self, _number: int, _frame: FrameType | None) -> None:
        self.log.moment("struck")
        raise StruckError("struck on purpose")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the log of events and the checkpoints")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one step, all ranks together")
    parser.add_argument("--batch-size", type=int, default=6, help="sequences per micro-batch")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of collectives; gloo's own is 1800")
    parser.add_argument("--deadline", type=int, default=120, metavar="SECONDS", help="die after this long, whatever")
    return parser.parse_args()
