"""Train a small GPT-2 with transformers' Trainer, and go on in the step in which a rank is lost.

    pip install -e '.[transformers]'
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_trainer_in_place.py

One line, ``patch()``, is all that a script of the Trainer's has for it. The model is made from a configuration, and the
tokenizer from Python's own source, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpt import read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from unicron_elastic.transformers import patch

END = "<end>"
CONTEXT = 64
FOLDER = Path(tempfile.gettempdir(), "trained")


class Say(TrainerCallback):
    """`Say` prints what is logged, on the first rank."""

    def on_log(self, *told: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Print it."""
        _, state, _ = told
        if state.is_world_process_zero and logs:
            if "loss" in logs:
                print(f"step {state.global_step}  loss {logs['loss']:.6f}  norm {logs['grad_norm']:.6f}", flush=True)
            if "eval_loss" in logs:
                print(f"step {state.global_step}  eval loss {logs['eval_loss']:.6f}", flush=True)


def paragraphs() -> list[str]:
    """Return what stands between empty lines of the training text."""
    text = bytes(read_corpus()[0].tolist()).decode(errors="replace")
    return [each for each in text.split("\n\n") if each.strip()]


def tokenizer_of(texts: list[str], words: int) -> PreTrainedTokenizerFast:
    """Learn a tokenizer of so many words from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, learner)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, eos_token=END)


def train(args: argparse.Namespace) -> None:
    """Train, and evaluate on what was held out."""
    patch(Trainer)  # the one line; it stands before TrainingArguments
    arguments = TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=args.log_every,
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or 500,
        eval_strategy="steps" if args.evaluate_every else "no",
        eval_steps=args.evaluate_every or None,
        dataloader_num_workers=args.workers,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
    )
    set_seed(args.seed)
    texts = paragraphs()[: args.paragraphs]
    tokenizer = tokenizer_of(texts[:500], 512)
    samples = [{"input_ids": each} for each in tokenizer(texts, truncation=True, max_length=CONTEXT)["input_ids"]]
    held_out = len(samples) // 20
    sizes = {"n_embd": args.width, "n_layer": args.layers, "n_head": 4, "n_positions": CONTEXT}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **drop)),
        args=arguments,
        train_dataset=samples[held_out:],
        eval_dataset=samples[:held_out],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[Say()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.is_world_process_zero():
        print("done", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on Python's own source with the Trainer.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint there")
    parser.add_argument("--steps", type=int, default=200, help="train until this step (default: %(default)s)")
    parser.add_argument("--paragraphs", type=int, default=4000, help="of the text (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="of a rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a rank in a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="that read ahead, per rank (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="0: not (default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS", help="0: not (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
