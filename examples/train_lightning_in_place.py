"""Train a small GPT with Lightning's Trainer, and go on in the step in which a rank is lost.

    pip install -e '.[lightning]'
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_lightning_in_place.py

One argument, ``strategy=InPlaceStrategy()``, is all that a script of the Trainer's has for it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gpt import GPT, read_corpus, windows
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unicron_elastic.lightning import InPlaceStrategy

FOLDER = Path(tempfile.gettempdir(), "trained-by-lightning")
Pair = tuple[Tensor, Tensor]


class Windows(Dataset[Pair]):
    """`Windows` are pieces of a text, one behind the other; the targets are the same, one byte later."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> Pair:
        tokens, targets = windows(self.text, torch.tensor([number * self.context]), self.context, torch.device("cpu"))
        return tokens[0], targets[0]


class LanguageModel(L.LightningModule):
    """`LanguageModel` is the GPT with its optimizer and schedule."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.gpt = GPT(args.width, args.layers)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        loss: Tensor = self.gpt(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Pair, batch_idx: int) -> None:
        """Log the loss of a batch of the held-out text."""
        del batch_idx
        self.log("eval_loss", self.gpt(*batch))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and what lowers its rate in each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.args.learning_rate, weight_decay=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class Say(Callback):
    """`Say` prints losses, on the first rank."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.said = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Print that of a step, which is known behind it."""
        del module
        step = trainer.global_step
        if trainer.is_global_zero and step != self.said and step % self.every == 0:
            self.said = step
            print(f"step {step}  loss {float(trainer.callback_metrics['loss_step']):.6f}", flush=True)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Print that of the held-out text."""
        del module
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["eval_loss"])
            print(f"step {trainer.global_step}  eval loss {loss:.6f}", flush=True)


def train(args: argparse.Namespace) -> None:
    """Train, and evaluate on what was held out."""
    L.seed_everything(args.seed)
    module = LanguageModel(args)
    text, held_out = read_corpus()
    data = DataLoader(Windows(text, module.gpt.context), args.batch_size, shuffle=True, num_workers=args.workers)
    evaluation = DataLoader(Windows(held_out[:20_000], module.gpt.context), args.batch_size)
    callbacks: list[Callback] = [Say(args.log_every)]
    if args.save_every:
        callbacks.append(ModelCheckpoint(args.folder, every_n_train_steps=args.save_every, save_last=True))
    trainer = L.Trainer(
        strategy=InPlaceStrategy(),  # the one argument
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        val_check_interval=args.evaluate_every * args.accumulate or None,
        limit_val_batches=None if args.evaluate_every else 0,
        log_every_n_steps=args.log_every,
        callbacks=callbacks,
        enable_checkpointing=bool(args.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, data, evaluation, ckpt_path="last" if args.resume else None)
    if trainer.is_global_zero:
        print("done", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own source with Lightning's Trainer.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint there")
    parser.add_argument("--steps", type=int, default=500, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=6, help="of a rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=3, help="batches of a rank in a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="that read ahead, per rank (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="0: not (default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS", help="0: not (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
