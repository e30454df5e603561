"""What is kept between two steps is the state with which the next one is yielded; saved, also that of the end."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from warm_launcher import WarmLaunchers

from unicron_elastic import Run
from unicron_elastic.training.snapshot.requests import Requests


class Training:
    """It saves after each step, and changes the learning rate and a counter after each step and after each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.epochs = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.run = Run(model=self.model, optimizer=self.optimizer, scheduler=self.epochs)
        self.begun: dict[int, tuple[float, list[float]]] = {}

    def now(self) -> tuple[float, list[float]]:
        """The learning rate and the weights."""
        return self.optimizer.param_groups[0]["lr"], self.model.weight.flatten().tolist()

    def epoch(self, total: int) -> None:
        for step in self.run.steps(total, 2):
            self.begun[step.number] = self.now()
            self.optimizer.param_groups[0]["lr"] *= 0.9  # as an evaluation may, before the step
            for index in step:
                step.backward(self.model(torch.ones(1, 2) * (index + 1)).sum())
            self.run.save(self.folder, step.number + 1, keep=10)  # before and behind what changes it: it is the same
            self.optimizer.step()
            self.optimizer.param_groups[0]["lr"] *= 0.8
        self.epochs.step()


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_each_saved_state_is_that_with_which_a_script_goes_on(tmp_path: Path, step: int) -> None:
    one = Training(tmp_path)
    for total in (2, 4, 5):
        one.epoch(total)
    one.run.wait_saved()
    for path in tmp_path.iterdir():
        if path.name != f"step-{step}":
            path.rename(tmp_path / f"other-{path.name}")
    other = Training(tmp_path)
    assert other.run.restore(tmp_path) == step
    assert other.now() == one.begun[step]


def test_a_process_that_is_forked_between_steps_keeps_nothing_at_its_own_end(tmp_path: Path) -> None:
    """As a worker of a DataLoader in an evaluation, which has the state before the end of the epoch."""

    def keep() -> None:
        (tmp_path / str(os.getpid())).touch()

    requests = Requests(lambda: None)
    requests.ask("save", keep)
    forked = multiprocessing.get_context("fork").Process(target=int)
    forked.start()
    forked.join(30.0)
    assert forked.exitcode == 0
    assert list(tmp_path.iterdir()) == []
    requests.carry_out()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_what_is_of_the_next_step_is_not_done_if_none_comes() -> None:
    done: list[str] = []
    requests = Requests(lambda: None)
    requests.ask_of_next(lambda: done.append("snapshot"))
    requests.ask("save", lambda: done.append("save"))
    requests.carry_out()
    requests.end()
    assert done == ["save"]
    requests.begin_step()
    requests.begin_step()
    assert done == ["save", "snapshot"]


class Odd:
    """Its state cannot be written from a moment on."""

    is_odd = False

    def state_dict(self) -> dict[str, object]:
        return {"seen": {1} if self.is_odd else 1}

    def load_state_dict(self, _state: dict[str, object]) -> None:
        pass


def test_a_state_that_cannot_be_saved_any_more_is_told_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, odd = Training(tmp_path), Odd()
    training.run = Run(model=training.model, optimizer=training.optimizer, odd=odd)
    training.epoch(2)
    odd.is_odd = True
    training.epoch(5)
    training.run.wait_saved()
    assert training.run.step == 5
    assert (tmp_path / "step-1").exists()
    said = capsys.readouterr().err
    assert said.count("unicron: the state is not kept") == 1
    assert "odd.seen is a set, which cannot be sent" in said


def test_the_last_one_is_saved_when_that_is_waited_for(tmp_path: Path) -> None:
    one, other = Training(tmp_path), Training(tmp_path)
    one.epoch(3)
    assert not (tmp_path / "step-3").exists()
    one.run.wait_saved()
    assert other.run.restore(tmp_path) == 3
    assert other.now() == one.now()


SCRIPT = """
import sys, torch, unicron_elastic
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(1, 1):
    for index in step:
        step.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    run.save(sys.argv[1], 1)
optimizer.param_groups[0]["lr"] = 0.25
if sys.argv[2] == "fails":
    raise ValueError("in the middle of a change")
"""


def test_a_script_that_ends_well_has_saved_what_it_asked_for(tmp_path: Path, warm_launchers: WarmLaunchers) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended, failed = (warm_launchers.script(tmp_path / "train.py", tmp_path / how, how) for how in ("ends", "fails"))
    assert ended.returncode == 0, ended.stderr
    assert failed.returncode == 1
    assert "in the middle of a change" in failed.stderr
    assert not (tmp_path / "fails").exists()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert Run(model=model, optimizer=optimizer).restore(tmp_path / "ends") == 1
    assert optimizer.param_groups[0]["lr"] == 0.25


AT_EXIT = """
import atexit, sys, torch, unicron_elastic
model = torch.nn.Linear(2, 1)
run = unicron_elastic.Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
atexit.register(lambda: run.save(sys.argv[1], run.step))
for step in run.steps(2, 1):
    for index in step:
        step.backward(model(torch.ones(1, 2)).sum())
    if sys.argv[2] == "before" and step.number == 0:
        run.save(sys.argv[1], 1)
if sys.argv[2] == "no-threads":  # as Python 3.12.1 at a script's end
    import threading
    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start
"""


@pytest.mark.parametrize("how", ["before", "first", "no-threads"])
def test_what_a_script_asks_for_when_it_has_ended_is_saved(
    tmp_path: Path, how: str, warm_launchers: WarmLaunchers
) -> None:
    (tmp_path / "train.py").write_text(AT_EXIT)
    ended = warm_launchers.script(tmp_path / "train.py", tmp_path / "states", how)
    assert "Traceback" not in ended.stderr
    model = torch.nn.Linear(2, 1)
    run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert run.restore(tmp_path / "states") == 2
