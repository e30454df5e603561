"""A script with the Trainer of transformers: a tiny BERT that it makes itself, on numbers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from framework_log import StepTimes, parse_arguments
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Numbers(Dataset[dict[str, Any]]):
    """Made from their indices."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(index, index + 8) % 100, "labels": index % 2}


class Tells(TrainerCallback):
    """Notes each optimizer step."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self._times.step()


def main() -> None:
    """Train."""
    times = StepTimes(parse_arguments().log_dir)
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=1_000_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    model = BertForSequenceClassification(config)
    Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[Tells(times)]).train()


if __name__ == "__main__":
    main()
