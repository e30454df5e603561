"""The count of restarts is the job's, whichever agent saw which failure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from unicron_elastic.rendezvous.job.agree_on_restarts import Agreed, agree_on_restarts

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.delenv("TORCH_ELASTIC_WORKER_IDENTICAL", raising=False)
    return TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)


def _agree(server: TCPStore, counts: list[int], prefix: str = "round 1") -> list[int]:
    """Every agent asks over a connection of its own, all at the same time."""

    return [agreed.restarts_used for agreed in _ask(server, counts, [False] * len(counts), prefix)]


def _ask(server: TCPStore, counts: list[int], train_on: list[bool], prefix: str = "round 1") -> list[Agreed]:
    def ask(rank: int) -> Agreed:
        client = TCPStore("127.0.0.1", server.port, None, False, TIMEOUT, wait_for_workers=False)
        store = PrefixStore(prefix, client)
        return agree_on_restarts(store, rank, len(counts), counts[rank], trains_on=train_on[rank])

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(ask, range(len(counts))))


@pytest.mark.parametrize(
    ("counts", "agreed"),
    [
        ([0, 0], 0),
        ([1, 0], 1),  # one agent saw the failure
        ([2, 2, 2], 2),  # several saw the same one
        ([0, 3, 2], 3),  # a node that joins knows nothing
    ],
)
def test_the_greatest_count_is_the_jobs(server: TCPStore, counts: list[int], agreed: int) -> None:
    assert _agree(server, counts) == [agreed] * len(counts)


def test_rounds_do_not_mix(server: TCPStore) -> None:
    assert _agree(server, [5, 0]) == [5, 5]
    assert _agree(server, [0, 1], "round 2") == [1, 1]


@pytest.mark.parametrize(
    ("train_on", "known"),
    [
        ([False, False, False], [False, False, False]),
        ([True, False, False], [False, True, True]),  # of itself an agent knows it anyway
        ([True, True, False], [True, True, True]),
    ],
)
def test_each_knows_whether_workers_of_others_train_on(
    server: TCPStore, train_on: list[bool], known: list[bool]
) -> None:
    agreed = _ask(server, [2, 0, 1], train_on)
    assert [each.do_others_train for each in agreed] == known
    assert [each.restarts_used for each in agreed] == [2, 2, 2]


def test_alone_or_told_not_to_there_is_nothing_to_agree_on(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agree_on_restarts(server, 0, 1, 4) == Agreed(restarts_used=4)
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    assert agree_on_restarts(server, 0, 2, 4) == Agreed(restarts_used=4)
    assert server.num_keys() <= 1  # torch keeps one of its own
