"""What an agent asks of a rendezvous: one that can do no more than torch's says so."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.compat.rendezvous import RendezvousHandler
from unicron_elastic.rendezvous.job.job_rendezvous import PlainRendezvous, job_rendezvous
from unicron_elastic.rendezvous.torch.local import LocalRendezvous


class Foreign(RendezvousHandler):  # type: ignore[misc]
    """Somebody else's, which counts what it is asked."""

    use_agent_store = True

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.asked: list[str] = []

    def get_backend(self) -> str:
        return self.backend

    def __getattribute__(self, name: str) -> Any:
        if name in ("next_rendezvous", "is_closed", "set_closed", "num_nodes_waiting", "get_run_id", "shutdown"):
            return lambda: self.asked.append(name)
        return super().__getattribute__(name)

    def next_rendezvous(self) -> Any: ...
    def is_closed(self) -> Any: ...
    def set_closed(self) -> Any: ...
    def num_nodes_waiting(self) -> Any: ...
    def get_run_id(self) -> Any: ...
    def shutdown(self) -> Any: ...


@pytest.mark.parametrize(("backend", "speaks"), [("c10d", True), ("static", False)])
def test_around_somebody_elses_stands_one_that_answers_all(backend: str, speaks: bool) -> None:
    plain = job_rendezvous(Foreign(backend))
    assert isinstance(plain, PlainRendezvous)
    assert plain.has_store_of_each_round is speaks
    assert plain.why_stay(2) == f"torch's {backend} rendezvous cannot be left."
    assert plain.take_leave(2) == plain.why_stay(2)
    assert "--rdzv-backend is unicron" in plain.depart(2, "drained")
    assert plain.keep_out(Quarantined(node="a", reason="sick", since=0.0, until=None, by="ada"))
    assert not plain.is_of_cluster
    assert (plain.node_id, plain.node_ids, plain.patience_s, plain.cluster_secret()) == ("", (), 0.0, "")
    assert [plain.outlives_stores, plain.has_ended_well(), plain.is_nobody_awaited(), plain.tell_fault("")] == [
        False
    ] * 4
    assert (plain.world_log(), plain.news_writer(), tuple(plain.cluster_samples())) == (None, None, ())


def test_what_torch_asks_goes_to_the_handler() -> None:
    foreign = Foreign("etcd")
    plain = PlainRendezvous(foreign)
    for ask in (plain.next_rendezvous, plain.is_closed, plain.set_closed, plain.get_run_id, plain.shutdown):
        ask()
    assert foreign.asked == ["next_rendezvous", "is_closed", "set_closed", "get_run_id", "shutdown"]
    assert plain.use_agent_store


def test_ours_is_asked_itself() -> None:
    ours = LocalRendezvous(backend="c10d", run_id="job")
    assert job_rendezvous(ours) is ours
