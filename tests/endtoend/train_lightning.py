"""Trains a tiny classifier with Lightning's Trainer, and writes each loss as it is.

With ``--plain`` there is nothing of ours; else the Trainer goes on in place. The last step of an epoch has fewer
batches than the others, and the last batch fewer samples.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

RANK = int(os.environ.get("RANK", "0"))
IS_REPLACEMENT = os.environ.get("UNICRON_TAKES_PLACE", "0") != "0"
INPUTS, KINDS = 8, 3


class Points(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """`Points` belong to one of three kinds."""

    def __init__(self, number: int, first: int = 0) -> None:
        self._numbers = range(first, first + number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self._numbers[number])
        point = torch.randn(INPUTS, generator=generator)
        return point, (point[:KINDS].argmax() + number % 2) % KINDS, number


class Stream(IterableDataset[Any]):
    """`Stream` can only be iterated."""

    def __iter__(self) -> Any:
        return iter([Points(1)[0]])


class Classifier(pl.LightningModule):
    """`Classifier` is a small network that logs its loss in all ways."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.asked = asked
        self.net = nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, KINDS))
        if not asked.batch_norm:
            self.net[1] = nn.LayerNorm(16)
        self.register_buffer("begun", torch.zeros((), dtype=torch.long))
        self.register_buffer("ended", torch.zeros((), dtype=torch.long))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        del batch_idx
        self.wait()
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if int(batch[2][0]) % 3 == 0:  # not all batches log all
            self.log("seldom", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        if not self.trainer.sanity_checking and batch_idx == 1:
            self._die(self.asked.kill_evaluating)
        self.log("val_loss", self._loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log how long the gradient is."""
        del optimizer
        norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_step=True, on_epoch=False)

    def _die(self, when: str) -> None:
        if not IS_REPLACEMENT and when == f"{RANK}:{self.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, *_: Any) -> None:
        """Count a batch, and kill this rank before a step."""
        self.begun += 1
        self._die(self.asked.kill)

    def on_train_batch_end(self, *_: Any) -> None:
        """Count it."""
        self.ended += 1

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        """Kill this rank in a save."""
        del checkpoint
        self._die(self.asked.kill_saving)

    def wait(self) -> None:
        """Wait within a step until both ranks are there: state is given there alone."""
        if not IS_REPLACEMENT and self.global_step == self.asked.wait_at:
            from train_in_place import await_moment

            link = self.trainer.strategy._ours._run._engine._membership._link  # type: ignore[union-attr]
            await_moment(partial(_is_whole, link), "the replacement")

    def configure_optimizers(self) -> Any:
        """Return an optimizer with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.asked.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.asked.schedule}}


def _is_whole(link: Any) -> bool:
    return link._world.number > 1 and len(link._world.members) == 2


class Say(Callback):
    """`Say` writes what was logged, and the learning rate and weights behind each step."""

    def __init__(self) -> None:
        self.written = 0
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *told: Any) -> None:
        """Write a step; the plain Trainer's outputs are of one batch, divided by how many there are."""
        outputs = told[0]
        if outputs:
            self.losses.append(float(outputs["loss"]))
        if trainer.fit_loop._should_accumulate():
            return
        loss = self.losses[-1] if not module.asked.plain else sum(self.losses)
        if module.asked.plain:
            loss *= trainer.accumulate_grad_batches / len(self.losses)
        self.losses.clear()
        metrics = trainer.callback_metrics
        weights = sum(float(each.detach().double().norm()) for each in module.parameters())
        line = {"loss": loss, "rate": trainer.optimizers[0].param_groups[0]["lr"], "weights": weights}
        line |= {"norm": float(metrics["norm"]), "epoch": trainer.current_epoch}
        self._write(trainer, f"step {trainer.global_step} {line}")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Write what was evaluated."""
        if not trainer.sanity_checking:
            self._write(trainer, f"evaluated {trainer.global_step} {float(trainer.callback_metrics['val_loss'])!r}")

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Write what is left at the end."""
        metrics = {name: float(each) for name, each in sorted(trainer.callback_metrics.items()) if "step" not in name}
        metrics.pop("loss", None)
        self._write(trainer, f"end {trainer.global_step} {trainer.current_epoch} {metrics}")
        module = trainer.lightning_module
        self._write(trainer, f"batches {int(module.begun)} {int(module.ended)}")
        for each in trainer.checkpoint_callbacks:
            self._write(trainer, f"best {Path(each.best_model_path).name} {sorted(each.best_k_models.values())}")

    @staticmethod
    def _write(trainer: Any, line: str) -> None:
        if trainer.is_global_zero:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


class WritesSamples:
    """`WritesSamples` is a collator that writes which samples it was given."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"samples-{os.getpid()}"

    def __call__(self, samples: list[Any]) -> Any:
        with self._path.open("a") as out:
            out.write("".join(f"{number}\n" for _, _, number in samples))
        return default_collate(samples)


def trainer_of(asked: argparse.Namespace) -> pl.Trainer:
    """Return the Trainer that is asked for."""
    callbacks: list[Callback] = [Say(), LearningRateMonitor()]
    if asked.save:
        callbacks.append(
            ModelCheckpoint(asked.folder / "saved", monitor="val_loss" if asked.evaluate else None, save_top_k=2)
            if asked.save < 0
            else ModelCheckpoint(
                asked.folder / "saved", filename="{step}", every_n_train_steps=asked.save, save_top_k=-1
            )
        )
    if asked.stop_early:
        callbacks.append(EarlyStopping("val_loss", patience=0, min_delta=0.05))
    strategy: dict[str, Any] = {}
    if not asked.plain:
        from unicron_elastic.lightning import InPlaceStrategy

        strategy["strategy"] = InPlaceStrategy(ranks=asked.ranks, snapshot_every=asked.snapshot_every)
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=asked.epochs,
        max_steps=asked.steps,
        accumulate_grad_batches=asked.accumulate,
        gradient_clip_val=0.5,
        precision=asked.precision,
        val_check_interval=asked.evaluate or None,
        limit_val_batches=None if asked.evaluate else 0,
        limit_train_batches=asked.limit or None,
        log_every_n_steps=1,
        logger=CSVLogger(asked.folder, flush_logs_every_n_steps=1),
        enable_checkpointing=bool(asked.save),
        enable_progress_bar=asked.bar,
        enable_model_summary=False,
        callbacks=callbacks,
        **strategy,
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("plain", "bar", "stop-early", "iterable", "batch-norm", "write-samples"):
        parser.add_argument(f"--{name}", action="store_true")
    for name, default in (("accumulate", 2), ("steps", -1), ("epochs", 2), ("save", 0), ("workers", 0), ("limit", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--evaluate", type=float, default=0)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--wait-at", type=int, default=-1)
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--other-order", type=int, default=0)
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-evaluating", default="")
    parser.add_argument("--kill-saving", default="")
    parser.add_argument("--schedule", default="step")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--resume", default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = trainer_of(asked)
    torch.manual_seed(0)
    module = Classifier(asked)
    if asked.iterable:
        train: Any = DataLoader(Stream(), 2)
    else:
        generator = torch.Generator().manual_seed(RANK * asked.other_order)
        collate = WritesSamples(asked.folder) if asked.write_samples else None
        train = DataLoader(
            Points(90 if asked.batch_norm else 91),
            2,
            shuffle=True,
            generator=generator,
            num_workers=asked.workers,
            collate_fn=collate,
        )
    trainer.fit(module, train, DataLoader(Points(10, 1000), 4), ckpt_path=asked.resume)


if __name__ == "__main__":
    main()
