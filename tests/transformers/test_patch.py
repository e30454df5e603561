from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from torch import nn
from transformers import Trainer, TrainingArguments

from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.transformers.parts import missing_parts, trainer_facts
from unicron_elastic.transformers.patch import patch
from unicron_elastic.transformers.refusal import TrainerFacts


class Model(nn.Module):
    """`Model` has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss."""
        return {"loss": (self.weight * x).mean()}


@pytest.fixture(autouse=True)
def arguments_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave transformers and accelerate as they are for other tests."""
    monkeypatch.setattr(TrainingArguments, "_setup_devices", vars(TrainingArguments)["_setup_devices"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    PartialState._reset_state()
    yield
    PartialState._reset_state()


def made(kind: Any, tmp_path: Any, **more: Any) -> Any:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **more)
    return kind(Model(), arguments, train_dataset=[{"x": torch.ones(1)}] * 4)


def test_this_version_has_all_that_is_used() -> None:
    assert missing_parts(Trainer) == ""


def test_a_version_without_a_part_trains_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    class Older(Trainer):  # type: ignore[misc]
        def _run_epoch(self, model: Any) -> None:
            """Know fewer arguments."""

    before, plain = Older.__init__, vars(TrainingArguments)["_setup_devices"]
    assert patch(Older) is False
    said = capsys.readouterr().err
    assert "(the argument epoch of Trainer._run_epoch): the Trainer trains as it does without" in said
    assert Older.__init__ is before
    assert vars(TrainingArguments)["_setup_devices"] is plain


def test_devices_that_are_set_up_otherwise_are_a_missing_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(lambda _: None))
    assert missing_parts(Trainer) == "TrainingArguments._setup_devices"


@pytest.mark.parametrize("wrong", [object, nn.Module, "Trainer"])
def test_only_trainers_are_patched(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"takes transformers\.Trainer"):
        patch(wrong)


def test_options_are_no_state() -> None:
    with pytest.raises(TypeError, match="got model, which is the Trainer's"):
        patch(Trainer, model=Model())


@pytest.mark.parametrize(("ranks", "wrong"), [(0, ValueError), (1.5, TypeError)])
def test_a_step_has_the_batches_of_some_ranks(ranks: Any, wrong: type[Exception]) -> None:
    with pytest.raises(wrong, match="ranks must be"):
        patch(Trainer, ranks=ranks)


def test_it_stands_before_the_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WrongUseError, match="has to stand before TrainingArguments"):
        patch(type("Mine", (Trainer,), {}))


def test_a_launcher_is_hidden_and_the_rank_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    mine = type("Mine", (Trainer,), {})
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert patch(mine)
    trainer = made(mine, tmp_path)
    assert not torch.distributed.is_initialized()
    assert (trainer.args.world_size, trainer.args.process_index, trainer.args.local_process_index) == (1, 1, 1)
    assert not trainer.is_world_process_zero()
    assert type(trainer).__name__ == "Mine"
    assert isinstance(trainer, mine)


@pytest.mark.parametrize("which", ["deepspeed", "fsdp"])
def test_arguments_that_divide_a_model_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, which: str) -> None:
    assert patch(type("Mine", (Trainer,), {}))
    monkeypatch.setenv(f"ACCELERATE_USE_{which.upper()}", "true")
    with pytest.raises(WrongUseError, match=f"(?i)cannot go on in place: {which} divides the model"):
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]).device  # noqa: B018


def facts_of(trainer: Any) -> TrainerFacts:
    return trainer_facts(trainer, ranks=1, has_trained=False, is_search=False)


def test_a_plain_trainer_has_nothing_to_refuse(tmp_path: Any) -> None:
    facts = facts_of(made(Trainer, tmp_path))
    assert facts == TrainerFacts(bases=facts.bases, optimizer=facts.optimizer)
    assert facts.optimizer.startswith("adamw_torch")


def test_who_overrides_the_loop_is_seen(tmp_path: Any) -> None:
    kind = type("Mine", (Trainer,), {"_prepare_inputs": Trainer._prepare_inputs})
    assert facts_of(made(kind, tmp_path)).overrides == ("_prepare_inputs",)


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({"ignore_data_skip": True}, "skips_no_data", True),
        ({"auto_find_batch_size": True}, "finds_batch_size", True),
        ({"average_tokens_across_devices": False}, "averages_tokens", False),
        ({"accelerator_config": {"split_batches": True}}, "splits_batches", True),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatches_batches", True),
        ({"train_sampling_strategy": "batch_rebalance"}, "sampling", "batch_rebalance"),
        ({"optim": "adafactor"}, "optimizer", "adafactor"),
        ({"bf16": True}, "mixed_precision", "bf16"),
    ],
)
def test_arguments_are_read(tmp_path: Any, more: dict[str, Any], field: str, value: object) -> None:
    assert getattr(facts_of(made(Trainer, tmp_path, **more)), field) == value


def test_without_transformers_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import unicron_elastic.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "the Python module accelerate is missing; install it" in done.stderr
    assert "pip install -e '.[transformers]'" in done.stderr
