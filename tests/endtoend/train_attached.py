"""Trains a tiny classifier with transformers' Trainer as a script does that knows nothing of us.

train_attached.py FOLDER [--kill RANK:STEP] [--kill-evaluating RANK:STEP] [--samples N] [--workers N] [--ours]
[--resume] [--own-order]
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Points(Dataset[dict[str, torch.Tensor]]):
    """`Points` are numbers with a class."""

    def __init__(self, number: int) -> None:
        drawn = torch.Generator().manual_seed(3)
        self._x, self._labels = torch.randn(number, 8, generator=drawn), torch.randint(3, (number,), generator=drawn)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[number], "labels": self._labels[number]}


class Classifier(nn.Module):
    """`Classifier` drops some, by random numbers of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Drawn(Sampler[int]):
    """`Drawn` has its order from everybody's random numbers, as transformers' samples by length have."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._number).tolist())

    def __len__(self) -> int:
        return self._number


class DrawingTrainer(Trainer):
    """`DrawingTrainer` trains in such an order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Drawn:
        return Drawn(len(train_dataset or self.train_dataset))


class Watch(TrainerCallback):
    """`Watch` writes what is logged, and kills this process once where it was asked to."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked

    def on_log(self, *told: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write it, and the sum of all weights, of each rank."""
        _, state, _ = told
        line = {name: value for name, value in (logs or {}).items() if not name.endswith(("runtime", "per_second"))}
        os.write(1, f"rank {os.environ['RANK']} step {state.global_step} {line}\n".encode())

    def on_step_begin(self, *told: Any, **_: Any) -> None:
        """Kill in a step."""
        self._strike(self._asked.kill, told[1].global_step)

    def on_prediction_step(self, *told: Any, **_: Any) -> None:
        """Kill in an evaluation."""
        self._strike(self._asked.kill_evaluating, told[1].global_step)

    def on_train_end(self, *told: Any, model: Any = None, **_: Any) -> None:
        """Write what has come of it."""
        _, state, _ = told
        total = sum(float(each.detach().double().sum()) for each in model.parameters())
        evaluations = [each["step"] for each in state.log_history if "eval_loss" in each]
        line = f"end rank {os.environ['RANK']} step {state.global_step} sum {total!r} log {len(state.log_history)}"
        os.write(1, f"{line} evaluations {evaluations}\n".encode())

    def _strike(self, asked: str, step: int) -> None:
        done = Path(os.environ["PROBE"], "struck")
        if asked == f"{os.environ['RANK']}:{step}" and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-evaluating", default="")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--own-order", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if asked.ours:
        from unicron_elastic import Run  # noqa: F401 - as a script that keeps its state itself
    arguments = TrainingArguments(
        output_dir=str(asked.folder),
        num_train_epochs=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="steps" if asked.resume else "no",
        save_steps=5,
        dataloader_num_workers=asked.workers,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=4,
    )
    torch.manual_seed(0)
    trainer = (DrawingTrainer if asked.own_order else Trainer)(
        model=Classifier(),
        args=arguments,
        train_dataset=Points(asked.samples),
        eval_dataset=Points(8),
        callbacks=[Watch(asked)],
    )
    trainer.remove_callback(PrinterCallback)
    last = get_last_checkpoint(str(asked.folder)) if asked.resume and asked.folder.exists() else None
    torch.manual_seed(50 + int(os.environ["RANK"]))
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
