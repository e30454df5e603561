"""The rendezvous of a single node, and which rendezvous a job gets, with real stores."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from unicron_elastic.rendezvous.torch.choose import rendezvous_handler, unicron_handler
from unicron_elastic.rendezvous.torch.create_handler import nodes_of
from unicron_elastic.rendezvous.torch.fresh_store import FreshStoreRendezvous
from unicron_elastic.rendezvous.torch.handler import ClusterRendezvous
from unicron_elastic.rendezvous.torch.local import LocalRendezvous
from unicron_elastic.rendezvous.torch.static import StaticRendezvous


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)


def test_a_worker_reaches_the_store_that_it_is_told_of() -> None:
    handler = LocalRendezvous(backend="c10d", run_id="r1", host="127.0.0.1")
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    client = _client(info.bootstrap_store_info.master_port)
    client.set("from a worker", "x")
    assert client.get("from a worker") == b"x"
    assert handler.use_agent_store


def test_every_generation_has_a_store_of_its_own() -> None:
    handler = LocalRendezvous(backend="c10d", run_id="r1", host="127.0.0.1")
    info = handler.next_rendezvous()
    _client(info.bootstrap_store_info.master_port).set("address of rank 0", "of a dead process")
    info.store.set("agents", "1")
    first_port = info.bootstrap_store_info.master_port
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info.master_port != first_port or first_port == 0
    assert not _client(info.bootstrap_store_info.master_port).check(["address of rank 0"])
    assert not info.store.check(["agents"])


def test_what_agents_keep_is_apart_from_what_workers_keep() -> None:
    handler = LocalRendezvous(backend="c10d", run_id="r1", host="127.0.0.1")
    info = handler.next_rendezvous()
    info.store.set("key", "of the agent")
    assert not _client(info.bootstrap_store_info.master_port).check(["key"])


def test_a_fixed_port_serves_generation_after_generation() -> None:
    port = _free_port()
    handler = LocalRendezvous(backend="static", run_id="r1", host="127.0.0.1", port=port)
    for _ in range(3):
        info = handler.next_rendezvous()
        assert info.bootstrap_store_info.master_port == port
        client = _client(port)
        assert not client.check(["old"])
        client.set("old", "x")
        del info


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        handler = LocalRendezvous(backend="static", run_id="r1", host="127.0.0.1", port=port)
        with pytest.raises(RendezvousConnectionError, match=f"port {port}"):
            handler.next_rendezvous()


def test_the_rest_of_torchs_interface() -> None:
    handler = LocalRendezvous(backend="static", run_id="r1")
    assert (handler.get_backend(), handler.get_run_id()) == ("static", "r1")
    assert handler.num_nodes_waiting() == 0
    assert handler.has_store_of_each_round is False
    assert not handler.is_closed()
    port = handler.next_rendezvous().bootstrap_store_info.master_port
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'r1' is closed"):
        handler.next_rendezvous()
    assert handler.shutdown() is True
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0  # nobody listens any more


def _parameters(**changed: Any) -> RendezvousParameters:
    known = {"backend": "c10d", "endpoint": "localhost:0", "run_id": "r1", "min_nodes": 1, "max_nodes": 1}
    return RendezvousParameters(**{**known, "local_addr": "127.0.0.1", "timeout": 20, **changed})


@pytest.mark.parametrize("endpoint", ["localhost:0", "127.0.0.1:0"])
def test_standalone_is_local(endpoint: str) -> None:
    handler = rendezvous_handler(_parameters(endpoint=endpoint))
    assert isinstance(handler, LocalRendezvous)
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "127.0.0.1"
    handler.shutdown()


def test_a_static_job_of_one_node_is_local_on_the_port_that_was_asked_for() -> None:
    port = _free_port()
    handler = rendezvous_handler(_parameters(backend="static", endpoint=f"127.0.0.1:{port}", rank=0))
    assert isinstance(handler, LocalRendezvous)
    info = handler.next_rendezvous().bootstrap_store_info
    assert (info.master_addr, info.master_port) == ("127.0.0.1", port)
    handler.shutdown()


def test_port_0_of_a_static_job_of_one_node_is_any_free_port() -> None:
    handler = rendezvous_handler(_parameters(backend="static", endpoint="localhost:0", rank=0))
    assert isinstance(handler, LocalRendezvous)
    info = handler.next_rendezvous().bootstrap_store_info
    assert info.master_port > 0
    _client(info.master_port).set("from a worker", "x")
    handler.shutdown()


def test_port_0_of_a_static_job_of_several_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"port 0 .* the other nodes could not know: give all nodes the same port"):
        rendezvous_handler(_parameters(backend="static", endpoint="localhost:0", rank=0, min_nodes=2, max_nodes=2))


def test_a_job_alone_on_a_host_whose_name_does_not_resolve_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "no-such-host.invalid")
    handler = rendezvous_handler(_parameters(backend="c10d", endpoint="localhost:0", max_nodes=1))
    info = handler.next_rendezvous().bootstrap_store_info
    TCPStore(info.master_addr, info.master_port, None, False, timedelta(seconds=5), wait_for_workers=False)
    handler.shutdown()


@pytest.mark.parametrize("changed", [{"max_nodes": 2}, {}])
def test_c10d_with_a_meeting_point_keeps_torchs_meeting_and_gets_fresh_stores(changed: dict[str, Any]) -> None:
    handler = rendezvous_handler(_parameters(endpoint=f"localhost:{_free_port()}", is_host=True, **changed))
    assert isinstance(handler, FreshStoreRendezvous)
    assert handler.get_backend() == "c10d"
    assert handler.get_run_id() == "r1"
    handler.shutdown()


def test_a_static_job_of_several_nodes_meets_as_torch_has_it_and_gets_fresh_stores() -> None:
    handler = rendezvous_handler(
        _parameters(backend="static", endpoint="127.0.0.1:29500", rank=0, min_nodes=2, max_nodes=2)
    )
    assert isinstance(handler, StaticRendezvous)
    assert handler.get_backend() == "static"
    assert handler.get_run_id() == "r1"


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="no-such-backend"):
        rendezvous_handler(_parameters(backend="no-such-backend", max_nodes=2))


def test_a_job_of_one_node_without_an_etcd_is_local_where_nobody_named_one(caplog: pytest.LogCaptureFixture) -> None:
    ours = _parameters(backend="unicron", endpoint="")
    nobody = f"127.0.0.1:{_free_port()}"
    handler = unicron_handler(ours, nobody)
    assert caplog.messages == [f"No etcd is named, and nobody listens at {nobody}: this job of one node does without."]
    assert isinstance(handler, LocalRendezvous)
    assert handler.get_backend() == "unicron"
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "127.0.0.1"
    handler.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert isinstance(unicron_handler(ours, f"127.0.0.1:{server.getsockname()[1]}"), ClusterRendezvous)
    for more in ({"endpoint": nobody}, {"max_nodes": 2}, {"nodes": "1:2"}):
        assert isinstance(
            unicron_handler(_parameters(backend="unicron", **{"endpoint": "", **more}), nobody), ClusterRendezvous
        )


@pytest.mark.parametrize(("text", "nodes"), [("2:4", (2, 4)), ("3", (3, 3)), (None, (1, 1))])
def test_launchers_that_know_one_number_of_nodes_give_a_range_as_a_setting(
    text: str | None, nodes: tuple[int, int]
) -> None:
    assert nodes_of(_parameters(**({} if text is None else {"nodes": text}))) == nodes


@pytest.mark.parametrize("text", ["4:2", "0:1", "a:b", "1:2:3", "", ":", "-1:2"])
def test_what_is_no_range_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--rdzv-conf nodes must be MIN:MAX, as in 2:4, not "):
        nodes_of(_parameters(nodes=text))
