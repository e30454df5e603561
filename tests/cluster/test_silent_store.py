"""A torch store on a host that falls silent: who waits for its answer hears of it soon."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hosts import Network
from jobs import until
from torch.distributed import DistError

from unicron_elastic.base.store_link import SILENT_S
from unicron_elastic.rendezvous.job import rounds as round_store
from unicron_elastic.training.group.meeting import connect_store

SERVER = """
import sys, time
from datetime import timedelta
from unicron_elastic.rendezvous.job.bound_store import bound_store
store = bound_store(sys.argv[1], timedelta(seconds=600), 29500)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("who", [pytest.param("agent", marks=pytest.mark.slow), "worker"])
def test_a_call_to_a_store_whose_host_falls_silent_ends(network: Network, tmp_path: Path, who: str) -> None:
    server, client = network.add("a", "b")
    out = tmp_path / "server"
    server.start([sys.executable, "-c", SERVER, server.address], out=out)
    until(lambda: out.exists() and "29500\n" in out.read_text(), "the store to listen", out.read_text)

    def waited_s() -> float:
        address = f"{server.address}:29500"
        store = connect_store(address) if who == "worker" else round_store.visit(address, 600.0)[0]
        assert store.add("word", 1) == 1
        server.cut()
        began = time.monotonic()
        with pytest.raises(DistError):
            store.add("word", 1)
        return time.monotonic() - began

    assert client.within(waited_s) < 2 * SILENT_S
