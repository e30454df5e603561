"""State comes from real processes, whatever happens to them on the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from state_source import make_state
from warm_launcher import WarmLaunchers

from unicron_elastic.state.layout import flatten, rebuild
from unicron_elastic.state.pull import transfer
from unicron_elastic.state.pull.chunks import CHUNK_BYTES
from unicron_elastic.state.pull.client import Pulled, SourcesLost, pull
from unicron_elastic.state.pull.read_memory import read_memory
from unicron_elastic.state.pull.server import Held, StateServer

Start = Callable[..., Any]
Steady = list[Any]
WORDS = 10 * CHUNK_BYTES // 8
CHUNK = CHUNK_BYTES


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """What is in the memory of tensors, which tells NaN from NaN."""
    return [bytes(t.reshape(-1).view(torch.uint8).tolist()) if t.numel() < 5000 else _sample(t) for t in tensors]


def _sample(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def get(addresses: Sequence[dict[str, Any]], seed: int = 0, words: int = WORDS, **options: Any) -> Pulled:
    """Pulls a state, compares it bit by bit with the one that the source made, and lets the sources go on."""
    pulled = pull(addresses, b"key", **{"step": 7, "timeout_s": 60.0, **options})
    pulled.release()
    layout, tensors = flatten(make_state(seed, words))
    assert pulled.layout == layout
    assert bits(pulled.tensors) == bits(tensors)
    assert pulled.step == 7
    assert sum(use.bytes for use in pulled.sources) >= layout.total_bytes
    return pulled


def ways(pulled: Pulled) -> set[str]:
    return {use.way for use in pulled.sources}


def test_a_source_on_this_host_is_read_from_memory(start_source: Start) -> None:
    source = start_source(words=WORDS)
    pulled = pull([source.address], b"key", step=7, timeout_s=60)
    assert ways(pulled) == {"memory"}
    assert rebuild(pulled.layout, pulled.tensors)["optimizer"]["lr"] == 0.1
    assert bits(pulled.tensors) == bits(flatten(make_state(0, WORDS))[1])
    assert source.line() == "held"
    pulled.release()
    pulled.release()
    assert source.line() == "released"


def test_a_source_elsewhere_sends_into_tensors_that_are_there(steady: Steady, relay: Start) -> None:
    source = steady[0]
    into = flatten(make_state(1, WORDS))[1]
    pulled = get([relay(source.address).address], into=into)
    assert ways(pulled) == {"TCP"}
    assert [a.data_ptr() for a in pulled.tensors] == [b.data_ptr() for b in into]


def test_memory_that_may_not_be_read_is_copied_by_the_source(steady: Steady) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    assert ways(get([steady[0].address], read_memory=refuse)) == {"shared memory"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_memory_is_copied_by_the_source(steady: Steady) -> None:
    source = steady[0]
    code = (
        "import os, sys, json; from unicron_elastic.state.pull.client import pull; os.setgid(65534); os.setuid(65534);"
        "p = pull([json.loads(sys.argv[1])], b'key', step=7, timeout_s=60); print(*{use.way for use in p.sources})"
    )
    argv = [sys.executable, "-c", code, json.dumps(source.address)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, cwd=Path(__file__).parent)
    assert done.stdout.strip() == "shared memory", done.stderr


def test_a_killed_source_is_replaced_and_only_what_is_missing_is_fetched(start_source: Start, relay: Start) -> None:
    sources = [start_source(words=WORDS) for _ in range(2)]
    dying = relay(sources[0].address, stop_at=3 * CHUNK)
    waiting = relay(sources[1].address, stop_at=2 * CHUNK)

    def kill() -> None:
        assert dying.stopped.wait(30)
        assert waiting.stopped.wait(30)
        sources[0].kill()
        dying.go_on.set()
        waiting.go_on.set()

    killer = threading.Thread(target=kill)
    killer.start()
    pulled = get([dying.address, waiting.address])
    killer.join()
    assert any("was lost" in note for note in pulled.notes)
    # The lost source's finished chunks were kept.
    assert {use.name: use.bytes >= CHUNK for use in pulled.sources}.keys() == {
        f"{one.address['host']} (process {one.address['pid']})" for one in sources
    }
    assert waiting.passed < 9 * CHUNK  # not all ten


def test_a_killed_source_on_this_host_is_replaced(start_source: Start) -> None:
    sources = [start_source(words=WORDS) for _ in range(2)]
    victim = sources[0]
    pid = victim.address["pid"]
    reads: list[int] = []
    is_killed = threading.Event()

    def read(which: int, parts: Any) -> None:
        if which != pid:
            assert is_killed.wait(30), "the other source is not read at all"  # else this one may send everything
        else:
            reads.append(1)
            if len(reads) == 20:
                victim.kill()
                is_killed.set()
        read_memory(which, parts)

    pulled = get([source.address for source in sources], read_memory=read)
    assert len(reads) >= 20
    assert any(f"process {pid}) was lost" in note for note in pulled.notes)


def test_the_loss_of_the_only_source_says_what_happened(start_source: Start, relay: Start) -> None:
    source = start_source(words=WORDS)
    dying = relay(source.address, stop_at=2 * CHUNK)

    def kill() -> None:
        assert dying.stopped.wait(30)
        source.kill()
        dying.go_on.set()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SourcesLost, match=rf"\(process {source.address['pid']}\) was lost: "):
        get([dying.address])
    killer.join()


def test_a_changed_bit_is_noticed_and_the_chunk_comes_from_another_source(steady: Steady, relay: Start) -> None:
    sources = steady
    changing = relay(sources[0].address, flip_at=(CHUNK // 2,))
    pulled = get([changing.address, relay(sources[1].address).address])
    assert sum("wrong checksum" in note for note in pulled.notes) == 1


def test_a_source_that_changes_every_chunk_is_let_go(steady: Steady, relay: Start) -> None:
    changing = relay(steady[0].address, flip_at=tuple(range(CHUNK // 4, 12 * CHUNK, CHUNK // 4)))
    with pytest.raises(SourcesLost, match=f"sent {transfer.WRONG_MAX} chunks with a wrong checksum"):
        get([changing.address])


def test_what_was_read_wrong_from_memory_is_read_again(steady: Steady) -> None:
    reads: list[int] = []

    def read(pid: int, parts: Any) -> None:
        read_memory(pid, parts)
        reads.append(1)
        if len(reads) == 5:
            parts[0][1][10] ^= 1

    source = steady[0]
    assert sum("wrong checksum" in note for note in get([source.address], read_memory=read).notes) == 1


def test_another_key_is_refused(steady: Steady) -> None:
    source = steady[0]
    with pytest.raises(SourcesLost, match="the key of the state server is another one"):
        pull([source.address], b"another", step=7, timeout_s=20)
    get([source.address])


def test_a_server_that_does_not_know_the_key_is_not_believed(steady: Steady) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = {**steady[0].address, "boot_id": "other", "tcp": list(listener.getsockname())}

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            for told in (b'{"version":2,"nonce":"00"}', b'{"proof":"00"}'):
                connection.sendall(len(told).to_bytes(4, "big") + told)
            connection.recv(1000)

    threading.Thread(target=pretend, daemon=True).start()
    with listener, pytest.raises(SourcesLost, match="does not know the key"):
        pull([address], b"key", step=7, timeout_s=20)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\xff" * 5000, b""])
def test_garbage_closes_its_connection_and_nothing_else(steady: Steady, garbage: bytes) -> None:
    source = steady[0]
    with socket.create_connection(source.address["tcp"], timeout=30) as connection:
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            pass  # it was reset, with what it had not read
    get([source.address])


def test_a_source_of_another_step_is_left_out(start_source: Start) -> None:
    old, new = start_source(step=6, seed=3), start_source(step=7)
    pulled = get([old.address, new.address], words=1000)
    assert len(pulled.sources) == 1
    assert get([old.address, new.address], words=1000, step=None).step == 7
    with pytest.raises(SourcesLost, match=r"holds the state of step 6, not of step 8; .* step 7, not of step 8"):
        pull([old.address, new.address], b"key", step=8, timeout_s=20)


def test_a_source_of_another_layout_is_left_out(start_source: Start) -> None:
    addresses = [start_source(extra=extra).address for extra in (0, 0, 5)]
    pulled = get([addresses[2], *addresses[:2]], words=1000, step=None)
    assert any("another layout" in note for note in pulled.notes)


def test_a_state_that_does_not_come_to_rest_is_said(start_source: Start) -> None:
    source = start_source(refusal="rank 3 is in its forward pass")
    with pytest.raises(SourcesLost, match="rank 3 is in its forward pass"):
        pull([source.address], b"key", timeout_s=20)


def test_tensors_of_another_shape_cannot_receive(steady: Steady) -> None:
    source = steady[0]
    with pytest.raises(ValueError, match="the layout has 304 tensors, and 0 were given"):
        pull([source.address], b"key", step=7, into=[])


def test_a_slow_source_does_not_hold_up_a_fast_one(steady: Steady, relay: Start) -> None:
    slow = relay(steady[0].address, bytes_per_s=1e6)
    pulled = get([slow.address, relay(steady[1].address).address])
    assert slow.passed < 3 * CHUNK
    assert pulled.took_s < 20  # the slow one alone takes 40 s


def test_what_comes_late_and_wrong_does_not_reach_the_state(steady: Steady, relay: Start) -> None:
    late = relay(steady[0].address, stop_at=CHUNK // 2, flip_at=tuple(range(CHUNK // 2, 3 * CHUNK, 4096)))
    pulled = pull([late.address, relay(steady[1].address).address], b"key", step=7, timeout_s=60)
    assert late.stopped.is_set()
    late.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "unicron-lane":
            thread.join(30)
            assert not thread.is_alive()
    assert late.passed > CHUNK
    assert bits(pulled.tensors) == bits(flatten(make_state(0, WORDS))[1])
    pulled.release()


def test_a_silent_source_is_lost(steady: Steady, relay: Start) -> None:
    silent = relay(steady[0].address, stop_at=CHUNK)
    with pytest.raises(SourcesLost, match="silent for"):
        get([silent.address], stall_s=0.3)


def test_what_takes_too_long_is_given_up(steady: Steady, relay: Start) -> None:
    slow = relay(steady[0].address, bytes_per_s=1e6)
    with pytest.raises(TimeoutError, match=r"was not here after 1 s"):
        get([slow.address], timeout_s=1.0)


def test_nobody_there() -> None:
    with pytest.raises(SourcesLost, match="no source"):
        pull([], b"key")
    with pytest.raises(ValueError, match="needs pid"):
        pull([{"host": "a", "boot_id": "", "unix": "", "rack": "", "kind": "replica"}], b"key")


def test_a_client_that_dies_releases_its_hold(
    start_source: Start, tmp_path: Path, warm_launchers: WarmLaunchers
) -> None:
    source = start_source()
    client = tmp_path / "client.py"
    client.write_text(
        "import os, sys, json; from unicron_elastic.state.pull.client import pull;"
        "pull([json.loads(sys.argv[1])], b'key', timeout_s=60); os.kill(os.getpid(), 9)"
    )
    assert warm_launchers.script(client, json.dumps(source.address)).returncode == -9
    assert source.line() == "held"
    assert source.line() == "released"


class Fixed:
    """Holds what it was given."""

    def __init__(self, state: Any) -> None:
        self._held = Held(0, *flatten(state))

    def hold(self) -> Held:
        return self._held

    def release(self, held: Held) -> None:
        pass


@pytest.mark.parametrize("state", [{}, {"a": None}, {"e": torch.empty(0, 3)}, torch.tensor(2.5, dtype=torch.bfloat16)])
@pytest.mark.parametrize("far", ["", "elsewhere"])
def test_small_states(state: Any, far: str) -> None:
    server = StateServer(Fixed(state), b"key")
    try:
        address = {**server.address, **({"boot_id": far} if far else {})}
        pulled = pull([address], b"key", timeout_s=20)
        layout, tensors = flatten(state)
        assert (pulled.layout, bits(pulled.tensors)) == (layout, bits(tensors))
        pulled.release()
    finally:
        server.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("far", ["", "elsewhere"])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_state_of_a_gpu(devices: tuple[str, str], far: str) -> None:
    state = make_state(0, WORDS)["model"]
    there = {name: tensor.to(devices[0]) for name, tensor in state.items()}
    server = StateServer(Fixed(there), b"key")
    try:
        address = {**server.address, **({"boot_id": far} if far else {})}
        pulled = pull([address], b"key", timeout_s=60, device=devices[1])
        assert {tensor.device.type for tensor in pulled.tensors} == {devices[1]}
        assert bits([tensor.cpu() for tensor in pulled.tensors]) == bits(flatten(state)[1])
        pulled.release()
    finally:
        server.close()
