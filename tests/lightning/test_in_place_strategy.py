"""A Trainer in place trains as the plain one does in one process, whose steps have as many batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from small_module import SAMPLES, Seen, SmallModule, loader, numbers, trainer_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from unicron_elastic.lightning import InPlaceStrategy
from unicron_elastic.training.step.wrong_use import WrongUseError

ACCUMULATE, RANKS = 2, 3


def trained(folder: Path, module: SmallModule, *, in_place: bool, resume: Any = None, **more: Any) -> tuple[Any, Seen]:
    """Return a Trainer that has trained, and what was seen; a limit of batches is that of one of the ranks."""
    seen = Seen()
    if in_place:
        trainer = trainer_of(folder, seen, accumulate=ACCUMULATE, ranks=RANKS, **more)
    else:
        for name in {"limit_train_batches", "val_check_interval"} & set(more):
            more[name] *= RANKS
        trainer = trainer_of(folder, seen, accumulate=ACCUMULATE * RANKS, ranks=None, **more)
    trainer.fit(module, loader(), DataLoader(numbers(9, 2), 5), ckpt_path=resume)
    return trainer, seen


def assert_alike(ours: Seen, plain: Seen) -> None:
    """Fail if steps, weights, rates or means of epochs are others but for rounding."""
    assert ours.steps.keys() == plain.steps.keys()
    for step, values in plain.steps.items():
        assert ours.steps[step] == pytest.approx(values, rel=1e-4, abs=1e-6), f"step {step}"
    for own, others in zip(ours.epochs, plain.epochs, strict=True):
        assert own == pytest.approx(others, rel=1e-5)
    assert [step for step, _ in ours.evaluated] == [step for step, _ in plain.evaluated]
    assert [loss for _, loss in ours.evaluated] == pytest.approx([loss for _, loss in plain.evaluated], rel=1e-5)


@pytest.mark.parametrize("schedule", ["step", "epoch", "plateau", "sized"])
def test_it_trains_as_the_plain_trainer_does(tmp_path: Path, schedule: str) -> None:
    ours = trained(tmp_path / "ours", SmallModule(schedule), in_place=True)
    plain = trained(tmp_path / "plain", SmallModule(schedule), in_place=False)
    assert_alike(ours[1], plain[1])
    assert len(ours[1].evaluated) == 3
    assert ours[0].global_step == 3 * 4  # the last step of an epoch has 5 of its 23 batches
    rates = {values["rate"] for step, values in ours[1].steps.items() if step}
    assert len(rates) == {"step": 12, "epoch": 4, "plateau": 2, "sized": 12}[schedule], rates


@pytest.mark.parametrize(
    "more",
    [
        {"max_steps": 7, "max_epochs": -1},
        {"limit_train_batches": 3},
        {"val_check_interval": 6},
        {"val_check_interval": 5},  # within a step
        {"precision": "bf16-mixed", "max_epochs": 1},
        {"precision": "64-true", "max_epochs": 1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "max_epochs": 1},
        {"fast_dev_run": 2, "logger": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_options_mean_what_they_do_without(tmp_path: Path, more: dict[str, Any]) -> None:
    ours = trained(tmp_path / "ours", SmallModule(), in_place=True, **more)
    if "fast_dev_run" in more:  # two batches of each of three ranks
        more = {"fast_dev_run": 6, "logger": False}
    plain = trained(tmp_path / "plain", SmallModule(), in_place=False, **more)
    assert_alike(ours[1], plain[1])


def test_what_is_logged_is_the_mean_of_a_step(tmp_path: Path) -> None:
    trainer, seen = trained(tmp_path, SmallModule(), in_place=True, max_epochs=1)
    header, *rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("loss_step")
    losses = [float(each.split(",")[column]) for each in rows if each.split(",")[column]]
    assert len(losses) == 4
    whole = 3 * 6 * 2  # samples of three whole steps; the last one has 4 batches of two and one of one
    assert seen.epochs[0]["sum"] == pytest.approx(sum(losses[:3]) * 6 + losses[3] * 5, rel=1e-5)
    assert SAMPLES - whole == 9


def test_callbacks_do_what_they_do_without(tmp_path: Path) -> None:
    found = []
    for in_place in (True, False):
        save = ModelCheckpoint(tmp_path / str(in_place), monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
        stop = EarlyStopping("val_loss", patience=0, min_delta=0.2)
        trainer, seen = trained(
            tmp_path, SmallModule(), in_place=in_place, callbacks=[save, stop], enable_checkpointing=True, max_epochs=9
        )
        files = sorted(each.name for each in (tmp_path / str(in_place)).iterdir())
        found.append(
            (trainer.current_epoch, files, Path(save.best_model_path).name, stop.stopped_epoch, len(seen.epochs))
        )
    assert found[0] == found[1]
    assert found[0][0] < 9


@pytest.mark.parametrize(("step", "schedule"), [(4, "step"), (6, "step"), (6, "sized")])
def test_a_checkpoint_of_one_process_is_gone_on_from_by_several(tmp_path: Path, step: int, schedule: str) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    _, plain = trained(
        tmp_path, SmallModule(schedule), in_place=False, callbacks=[save], enable_checkpointing=True, max_epochs=4
    )
    checkpoint = tmp_path / f"step={step}.ckpt"
    _, ours = trained(tmp_path, SmallModule(schedule), in_place=True, resume=checkpoint, max_epochs=4)
    left = {number: values for number, values in plain.steps.items() if number > step}
    assert {number for number in ours.steps if number > step} == left.keys()
    for number, values in left.items():
        assert ours.steps[number] == pytest.approx(values, rel=1e-4, abs=1e-6), f"step {number}"
    assert ours.epochs[-1] == pytest.approx(plain.epochs[-1], rel=1e-5)


def test_a_checkpoint_of_several_is_gone_on_from_by_one_process(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    _, ours = trained(
        tmp_path, SmallModule("epoch"), in_place=True, callbacks=[save], enable_checkpointing=True, max_epochs=2
    )
    checkpoint = torch.load(tmp_path / "step=8.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 8
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 2 * 8
    module = SmallModule("epoch")
    module.load_state_dict(checkpoint["state_dict"])
    weights = torch.cat([each.detach().flatten() for each in module.parameters()])
    assert {str(number): float(each) for number, each in enumerate(weights)}.items() <= ours.steps[8].items()


def test_other_loops_run_behind_it(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, SmallModule(), in_place=True, max_epochs=1)
    (found,) = trainer.validate(trainer.lightning_module, DataLoader(numbers(9, 2), 5), verbose=False)
    assert found["val_loss"] > 0
    assert "_on_before_batch_transfer" not in vars(trainer.lightning_module)


class Prepared(SmallModule):
    """`Prepared` changes each batch on its way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Double what is asked for."""
        del dataloader_idx
        return batch[0], 2 * batch[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Halve what is given."""
        del dataloader_idx
        return batch[0] / 2, batch[1]


def test_hooks_see_batches_and_not_what_stands_for_them(tmp_path: Path) -> None:
    ours = trained(tmp_path / "ours", Prepared(), in_place=True, max_epochs=1)
    plain = trained(tmp_path / "plain", Prepared(), in_place=False, max_epochs=1)
    assert_alike(ours[1], plain[1])


class Manual(SmallModule):
    """`Manual` decides itself what a step is."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterator(SmallModule):
    """`Iterator` takes batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        """Take one."""
        return self.loss(next(dataloader_iter)[0])


class OwnBackward(SmallModule):
    """`OwnBackward` computes gradients itself."""

    def backward(self, loss: torch.Tensor) -> None:
        """Compute them."""
        loss.backward()


class Several(SmallModule):
    """`Several` has two optimizers."""

    def configure_optimizers(self) -> Any:
        """Return them."""
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class OfClosure(SmallModule):
    """`OfClosure` has an optimizer that computes the loss again and again."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return torch.optim.LBFGS(self.parameters())


class Silent(SmallModule):
    """`Silent` has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return none."""


class Measuring(SmallModule):
    """`Measuring` logs a metric of training data."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log it."""
        del batch_idx
        loss = self.loss(batch)
        self.mean(loss)
        self.log("mean", self.mean)
        return loss


class EndsEpochs(SmallModule):
    """`EndsEpochs` ends an epoch before its last step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """End it."""
        del batch
        return -1 if batch_idx == 4 else None


@pytest.mark.parametrize(
    ("module", "more", "words"),
    [
        (Iterator, {}, "takes dataloader_iter"),
        (OwnBackward, {}, r"has a backward\(\) of its own"),
        (OfClosure, {}, "LBFGS computes the loss several times"),
        (Silent, {}, "training_step returned None"),
        (Measuring, {}, "logs mean as a MeanMetric"),
        (EndsEpochs, {}, "an epoch was ended before its last step"),
        (SmallModule, {"overfit_batches": 2}, "overfit_batches"),
        (SmallModule, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        (SmallModule, {"precision": "bf16-true"}, "precision bf16-true"),
        (SmallModule, {"sync_batchnorm": True}, "sync_batchnorm"),
        (SmallModule, {"callbacks": [Timer("00:01:00:00")]}, "Timer ends the training by the clock"),
        (SmallModule, {"max_time": "00:01:00:00"}, "Timer ends the training by the clock"),
    ],
)
def test_what_would_train_otherwise_is_refused(tmp_path: Path, module: Any, more: dict[str, Any], words: str) -> None:
    trainer = trainer_of(tmp_path, Seen(), accumulate=2, ranks=2, **more)
    with pytest.raises(WrongUseError, match=words):
        trainer.fit(module(), loader())


@pytest.mark.parametrize("module", [Manual, Several])
def test_who_decides_what_a_step_is_must_be_one(tmp_path: Path, module: Any) -> None:
    trainer = trainer_of(tmp_path, Seen(), accumulate=1, ranks=2, gradient_clip_val=None)
    with pytest.raises((WrongUseError, RuntimeError), match=r"automatic_optimization is False|multiple optimizers"):
        trainer.fit(module(), loader())


def test_a_second_fit_is_refused(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, SmallModule(), in_place=True, max_epochs=1)
    with pytest.raises(WrongUseError, match="launch once for each training"):
        trainer.fit(SmallModule(), loader())


class Stream(IterableDataset[Any]):
    """`Stream` can only be iterated."""

    def __iter__(self) -> Any:
        return iter([(torch.zeros(4), torch.zeros(1))])


class Changing(DataLoader[Any]):
    """`Changing` has batches otherwise than its sampler says."""

    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: DataLoader(Stream(), 2), "can only be iterated"),
        (lambda: [torch.zeros(2, 4)], "come from a list|come from a Tensor"),
        (lambda: {"one": loader(), "two": loader()}, "several training data loaders"),
        (lambda: {"one": loader()}, "stands in a list, a dict"),
        (lambda: Changing(numbers(9, 1), 2), "a Changing changes batches"),
        (lambda: DataLoader(numbers(9, 1), batch_size=None), r"no batches \(batch_size=None\)"),
    ],
)
def test_data_that_are_not_read_by_number_are_refused(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(WrongUseError, match=words):
        trainer_of(tmp_path, Seen(), accumulate=2, ranks=2).fit(SmallModule(), data())


def test_lightning_sees_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_of(tmp_path, Seen(), accumulate=2, ranks=2)
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 1, False)
    assert rank_zero_only.rank == 1
    assert isinstance(trainer.strategy, InPlaceStrategy)


def test_who_takes_a_lost_ranks_place_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "UNICRON_TAKES_PLACE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not InPlaceStrategy().is_global_zero


@pytest.mark.parametrize(("ranks", "wrong"), [(0, ValueError), (1.5, TypeError)])
def test_a_step_has_the_batches_of_some_ranks(ranks: Any, wrong: type[Exception]) -> None:
    with pytest.raises(wrong, match="ranks must be"):
        InPlaceStrategy(ranks=ranks)


def test_options_are_no_state() -> None:
    with pytest.raises(TypeError, match="got model, which is the Trainer's"):
        InPlaceStrategy(model=nn.Linear(1, 1))


def test_another_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pl.LightningModule, "_on_before_batch_transfer")
    with pytest.raises(WrongUseError, match=r"LightningModule\._on_before_batch_transfer\): take another version"):
        InPlaceStrategy()


def test_without_lightning_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['lightning'] = None; import unicron_elastic.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "the Python module lightning.pytorch is missing; install it" in done.stderr
    assert "pip install -e '.[lightning]'" in done.stderr


def test_what_the_first_rank_was_removing_is_removed_by_who_takes_its_place(tmp_path: Path) -> None:
    strategy = InPlaceStrategy()
    paths = [tmp_path / "before.ckpt", tmp_path / "now.ckpt"]
    paths[0].touch()
    strategy.remove_checkpoint(paths[0])  # of no Trainer's, as the first rank
    assert not paths[0].exists()
    trainer = strategy._trainer = SimpleNamespace(global_step=6)
    strategy.take_rank(1)
    strategy.remove_checkpoint(tmp_path / "not there")
    for path in paths:
        path.touch()
        strategy.remove_checkpoint(path)
        trainer.global_step += 6
    assert all(path.exists() for path in paths)
    trainer.global_step -= 6
    strategy.take_rank(0)
    strategy.end_what_was_left()
    assert [path.exists() for path in paths] == [True, False]


def test_what_the_first_rank_was_writing_is_written_by_who_takes_its_place(tmp_path: Path) -> None:
    strategy, written = InPlaceStrategy(), list[tuple[str, bool]]()
    trainer = strategy._trainer = SimpleNamespace(
        global_step=5, save_checkpoint=lambda path, has_weights_alone: written.append((path.name, has_weights_alone))
    )
    strategy.take_rank(1)
    strategy.save_checkpoint({"optimizer_states": []}, tmp_path / "before.ckpt")
    trainer.global_step = 6
    for path in ("best.ckpt", "last.ckpt"):
        strategy.save_checkpoint({"optimizer_states": []}, tmp_path / path)
    strategy.save_checkpoint({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert not list(tmp_path.iterdir())
    strategy.take_rank(0)
    strategy.end_what_was_left()
    assert written == [("best.ckpt", False), ("last.ckpt", False), ("weights.ckpt", True)]
