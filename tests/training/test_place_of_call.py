"""A script that comes again to where it asked for its state draws on from there, whatever it has drawn on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from script_in_epochs import BATCH, EPOCH, SAMPLES, Still, shuffled
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from unicron_elastic.training.run import Run
from unicron_elastic.training.snapshot.place_of_call import PlaceOfCall

STEPS = 6


def test_a_place_is_a_line_and_the_step_that_is_asked_for_there() -> None:
    place = PlaceOfCall()

    def here(step: int) -> bool:
        return place.note(step)

    def elsewhere(step: int) -> bool:
        return place.note(step)

    assert place.state_dict() == []
    assert not here(3)
    kept = place.state_dict()
    assert kept[0] == "test_place_of_call.py"
    assert kept[2:] == ["here", 3]
    again = PlaceOfCall()
    again.load_state_dict(kept)
    place = again
    assert not elsewhere(3)
    assert not here(4)
    assert here(3)
    place.forget_taken()
    assert not here(3)


def test_a_state_of_which_nothing_is_known_was_asked_for_nowhere() -> None:
    place = PlaceOfCall()
    place.load_state_dict([])
    assert not place.note(0)


class _Walk:
    """`_Walk` trains without a DataLoader, as a process of its own would, and draws before its loop."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def train(self, start: int) -> list[list[float]]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0001)
        self.run = Run(model=self.model, optimizer=self.optimizer)
        if start:
            self.run.load_state_dict(self.kept[start])
        self.draw()
        return [each for step in range(start, STEPS) for each in self.steps_of(step)]

    def steps_of(self, step: int) -> Iterator[list[float]]:
        raise NotImplementedError

    def keep(self, step: int) -> None:
        self.kept.setdefault(step, self.run.state_dict())

    def one(self) -> list[float]:
        """Compute gradients from what is drawn."""
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.model(torch.tensor(drawn[:2])).sum().backward()
        return drawn

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def draw(self) -> None:
        torch.rand(5), random.random(), np.random.rand(2)


class InFront(_Walk):
    """`InFront` asks in front of each step."""

    def steps_of(self, step: int) -> Iterator[list[float]]:
        self.run.snapshot(step)
        self.keep(step)
        yield self.one()
        self.step()


class DrawingTwice(_Walk):
    """`DrawingTwice` has two batches in each step, and asks in front of each, of which the first counts."""

    def steps_of(self, step: int) -> Iterator[list[float]]:
        for _ in range(2):
            self.run.snapshot(step)
            self.keep(step)
            yield self.one()
        self.step()


class LeavingOut(_Walk):
    """`LeavingOut` asks in front of each batch, and finds some not worth a step."""

    def steps_of(self, step: int) -> Iterator[list[float]]:
        for _ in range(3):
            self.run.snapshot(step)
            self.keep(step)
            yield self.one()
            self.optimizer.zero_grad()
        yield self.one()
        self.step()


class BehindEach(_Walk):
    """`BehindEach` asks behind each of the two batches of a step, with the number of steps that it has made by then.

    When it comes there first it has computed something already, and goes on; so it may draw nothing before its loop.
    """

    def draw(self) -> None:
        pass

    def steps_of(self, step: int) -> Iterator[list[float]]:
        for is_last in (False, True):
            yield self.one()
            if is_last:
                self.step()
            self.run.snapshot(step + is_last)
            self.keep(step + is_last)


@pytest.mark.parametrize("kind", [InFront, DrawingTwice, LeavingOut, BehindEach])
def test_the_numbers_are_those_of_the_place_whatever_was_drawn_before(kind: type[_Walk]) -> None:
    """Once: at the same place with the same number, but behind what was computed, the script goes on."""
    walk = kind()
    whole = walk.train(0)
    for start in range(1, STEPS):
        again = walk.train(start)
        assert again == whole[-len(again) :], start


class Behind(_Walk):
    """`Behind` asks behind each step, and, with the same number, in front of the loop at another line."""

    def steps_of(self, step: int) -> Iterator[list[float]]:
        if step and self.is_first:
            self.run.snapshot(step)
        self.is_first = False
        yield self.one()
        self.step()
        self.run.snapshot(step + 1)
        self.keep(step + 1)

    def train(self, start: int) -> list[list[float]]:
        self.is_first = True
        return super().train(start)


def test_another_line_is_another_place() -> None:
    """What is drawn before it counts, as ever."""
    walk = Behind()
    walk.train(0)
    again = walk.train(3)
    walk.kept[3]["place"] = []
    assert again == walk.train(3)


def test_a_state_of_before_and_one_of_another_rank_have_no_place() -> None:
    walk = InFront()
    walk.train(0)
    for lacking in ({"place": []}, {"random": {}}):
        state = walk.kept[3]
        walk.kept[3] = {**state, **lacking}
        drawn = walk.train(3)
        del (without := dict(walk.kept[3]))["place"]
        walk.kept[3] = without
        assert drawn == walk.train(3)
        walk.kept[3] = state


class Held(Sampler[int]):
    """`Held` draws each number from those that are left when it is asked for."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


LOADERS: dict[str, Callable[[], DataLoader[Tensor]]] = {
    "shuffle": shuffled,
    "drawn late": lambda: DataLoader(Still(), BATCH, sampler=Held()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_script_may_ask_at_that_place_also_for_what_it_skips(kind: str) -> None:
    """The order goes on being drawn from where it was, and what comes behind it from where the state was kept."""
    whole, kept = _asking(LOADERS[kind], None, 0)
    for start in (1, 3, EPOCH - 1):
        again, _ = _asking(LOADERS[kind], kept[start], start)
        assert again == whole[start:], start


def _asking(
    loader_of: Callable[[], DataLoader[Tensor]], state: Any, start: int
) -> tuple[list[list[float]], dict[int, Any]]:
    """Trains on an epoch and a half of a loader; it draws nothing of its own, which an order drawn late would see."""
    torch.manual_seed(3)
    random.seed(3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    run = Run(model=model, optimizer=optimizer)
    loader, seen, kept, step = loader_of(), list[list[float]](), dict[int, Any](), start
    if state is not None:
        run.load_state_dict(state)
    for number, batch in enumerate(each for _ in range(2) for each in loader):
        run.snapshot(step)
        if number < start:
            continue
        kept[step] = run.state_dict()
        seen.append([*batch.flatten().tolist(), random.random()])
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == EPOCH + 3:
            break
    return seen, kept
