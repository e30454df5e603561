"""A node that waits for others says so, where torch itself is silent."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from unicron_elastic.rendezvous.job.job_rendezvous import PlainRendezvous, job_rendezvous
from unicron_elastic.rendezvous.torch.choose import rendezvous_handler


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.parametrize("first", [0, 1])
def test_who_waits_where_all_have_a_rank_says_for_whom(first: int, caplog: pytest.LogCaptureFixture) -> None:
    place = f"127.0.0.1:{_free_port()}"
    said = (
        f"This node, of rank 0, waits for the other node at {place}.",
        f"This node, of rank 1, waits for that of rank 0 at {place}, and until all 2 are there.",
    )
    handlers = []
    for rank in range(2):
        parameters = RendezvousParameters("static", place, "r", 2, 2, rank=rank, timeout=20)
        handler = job_rendezvous(rendezvous_handler(parameters))
        assert isinstance(handler, PlainRendezvous)
        handlers.append(handler)
    handlers[first].silent_s, handlers[1 - first].silent_s = 0.05, 60.0
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(handlers[first].next_rendezvous)
        end = time.monotonic() + 20
        while said[first] not in caplog.messages:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert handlers[1 - first].next_rendezvous().world_size == waiting.result(20).world_size == 2
    assert [each for each in caplog.messages if "waits" in each] == [said[first]]
