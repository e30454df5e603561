from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from torch import Tensor

from unicron_elastic.lightning.logged_values import LogExchange, Logged, LoggedValues, added, of_step

MEAN = {"fx": "training_step", "reduce_fx": "mean"}
DEADLINE_S = 30.0


class Adding:
    """`Adding` sums up what several threads give."""

    def __init__(self, ranks: int) -> None:
        self._given: list[Tensor] = []
        self._begin, self._end = (threading.Barrier(ranks, timeout=DEADLINE_S) for _ in range(2))
        self._lock = threading.Lock()
        self.calls = 0

    def __call__(self, value: Tensor) -> Tensor:
        with self._lock:
            self._given.append(value)
        if self._begin.wait() == 0:
            self.calls += 1
            self.sum = sum(self._given[1:], start=self._given[0])
            self._given = []
        self._end.wait()
        return self.sum


def exchanged(exchanges: list[LogExchange], own: list[LoggedValues], count: int) -> tuple[list[Any], int]:
    """Return what each rank knows, and how often they asked each other."""
    add, found = Adding(len(own)), [None] * len(own)

    def exchange(rank: int) -> None:
        found[rank] = exchanges[rank].of_all(own[rank], count, add, rank, len(own))  # type: ignore[call-overload]

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(len(own))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE_S)
    return found, add.calls


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_know_all(seed: int) -> None:
    drawn = random.Random(seed)
    ranks = drawn.randint(1, 4)
    exchanges = [LogExchange() for _ in range(ranks)]
    known: set[str] = set()
    for _ in range(4):
        count = drawn.randint(1, 6)
        whole: dict[str, dict[int, Logged]] = {}
        own = [LoggedValues() for _ in range(ranks)]
        for index in range(count):
            computes = own[drawn.randrange(ranks)]
            for name in drawn.sample("abcde", drawn.randint(0, 3)):
                logged = whole.setdefault(name, {})[index] = Logged(drawn.random(), drawn.randint(1, 9))
                computes.note(name, index, logged, {**MEAN, "name": name})
        found, calls = exchanged(exchanges, own, count)
        assert all({name: each for name, each in one.items() if each} == whole for one in found)
        assert calls == (1 if set(whole) <= known else 3)
        known |= set(whole)
        assert all(each.ways == exchanges[0].ways for each in exchanges)
        assert set(exchanges[0].ways) == known


def test_what_is_logged_twice_in_a_micro_batch_is_put_together() -> None:
    assert added(Logged(1.0, 1), Logged(4.0, 2), "mean") == Logged(3.0, 3)
    assert [added(Logged(1.0, 1), Logged(4.0, 1), each).value for each in ("sum", "min", "max")] == [5.0, 1.0, 4.0]
    own = LoggedValues()
    for value in (1.0, 3.0):
        own.note("a", 1, Logged(value, 1), MEAN)
    assert own.numbers(["a", "b"], 2).tolist() == [[[0, 0], [2, 2]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize(("reduction", "whole"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_a_step_is_what_its_micro_batches_are_together(reduction: str, whole: float) -> None:
    assert of_step([1.0, 2.0, 3.0], reduction) == whole
