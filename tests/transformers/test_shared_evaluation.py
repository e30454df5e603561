from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_elastic.transformers.shared_evaluation import SharedEvaluation, WholeLosses

DEADLINE_S = 20.0


class Ranks:
    """`Ranks` sum up what those bring that are left; some leave before their sum of a round."""

    def __init__(self, number: int) -> None:
        self._changed = threading.Condition()
        self._left = set(range(number))
        self._brought: dict[int, Tensor] = {}
        self._sum: Tensor | None = None
        self._rounds = 0

    def place(self, rank: int) -> tuple[int, int]:
        with self._changed:
            return sorted(self._left).index(rank), len(self._left)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.discard(rank)
            self._settle()

    def all_reduce(self, rank: int, share: Tensor) -> Tensor:
        with self._changed:
            self._brought[rank] = share
            this_round = self._rounds
            self._settle()
            assert self._changed.wait_for(lambda: self._rounds > this_round, DEADLINE_S)
            assert self._sum is not None
            return self._sum

    def _settle(self) -> None:
        if self._left and self._brought.keys() >= self._left:
            self._sum, self._brought = torch.stack(list(self._brought.values())).sum(0), {}
            self._rounds += 1
            self._changed.notify_all()


def loss_of(batch: Tensor) -> Tensor:
    return batch.float().square().mean() / 3


def evaluated(shared: SharedEvaluation, tell: Callable[[], None] = lambda: None) -> Tensor | None:
    """Return the losses that the loop gets, as the Trainer's does."""
    for batch in shared:
        if isinstance(batch, WholeLosses):
            return batch.repeat(8)
        shared.note(loss_of(batch))
        tell()
    return None


def of_one(data: DataLoader[Any]) -> Tensor:
    return torch.cat([loss_of(batch).repeat(len(batch)) for batch in data])


@given(
    samples=st.integers(1, 23),
    size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    lost=st.dictionaries(st.integers(1, 3), st.integers(0, 6)),
)
def test_losses_are_those_of_one_process_whoever_is_lost(
    samples: int, size: int, ranks: int, lost: dict[int, int]
) -> None:
    loader, world = DataLoader(range(samples), size), Ranks(ranks)  # type: ignore[arg-type,var-annotated]

    def train(rank: int) -> Tensor | None:
        made: list[int] = []

        def tell() -> None:
            made.append(1)
            if len(made) > lost.get(rank, 10**6):
                raise InterruptedError

        def place() -> tuple[int, int]:
            return world.place(rank)

        try:
            return evaluated(SharedEvaluation(loader, 0, place, lambda share: world.all_reduce(rank, share)), tell)
        except InterruptedError:
            world.leave(rank)
            return None

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(train, range(ranks)))
    whole = of_one(loader)
    for rank, losses in enumerate(found):
        if losses is not None:
            assert torch.equal(losses, whole)
        else:
            assert rank in lost


def alone(loader: Any) -> SharedEvaluation:
    return SharedEvaluation(loader, 0, lambda: (0, 1), lambda share: share)


def test_who_was_dealt_nothing_makes_all_if_nobody_else_does() -> None:
    loader: Any = DataLoader(range(2), 1)  # type: ignore[arg-type]
    shared = SharedEvaluation(loader, 0, lambda: (5, 6), lambda share: share)
    losses = evaluated(shared)
    assert losses is not None
    assert torch.equal(losses, of_one(loader))


def test_a_loss_that_is_not_finite_stays_what_it_is() -> None:
    shared = alone(DataLoader(range(3), 1))  # type: ignore[arg-type]
    losses = iter(["nan", "inf", "1.0"])
    for batch in shared:
        if isinstance(batch, WholeLosses):
            assert [str(each) for each in batch.repeat(8).tolist()] == ["nan", "inf", "1.0"]
        else:
            shared.note(torch.tensor(float(next(losses))))


def test_batches_without_a_loss_have_none() -> None:
    shared = alone(DataLoader(range(3), 1))  # type: ignore[arg-type]
    seen = []
    for batch in shared:
        seen.append(batch)
        shared.note(None)
    assert len(seen) == 3


def test_double_losses_stay_double() -> None:
    shared = alone(DataLoader(range(2), 1))  # type: ignore[arg-type]
    for batch in shared:
        if isinstance(batch, WholeLosses):
            assert batch.repeat(1).dtype == torch.float64
        else:
            shared.note(torch.tensor(0.1, dtype=torch.float64))


def test_its_length_is_that_of_the_share_and_one() -> None:
    loader: Any = DataLoader(range(7), 1)  # type: ignore[arg-type]
    assert [len(SharedEvaluation(loader, 0, lambda at=at: (at, 3), lambda x: x)) for at in range(3)] == [4, 3, 3]  # type: ignore[misc]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_read_is_named(workers: int) -> None:
    class Broken:
        """`Broken` has a sample that is none."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> int:
            return [1, 2, 3][number]

    loader: Any = DataLoader(Broken(), 2, num_workers=workers)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"batch 1 of the evaluation \(samples 2, 3\) could not be read: IndexError"):
        evaluated(alone(loader))


def test_one_rank_says_what_is_dealt_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    loader: Any = DataLoader(range(5), 1)  # type: ignore[arg-type]
    places = iter([(0, 2), (0, 1), (0, 1)])
    evaluated(SharedEvaluation(loader, 0, lambda: next(places), lambda share: share))
    said = capsys.readouterr().err
    assert said == "unicron: the ranks that are left make 2 batches of the evaluation for those lost.\n"
    evaluated(alone(loader))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collator_draws_depends_on_the_batch_alone(workers: int) -> None:
    def noisy(samples: list[int]) -> Tensor:
        return torch.tensor(samples) + torch.rand(len(samples))

    loader: Any = DataLoader(range(6), 2, collate_fn=noisy, num_workers=workers)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    whole = evaluated(alone(loader))
    assert torch.equal(torch.get_rng_state(), before)
    later = evaluated(SharedEvaluation(loader, 0, lambda: (1, 2), lambda share: share))  # 1, and then 0 and 2
    assert whole is not None
    assert later is not None
    assert torch.equal(later, whole)
    assert len(set(whole.tolist())) == 3
