"""A script with Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from framework_log import StepTimes, parse_arguments
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """Two layers."""

    def __init__(self, times: StepTimes) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self._times = times

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """Return the loss."""
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the step."""
        self._times.step()


def main() -> None:
    """Train."""
    times = StepTimes(parse_arguments().log_dir)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(times), DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=8))


if __name__ == "__main__":
    main()
