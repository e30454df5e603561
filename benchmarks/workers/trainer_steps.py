"""Train with a framework, by its own data parallelism and checkpoints or in place, and write down each step."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from written_log import RANK, Log

Batch = dict[str, Tensor]


class Steps:
    """`Steps` are those that the optimizer has made here; who is to be killed ends in the backward pass of one,
    half way between two checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._log = Log(args.written)
        self._began = time.perf_counter()
        self.number = 0

    def made(self, number: int) -> None:
        """Note the one before ``number``, from the end of the one before that."""
        if number == self.number:  # another batch of the same step
            return
        self.number = number
        began, self._began = self._began, time.perf_counter()
        self._log.note("step", number - 1, took_s=self._began - began)

    def strike(self, tensor: Tensor) -> None:
        """Kill this rank once the backward pass comes to ``tensor``, if it is the one and this is the step."""
        args = self._args
        is_half_way = self.number % args.save_every == args.save_every // 2
        if not (args.kill_rank == RANK and is_half_way and tensor.requires_grad):
            return
        if (args.written / "strike").exists() and self._log.is_first("struck"):
            tensor.register_hook(lambda _: self._log.end(self.number))


class Numbers(Dataset[Batch]):
    """`Numbers` are made from their indices."""

    def __init__(self, width: int) -> None:
        self._table = torch.randn(512, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Batch:
        return {"x": self._table[index % len(self._table)]}


class Model(nn.Module):
    """A `Model` of some layers, which gives its own loss."""

    def __init__(self, args: argparse.Namespace, steps: Steps) -> None:
        super().__init__()
        width = args.width
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(args.layers)
        )
        self._steps = steps

    def forward(self, x: Tensor) -> Batch:
        """Return the loss."""
        out: Tensor = self.layers[0](x)
        self._steps.strike(out)
        for layer in self.layers[1:]:
            out = layer(out)
        return {"loss": (out - x.sin()).square().mean()}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["transformers", "lightning", "accelerate"])
    parser.add_argument("way", choices=["plain", "in-place"])
    parser.add_argument("--written", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="of a rank")
    parser.add_argument("--save-every", type=int, default=10, help="of the plain way, by the framework's own means")
    parser.add_argument("--kill-rank", type=int, default=-1, help="once there is a file 'strike' among what is written")
    return parser.parse_args()


def transformers(args: argparse.Namespace, steps: Steps) -> None:
    """By the Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Tell(TrainerCallback):
        """`Tell` notes steps."""

        def on_train_begin(self, *told: Any, **_: Any) -> None:
            """Go by the number that a checkpoint has."""
            steps.number = told[1].global_step

        def on_step_end(self, *told: Any, **_: Any) -> None:
            """Note one."""
            steps.made(told[1].global_step)

    is_plain = args.way == "plain"
    if not is_plain:
        from unicron_elastic.transformers import patch

        patch(Trainer)
    folder = str(args.written / "checkpoints")
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.samples,
        save_strategy="steps" if is_plain else "no",
        save_steps=args.save_every,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model, data = Model(args, steps), Numbers(args.width)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Tell()])
    has_checkpoint = is_plain and os.path.isdir(folder) and get_last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=has_checkpoint or None)


def lightning(args: argparse.Namespace, steps: Steps) -> None:
    """By Lightning's Trainer."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(L.LightningModule):
        """`Module` is the model with its optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Model(args, steps)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            """Return the loss."""
            del batch_idx
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return the optimizer."""
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Tell(Callback):
        """`Tell` notes steps."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            """Go by the number that a checkpoint has."""
            steps.number = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Note one."""
            steps.made(trainer.global_step)

    is_plain = args.way == "plain"
    strategy: Any = "ddp"
    if not is_plain:
        from unicron_elastic.lightning import InPlaceStrategy

        strategy = InPlaceStrategy()
    folder = args.written / "checkpoints"
    saves = [ModelCheckpoint(folder, every_n_train_steps=args.save_every, save_last=True)] if is_plain else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]) if is_plain else 1,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=[Tell(), *saves],
        logger=False,
        enable_checkpointing=is_plain,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    loader = DataLoader(Numbers(args.width), args.samples, shuffle=True)
    trainer.fit(Module(), loader, ckpt_path=str(last) if is_plain and last.exists() else None)


def accelerate(args: argparse.Namespace, steps: Steps) -> None:
    """By a loop with Accelerate."""
    (_plain_accelerate if args.way == "plain" else _accelerate_in_place)(args, steps)


def _plain_accelerate(args: argparse.Namespace, steps: Steps) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*_parts(args, steps))
    number, folder = 0, args.written / "checkpoints"
    if (folder / "step").exists():
        number = int((folder / "step").read_text())
        accelerator.load_state(str(folder / str(number)))
    steps.number = number
    for batch in accelerator.skip_first_batches(loader, number):
        if number == args.steps:
            break
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        number += 1
        steps.made(number)
        if number % args.save_every == 0:
            accelerator.save_state(str(folder / str(number)))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "step").write_text(str(number))
    accelerator.end_training()


def _accelerate_in_place(args: argparse.Namespace, steps: Steps) -> None:
    from unicron_elastic import Run
    from unicron_elastic.accelerate import InPlaceAccelerator

    accelerator = InPlaceAccelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*_parts(args, steps))
    batches = accelerator.batches(loader)
    Run.of(accelerator)
    for step in batches.steps(0):
        if step.number == args.steps:
            break
        steps.number = step.number
        for index in step:
            step.backward(model(**batches(step.number, index))["loss"])
        optimizer.step()
        steps.made(step.number + 1)
    accelerator.end_training()


def _parts(args: argparse.Namespace, steps: Steps) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Batch]]:
    model = Model(args, steps)
    loader = DataLoader(Numbers(args.width), args.samples, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = parse_arguments()
    {"transformers": transformers, "lightning": lightning, "accelerate": accelerate}[args.framework](args, Steps(args))


if __name__ == "__main__":
    main()
