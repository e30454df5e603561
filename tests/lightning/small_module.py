"""A small module of Lightning's on numbers, and how it is trained, plain or in place, with what was seen of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_elastic.lightning import InPlaceStrategy

SAMPLES = 45


class SmallModule(pl.LightningModule):
    """`SmallModule` has a loss that depends on each sample."""

    def __init__(self, schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.schedule = schedule
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean of a batch."""
        loss: torch.Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return it, and log it in all ways."""
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx % 4 == 1:
            self.log("seldom", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        del batch_idx
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        """Return an optimizer, and what changes its rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.schedule == "sized":  # which has the data set up before all else is
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": self.schedule}}


class Seen(Callback):
    """`Seen` is what a training was, step by step and epoch by epoch."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.epochs: list[dict[str, float]] = []
        self.evaluated: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Note what is behind a step."""
        weights = torch.cat([each.detach().flatten() for each in module.parameters()])
        self.steps[trainer.global_step] = {
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "epoch": trainer.current_epoch,
            **{str(number): float(each) for number, each in enumerate(weights)},
        }

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Note the means of an epoch."""
        names = ("loss_epoch", "most", "least", "sum", "seldom")
        self.epochs.append({name: float(trainer.callback_metrics[name]) for name in names})

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Note what was evaluated."""
        if not trainer.sanity_checking:
            self.evaluated.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def numbers(count: int, seed: int) -> TensorDataset:
    """Return samples."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def loader(**more: Any) -> DataLoader[Any]:
    """Return what is trained with: batches of two, the last one of one sample, shuffled by a generator of its own."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(numbers(SAMPLES, 1), **{"batch_size": 2, "shuffle": True, "generator": generator, **more})


def trainer_of(folder: Path, seen: Seen, *, accumulate: int, ranks: int | None, **more: Any) -> pl.Trainer:
    """Return a Trainer, plain where there are no ``ranks``."""
    strategy: dict[str, Any] = {} if ranks is None else {"strategy": InPlaceStrategy(ranks=ranks)}
    more["callbacks"] = [seen, *more.get("callbacks", ())]
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "enable_checkpointing": False,
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
    }
    defaults["gradient_clip_val"] = 0.5
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=accumulate,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **strategy, **more},
    )
