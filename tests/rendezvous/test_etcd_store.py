"""The store on etcd when servers freeze, die, come back, move or want a password."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cable import Cable
from free_port import free_port
from store_lab import BINARY, BLIND_AFTER_S, DEADLINE_S, Told, compact, hold, wait_until

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import (
    Blind,
    Changes,
    Put,
    Replaced,
    Sighted,
    StoreError,
    StoreReplacedError,
    StoreUnclearError,
    StoreUnreachableError,
)
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd, find_binary


@pytest.fixture
def store(server: EmbeddedEtcd) -> Iterator[EtcdStore]:
    """A store on that server."""
    with _open(server.endpoint) as opened:
        yield opened


def _open(endpoints: str | list[str], namespace: str = "/unicron/test", **options: float) -> EtcdStore:
    return EtcdStore(StoreAddress.parse(endpoints), namespace, **{"blind_after_s": BLIND_AFTER_S, **options})


def _kill(server: EmbeddedEtcd) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running)


def _again(server: EmbeddedEtcd, data_dir: Path | None) -> EmbeddedEtcd:
    """Another server for the same port."""
    return EmbeddedEtcd(data_dir=data_dir, port=server.port, binary=BINARY)


def test_no_call_outlasts_its_deadline_when_the_server_freezes(server: EmbeddedEtcd, store: EtcdStore) -> None:
    store.put("a", b"1")
    lease = store.grant(60)
    hold(server)
    for call, error in (
        (lambda: store.put("a", b"2", timeout_s=0.2), StoreUnclearError),  # it was sent
        (lambda: store.put("a", b"2", timeout_s=0.2), StoreUnreachableError),  # it was not: the server proves nothing
        (lambda: store.read("a", timeout_s=0.2), StoreUnreachableError),
        (lambda: store.keep_alive(lease.lease_id, timeout_s=0.2), StoreUnreachableError),
        (lambda: store.grant(5, timeout_s=0.2), StoreUnreachableError),
    ):
        began = time.monotonic()
        with pytest.raises(error, match=rf"etcd at {server.endpoint} did not answer within 0.2 s"):
            call()
        assert time.monotonic() - began < 1.0
    os.kill(server.pid, signal.SIGCONT)
    assert store.read("a").entry is not None
    store.put("b", b"")


def test_a_watch_survives_a_kill_of_the_server_and_its_return(server: EmbeddedEtcd, store: EtcdStore) -> None:
    told = Told()
    store.put("a", b"1")
    store.watch(store.read_prefix(""), told)
    store.put("b", b"2")
    told.wait_for(Changes)
    _kill(server)
    told.wait_for(Blind)
    with pytest.raises(StoreUnreachableError, match=r"refuses connections: no server runs there$"):
        store.read("a")
    with _again(server, server.data_dir) as again, _open(again.endpoint) as other:
        other.put("c", b"3")
        told.wait_for(Sighted)
        store.put("d", b"4")
        told.wait(lambda: "d" in told.keys)
    assert told.keys == ["b", "c", "d"]


def test_a_server_that_returns_empty_and_runs_ahead_is_found_out(server: EmbeddedEtcd, store: EtcdStore) -> None:
    told = Told()
    store.put("a", b"1")
    revision = store.read("a").revision
    store.watch(store.read_prefix(""), told)
    _kill(server)
    told.wait_for(Blind)
    with _again(server, None) as again, _open(again.endpoint) as other:
        while other.put("a", b"other") <= revision + 10:
            pass
        told.wait_for(Replaced)
        for call in (lambda: store.read("a"), lambda: store.put("a", b""), lambda: store.create("c", b"")):
            with pytest.raises(StoreReplacedError, match="is no longer the store that it was"):
                call()
        assert other.read("c").entry is None
    assert [type(item) for item in told.items] == [Blind, Replaced]


def test_a_write_never_reaches_a_store_that_replaced_the_known_one(server: EmbeddedEtcd, store: EtcdStore) -> None:
    """No watch and no failed call has noticed the change: the write itself is the first to come."""
    store.put("a", b"1")
    _kill(server)
    with _again(server, None) as again, _open(again.endpoint) as other:
        other.put("x", b"")
        with pytest.raises(StoreError):
            store.put("leader", b"old")
        with pytest.raises(StoreReplacedError, match="another store answers in its place"):
            store.put("leader", b"old")
        assert other.read("leader").entry is None


def test_an_old_backup_is_found_out(server: EmbeddedEtcd, store: EtcdStore, tmp_path: Path) -> None:
    store.put("a", b"1")
    server.stop()
    shutil.copytree(server.data_dir, tmp_path / "backup")
    with _again(server, server.data_dir):
        wait_until(lambda: store.try_put("a", b"2"))
        store.put("a", b"3")
    with _again(server, tmp_path / "backup"), pytest.raises(StoreReplacedError, match=r"went back from revision"):
        store.read("a")


def test_history_lost_while_the_server_was_away_is_summed_up(server: EmbeddedEtcd, store: EtcdStore) -> None:
    told = Told()
    store.put("a", b"1")
    store.put("b", b"1")
    store.watch(store.read_prefix(""), told)
    _kill(server)
    told.wait_for(Blind)
    cable = Cable(server.port)  # keeps the watch away until all is done
    with _again(server, server.data_dir) as again, _open(f"http://127.0.0.1:{cable.port}") as other:
        os.kill(again.pid, signal.SIGCONT)
        for number in range(5):
            other.put("a", b"%d" % number)
        other.delete("b")
        compact(again.port, other.read("a").revision)
        told.wait_for(Sighted)
        wait_until(lambda: told.keys and told.keys[-1] == "b")
        assert other.read("b").entry is None
    cable.end()
    assert [change.entry.value for change in told.changes if change.entry is not None][-1] == b"4"


def test_the_first_endpoint_may_be_dead(server: EmbeddedEtcd) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with _open([dead, server.endpoint]) as store:
        began = time.monotonic()
        store.put("a", b"1")
        assert time.monotonic() - began < 1.0
    with (
        _open([dead, f"http://127.0.0.1:{free_port()}"]) as store,
        pytest.raises(
            StoreUnreachableError, match=r"no etcd server can be used: etcd at .* refuses .*; etcd at .* refuses"
        ),
    ):
        store.put("a", b"1")


def test_reads_and_watches_move_to_another_endpoint(server: EmbeddedEtcd) -> None:
    told, cables = Told(), [Cable(server.port), Cable(server.port)]
    with _open([f"http://127.0.0.1:{cable.port}" for cable in cables], timeout_s=2.0) as store:
        store.put("a", b"1")
        store.watch(store.read_prefix(""), told)
        store.put("b", b"2")
        told.wait_for(Changes)
        cables[0].silence()
        assert store.read("a").entry is not None
        told.wait_for(Sighted)
        store.put("c", b"3")
        told.wait(lambda: "c" in told.keys)
        cables[0].mend()
        cables[1].cut()
        told.wait_for(Sighted, 2)
        store.put("d", b"4")
        told.wait(lambda: "d" in told.keys)
    for cable in cables:
        cable.end()
    assert told.keys == ["b", "c", "d"]


def test_a_cluster_without_a_quorum_says_so(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(4)]
    peers = ",".join(f"n{number}=http://127.0.0.1:{ports[number]}" for number in range(2))
    members = []
    for number in range(2):
        client, peer = f"http://127.0.0.1:{ports[number + 2]}", f"http://127.0.0.1:{ports[number]}"
        flags = [f"--name=n{number}", f"--data-dir={tmp_path / str(number)}", f"--initial-cluster={peers}"]
        flags += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--unsafe-no-fsync"]
        flags += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        flags += ["--heartbeat-interval=20", "--election-timeout=200"]
        members.append(subprocess.Popen([BINARY or find_binary(), *flags], stderr=subprocess.DEVNULL))
    try:
        with _open(f"http://127.0.0.1:{ports[2]}") as store:
            wait_until(lambda: store.try_put("a", b"1"))
            told = Told()
            store.watch(store.read_prefix(""), told)
            members[1].kill()
            blind = told.wait_for(Blind)
            assert isinstance(blind, Blind)
            wait_until(lambda: _trouble(store).endswith("too few servers of the cluster reach each other"))
    finally:
        for member in members:
            member.kill()
            member.wait(DEADLINE_S)


def _trouble(store: EtcdStore) -> str:
    try:
        store.put("b", b"", timeout_s=0.5)
    except StoreError as error:
        return str(error)
    return ""


def test_the_unclear_write_can_be_looked_up(server: EmbeddedEtcd, store: EtcdStore) -> None:
    revision = store.put("a", b"1")
    hold(server)
    with pytest.raises(StoreUnclearError, match="so that a write may have been done or not"):
        store.commit({"a": revision}, [Put("a", b"2")], timeout_s=0.2)
    os.kill(server.pid, signal.SIGCONT)
    entry = store.read("a").entry
    assert entry is not None
    assert entry.value in (b"1", b"2")


def test_many_threads_share_a_store(shared_etcd: EmbeddedEtcd) -> None:
    def count(number: int) -> None:
        for _ in range(number):
            while True:
                reading = store.read("counter")
                value, revision = (
                    (0, 0) if reading.entry is None else (int(reading.entry.value), reading.entry.revision)
                )
                if store.compare_and_set("counter", b"%d" % (value + 1), revision) is not None:
                    break

    told = Told()
    with _open(shared_etcd.endpoint, "/unicron/threads") as store, ThreadPoolExecutor(4) as pool:
        store.watch(store.read_prefix(""), told)
        list(pool.map(count, [25] * 4))
        told.wait(lambda: len(told.changes) == 100)
    assert [int(change.entry.value) for change in told.changes if change.entry is not None] == list(range(1, 101))


def test_a_proxy_for_downloads_is_not_used(server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with _open(server.endpoint) as store:
        store.put("a", b"1")


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    head = """
        import os, sys, threading, time
        from unicron_elastic.rendezvous.store.address import StoreAddress
        from unicron_elastic.rendezvous.store.etcd import EtcdStore
        from unicron_elastic.rendezvous.store.interface import Changes, StoreClosedError
        store = EtcdStore(StoreAddress.parse(sys.argv[1]))
        store.put("a", b"1")
        told = threading.Event()
        watch = store.watch(store.read_prefix(""), lambda item: told.set())
        store.put("a", b"2")
        assert told.wait(20)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_no_thread_keeps_the_interpreter_from_exiting(shared_etcd: EmbeddedEtcd) -> None:
    done = _run("print('end of main')", shared_etcd.endpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of main\n", "")


def test_a_forked_child_is_told_and_ends_and_its_parent_goes_on(shared_etcd: EmbeddedEtcd) -> None:
    code = """
        child = os.fork()
        if child == 0:
            for use in (lambda: store.read("a"), lambda: EtcdStore(StoreAddress.parse(sys.argv[1])).read("a")):
                try:
                    use()
                except StoreClosedError as error:
                    assert "gRPC cannot be used after a fork" in str(error)
                else:
                    raise AssertionError("the call was made")
            watch.close()
            store.close()
            del store, watch
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        told.clear()
        store.put("a", b"3")
        assert told.wait(20)
        idle = os.fork()
        if idle == 0:
            sys.exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(idle, 0)[1]) == 8
        assert store.read("a").entry.value == b"3"
        print("well")
    """
    done = _run(code, shared_etcd.endpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


@pytest.mark.parametrize("missing", ["grpc", "pyetcd", "google.protobuf"])
def test_without_the_extra_one_sentence_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import unicron_elastic.rendezvous.store.etcd"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("unicron_elastic.base.extras.Unusable: the Python module ")
    assert last.endswith("is missing; install it, in the checkout of unicron-elastic: pip install -e '.[cluster]'")
