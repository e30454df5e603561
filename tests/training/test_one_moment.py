"""What is saved in ``steps()`` is the state of one step, wherever the script changes what is registered between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic import Run

MICRO_BATCHES, PER_EPOCH, EPOCHS = 2, 2, 2
STEPS = PER_EPOCH * EPOCHS
PLACES = ("top", "within", "end", "epoch")
Trace = list[tuple[Any, ...]]


pytestmark = pytest.mark.usefixtures("no_launcher")


class Counter:
    """A state of the script's own."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Script:
    """Changes all that is registered at ``place`` in each round, and saves at each of ``saves``."""

    def __init__(self, place: str, folder: Path | None = None, saves: str = "end") -> None:
        torch.manual_seed(0)
        self.place, self.folder, self.saves = place, folder, saves
        self.model = nn.Linear(3, 1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=1)
        self.counter = Counter()
        self.run = Run(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            plateau=self.plateau,
            average=self.average,
            counter=self.counter,
        )
        self.trace: Trace = []

    def at(self, place: str) -> None:
        """Change the state, if it is to be changed here; as an evaluation that swaps the average in and out."""
        if place != self.place:
            return
        self.scheduler.step()
        self.plateau.step(1.0)
        with torch.no_grad():
            kept = [each.clone() for each in self.model.parameters()]
            for each, averaged in zip(self.model.parameters(), self.average.parameters(), strict=True):
                each.copy_(averaged)
            for each, own in zip(self.model.parameters(), kept, strict=True):
                each.copy_(own)
        self.average.update_parameters(self.model)
        self.counter.seen.append(self.run.step)

    def save(self, place: str, step: int) -> None:
        if self.folder is not None and place == self.saves:
            self.run.save(self.folder, step, keep=STEPS + 1)

    def train(self, start: int = 0) -> Trace:
        for epoch in range(start // PER_EPOCH, EPOCHS):
            for step in self.run.steps((epoch + 1) * PER_EPOCH, MICRO_BATCHES):
                self.at("top")
                self.save("top", step.number)
                for index in step:
                    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step.number + index))
                    step.backward(self.model(x).square().mean())
                self.save("reduced", step.number + 1)
                self.note(step.number)
                self.optimizer.step()
                self.save("within", step.number + 1)
                self.at("within")
                self.save("end", step.number + 1)
                self.at("end")
            self.save("epoch", self.run.step)
            self.at("epoch")
        self.run.wait_saved()
        return self.trace

    def note(self, step: int) -> None:
        """Note what the optimizer step is made with."""
        lr = self.optimizer.param_groups[0]["lr"]
        parameters = [each.detach().clone().tolist() for each in (*self.model.parameters(), *self.average.parameters())]
        self.trace.append((step, lr, self.scheduler.last_epoch, self.plateau.num_bad_epochs, parameters))
        self.trace[-1] += (list(self.counter.seen), int(self.average.n_averaged))


@pytest.mark.parametrize("saves", ["reduced", "within", "end", "epoch"])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_step_is_restored_the_rest_is_trained_as_it_was(place: str, saves: str, tmp_path: Path) -> None:
    undisturbed = Script(place, tmp_path, saves).train()
    saved = sorted(int(each.name.rpartition("-")[2]) for each in tmp_path.iterdir())
    assert saved[-1] >= STEPS - 1
    for step in saved:
        folder = tmp_path / "one"
        folder.mkdir(exist_ok=True)
        again = Script(place)
        name = next(each for each in tmp_path.iterdir() if each.name.endswith(f"-{step}"))
        name.rename(folder / name.name)
        assert again.run.restore(folder) == step
        assert again.train(step) == undisturbed[step:], f"from step {step}"
        (folder / name.name).rename(name)


def test_what_the_script_sets_between_restore_and_the_first_step_stays(tmp_path: Path) -> None:
    Script("end", tmp_path).train()
    again = Script("none")
    again.run.restore(tmp_path)
    again.optimizer.param_groups[0]["lr"] = 0.123
    for step in again.run.steps(STEPS + 1, MICRO_BATCHES):
        for index in step:
            step.backward(again.model(torch.ones(2, 3) * index).mean())
        assert again.optimizer.param_groups[0]["lr"] == 0.123


@pytest.mark.parametrize("wrong", [0, 2, 7])
def test_a_state_is_named_by_its_step(tmp_path: Path, wrong: int) -> None:
    script = Script("none")
    for step in script.run.steps(1, MICRO_BATCHES):
        for index in step:
            step.backward(script.model(torch.ones(2, 3) * index).mean())
        script.optimizer.step()
        for ask in (lambda: script.run.save(tmp_path, wrong), lambda: script.run.snapshot(wrong)):
            with pytest.raises(
                ValueError, match=f"how many optimizer steps the state has behind it, here 1, and not {wrong}"
            ):
                ask()


def test_a_state_that_is_waited_for_in_the_round_of_its_step_has_its_name(tmp_path: Path) -> None:
    script = Script("none")
    for step in script.run.steps(2, MICRO_BATCHES):
        for index in step:
            step.backward(script.model(torch.ones(2, 3) * index).mean())
        script.optimizer.step()
        script.run.save(tmp_path, step.number + 1)
        script.run.wait_saved()
        again = Script("none")
        assert again.run.restore(tmp_path) == step.number + 1
        assert torch.equal(again.model.weight, script.model.weight)
