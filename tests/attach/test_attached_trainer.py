"""What is attached to transformers' Trainer: when it steps aside, and that no training is broken by it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from unicron_elastic.attach import attached_trainer

RUNS = "unicron_elastic.training.run"


class Points(Dataset[dict[str, torch.Tensor]]):
    """`Points` are four numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(number)])}


class Stream(IterableDataset[Any]):
    """`Stream` can only be iterated."""

    def __iter__(self) -> Any:
        return iter([Points()[0]])


class Square(nn.Module):
    """`Square` has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss."""
        return {"loss": self.inner(x).square().mean()}


@pytest.fixture
def own() -> Iterator[Any]:
    """Attach to a Trainer of this test alone, in a process that seems to have no run yet."""
    kind = type("OwnTrainer", (Trainer,), {})
    runs = sys.modules.pop(RUNS, None)
    attached_trainer.attach(SimpleNamespace(Trainer=kind))
    yield kind
    if runs is not None:
        sys.modules[RUNS] = runs


def made(kind: Any, folder: Path, dataset: Any = None, **arguments: Any) -> Any:
    asked = {"max_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", **arguments}
    return kind(model=Square(), args=TrainingArguments(str(folder), **asked), train_dataset=dataset or Points())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("unicron: ")]
    assert len(lines) == 1
    return lines[0]


def test_it_says_so_once_with_how_to_turn_it_off(own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = made(own, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    line = said(capsys)
    assert line.startswith("unicron: transformers' Trainer keeps its state in memory every 10 steps")
    assert line.endswith("--attach off turns that off.")


def test_a_second_training_is_left_alone(own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(own, tmp_path).train()
    said(capsys)
    trainer = made(own, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "another one has trained in this process; all ranks begin again after a loss" in said(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip is not tried"),
        ({"eval_on_start": True}, "eval_on_start is not"),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "persistent workers of evaluations begin anew",
        ),
    ],
)
def test_what_is_not_tried_is_said(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], words: str
) -> None:
    trainer = made(own, tmp_path, **arguments)
    trainer.eval_dataset = Points()
    trainer.train()
    assert trainer.state.global_step == 2
    assert words in said(capsys)


def test_a_dataset_that_can_only_be_iterated_is_left_alone(own: Any, tmp_path: Path) -> None:
    trainer = made(own, tmp_path, Stream())
    assert attached_trainer.why_not(trainer, has_trial=False) == "its dataset can only be iterated"
    assert "search" in attached_trainer.why_not(made(own, tmp_path), has_trial=True)


def test_a_version_that_is_not_known_trains_as_it_does_without(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made(own, tmp_path)
    own._load_rng_state = lambda _: None
    trainer.train()
    assert trainer.state.global_step == 2
    assert "are not as they are known (the argument checkpoint of Trainer._load_rng_state)" in said(capsys)


def test_what_goes_wrong_while_it_is_looked_at_ends_nothing(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made(own, tmp_path)
    state = trainer.accelerator
    trainer.accelerator = SimpleNamespace()
    attached_trainer._begin(trainer, [], has_trial=False)
    trainer.accelerator = state
    assert "AttributeError" in said(capsys)


def test_a_script_with_a_run_of_its_own_is_left_alone(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, RUNS, SimpleNamespace())
    made(own, tmp_path).train()
    assert "unicron: " not in capsys.readouterr().err


def test_a_trainer_in_place_is_left_alone(own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = made(own, tmp_path)
    own._of_unicron = None
    attached_trainer._begin(trainer, [], has_trial=False)
    assert "unicron: " not in capsys.readouterr().err


def test_random_numbers_are_put_back_where_the_state_has_them(own: Any, tmp_path: Path) -> None:
    attached = attached_trainer.AttachedTrainer(made(own, tmp_path))
    attached._numbers = attached._generators().states()
    expected = torch.rand(1)
    torch.rand(5)
    attached.load_rng_state(pytest.fail, attached_trainer._FROM_MEMORY)
    assert torch.equal(torch.rand(1), expected)
    asked: list[Any] = []
    attached.load_rng_state(asked.append, "checkpoint-3")
    assert asked == ["checkpoint-3"]


def test_counts_and_log_are_taken_over(own: Any, tmp_path: Path) -> None:
    before, after = made(own, tmp_path, logging_steps=1), made(own, tmp_path, logging_steps=1)
    before.train()
    after._tr_loss = torch.tensor(0.0)
    attached_trainer.Counted(after).load_state_dict(attached_trainer.Counted(before).state_dict())
    assert after.state.global_step == 2
    assert after.state.log_history == before.state.log_history
