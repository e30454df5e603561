"""Trains a tiny GPT-2 with transformers' Trainer, and writes each loss as it is.

With ``--plain`` there is nothing of ours; else the Trainer goes on in place. Texts differ in length, and the last step
of an epoch has fewer batches than the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

RANK = int(os.environ.get("RANK", "0"))
IS_REPLACEMENT = os.environ.get("UNICRON_TAKES_PLACE", "0") != "0"
WORDS, LONGEST = 50, 16


class Texts(Dataset[dict[str, torch.Tensor]]):
    """`Texts` are of 2 to 16 words, behind which is padding."""

    def __init__(self, number: int, first: int = 0, *, have_class: bool = False) -> None:
        self._have_class = have_class
        self._numbers = range(first, first + number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._numbers[number])
        length = int(torch.randint(2, LONGEST, (1,), generator=generator))
        words = torch.randint(WORDS, (LONGEST,), generator=generator)
        if self._have_class:
            return {"input_ids": words, "labels": torch.tensor(length % 3)}
        return {"input_ids": words, "labels": torch.where(torch.arange(LONGEST) < length, words, -100)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """`Stream` can only be iterated."""

    def __iter__(self) -> Any:
        return iter([Texts(1)[0]])


class Watch(TrainerCallback):
    """`Watch` writes what is logged, and has a rank killed, or waits for its replacement."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.trainer: Any = None
        self.evaluated = 0  # batches, by this rank

    def on_log(self, *told: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write the losses."""
        _, state, _ = told
        if not state.is_world_process_zero or logs is None:
            return
        line = {name: value for name, value in logs.items() if "runtime" not in name and "per_second" not in name}
        sys.stdout.write(f"step {state.global_step} {line}\n")
        sys.stdout.flush()

    def on_step_begin(self, *told: Any, **_: Any) -> None:
        """Kill this rank."""
        _, state, _ = told
        if not IS_REPLACEMENT and self.asked.kill == f"{RANK}:{state.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_prediction_step(self, *told: Any, **_: Any) -> None:
        """Count a batch, and kill this rank in the middle of an evaluation."""
        _, state, _ = told
        self.evaluated += 1
        if not IS_REPLACEMENT and self.asked.kill_evaluating == f"{RANK}:{state.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, *_: Any) -> None:
        """Wait within a step until both ranks are there: state is given there alone."""
        if not IS_REPLACEMENT and self.trainer.is_in_train and self.trainer.state.global_step == self.asked.wait_at:
            from train_in_place import await_moment

            link = self.trainer._of_unicron._run._engine._membership._link
            await_moment(partial(_is_whole, link), "the replacement")

    def on_train_end(self, *told: Any, **_: Any) -> None:
        """Write what the Trainer has counted."""
        _, state, _ = told
        if state.is_world_process_zero:
            seen = state.num_input_tokens_seen
            sys.stdout.write(f"evaluated {self.evaluated}\n")
            sys.stdout.write(
                f"end {state.global_step} flos {state.total_flos} tokens {seen} log {len(state.log_history)}\n"
            )
            sys.stdout.flush()


def _is_whole(link: Any) -> bool:
    return link._world.number > 1 and len(link._world.members) == 2


def arguments_of(asked: argparse.Namespace) -> TrainingArguments:
    """Return those of the Trainer."""
    more: dict[str, Any] = {}
    if asked.evaluate:
        more |= {"eval_strategy": "steps", "eval_steps": asked.evaluate}
    if asked.save:
        more |= {"save_strategy": "steps", "save_steps": asked.save, "load_best_model_at_end": bool(asked.evaluate)}
        more |= {"metric_for_best_model": "eval_loss"} if asked.evaluate else {}
    else:
        more |= {"save_strategy": "no"}
    return TrainingArguments(
        output_dir=str(asked.folder),
        num_train_epochs=2,
        max_steps=asked.steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=asked.accumulate,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding" if asked.tokens else "no",
        train_sampling_strategy=asked.sampling,
        dataloader_num_workers=asked.workers,
        bf16=asked.bf16,
        report_to=[],
        disable_tqdm=not asked.bar,
        use_cpu=True,
        seed=asked.seed + RANK * asked.other_order,
        **more,
    )


def generator_of_text() -> GPT2LMHeadModel:
    """Return a tiny GPT-2, which counts words."""
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": LONGEST, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **drop))


def classifier() -> BertForSequenceClassification:
    """Return a tiny BERT, whose loss does not heed how many texts there are."""
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **sizes, **drop))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("plain", "tokens", "bf16", "bar", "resume", "stop-early", "iterable", "mean", "classify"):
        parser.add_argument(f"--{name}", action="store_true")
    for name, default in (("accumulate", 2), ("steps", -1), ("save", 0), ("evaluate", 0), ("workers", 0), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--wait-at", type=int, default=-1)
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--other-order", type=int, default=0)
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-evaluating", default="")
    parser.add_argument("--sampling", default="random")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not asked.plain:
        from unicron_elastic.transformers import patch

        assert patch(Trainer, ranks=asked.ranks, snapshot_every=asked.snapshot_every)
    arguments = arguments_of(asked)
    torch.manual_seed(0)
    model = classifier() if asked.classify else generator_of_text()
    watch = Watch(asked)
    callbacks: list[TrainerCallback] = [watch]
    if asked.stop_early:
        callbacks.append(EarlyStoppingCallback(2))
    kind: Any = MeanTrainer if asked.mean else Trainer
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Stream() if asked.iterable else Texts(90, have_class=asked.classify),
        eval_dataset=Texts(9, 1000, have_class=asked.classify),
        callbacks=callbacks,
    )
    watch.trainer = trainer
    model.register_forward_pre_hook(watch.wait)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=asked.resume or None)


class MeanTrainer(Trainer):
    """`MeanTrainer` has a loss that does not heed how many words there are."""

    def compute_loss(self, model: Any, inputs: Any, *, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean."""
        return super().compute_loss(model, inputs, return_outputs)


if __name__ == "__main__":
    main()
