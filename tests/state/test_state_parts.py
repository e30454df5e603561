"""The small parts of state transfer: distances, choices, chunks, checksums and frames."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.state.checksum import PIECE_BYTES, Checksum
from unicron_elastic.state.pull.chunks import SEGMENTS_MAX, Chunks
from unicron_elastic.state.pull.distance import Address, Distance, distance, nearest_first, stripe
from unicron_elastic.state.pull.memory import TensorMemory
from unicron_elastic.state.pull.offer import Offer, choose, why_not
from unicron_elastic.state.pull.wire import Gone, PullWireError, Stream, greet_client, greet_server

HERE = Address("a", "boot", 1, ("a", 1), "name", "rack")
OTHERS = {
    Distance.OTHER_HOST: Address("b", "boot", 1, ("b", 1), "name", "rack-2"),
    Distance.SAME_RACK: Address("c", "boot-c", 1, ("c", 1), "name", "rack"),
    Distance.SNAPSHOT: Address("a", "boot", 2, ("a", 1), "name", "rack", "snapshot"),
    Distance.SAME_HOST: Address("a", "boot", 3, ("a", 1), "name", "rack-2"),
}


def test_the_nearest_is_asked_first() -> None:
    assert {far: distance(HERE, other) for far, other in OTHERS.items()} == {far: far for far in OTHERS}
    assert nearest_first(HERE, list(OTHERS.values())) == [3, 2, 1, 0]


def test_no_rack_is_no_rack_in_common() -> None:
    bare = Address("a", "boot", 1, ("a", 1), "name")
    assert distance(bare, Address("b", "boot-b", 1, ("b", 1), "name")) == Distance.OTHER_HOST


@given(st.integers(0, 1000), st.integers(1, 9))
def test_stripes_are_all_and_equal(total: int, sources: int) -> None:
    parts = stripe(total, sources)
    assert [chunk for part in parts for chunk in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_nobody_to_stripe_over() -> None:
    with pytest.raises(ValueError, match="0 sources"):
        stripe(3, 0)


def test_an_address_comes_back() -> None:
    assert Address.parse(json.loads(json.dumps(HERE.to_dict()))) == HERE


parts_of_addresses = (
    st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers() | st.text(max_size=3), max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(list(HERE.to_dict())), parts_of_addresses))
def test_whatever_is_told_is_an_address_or_a_value_error(changes: dict[str, Any]) -> None:
    try:
        parsed = Address.parse({**HERE.to_dict(), **changes})
    except ValueError:
        return
    assert Address.parse(parsed.to_dict()) == parsed


def test_the_newest_state_that_most_hold_is_chosen() -> None:
    old, new, odd = Offer(6, "x", 1), Offer(7, "x", 1), Offer(7, "y", 1)
    assert choose({0: old, 1: odd, 2: new, 3: new}, None) == new
    assert choose({0: odd, 1: new}, None) == odd
    assert choose({0: odd, 1: old}, 6) == old
    assert choose({0: odd}, 6) is None
    assert choose({}, None) is None
    assert why_not(old, new) == "holds the state of step 6, not of step 7"
    assert why_not(odd, new) == "holds a state of another layout"
    assert why_not(new, new) == ""


sizes = st.lists(st.sampled_from([0, 1, 4, 63, 64, 65, 1000, 5000]), max_size=200)


@settings(max_examples=200, deadline=None)
@given(sizes, st.sampled_from([64, 128, 1024, 65536]))
def test_every_byte_is_in_one_chunk(sizes: list[int], chunk_bytes: int) -> None:
    chunks = Chunks(sizes, chunk_bytes)
    seen = [bytearray(size) for size in sizes]
    for chunk in range(chunks.count):
        segments = chunks.segments(chunk)
        runs = chunks.runs(chunk, segments)
        assert segments
        for segment in segments:
            assert segment.at % 64 == segment.start % 64 == 0
            for place in range(segment.start, segment.start + segment.bytes):
                seen[segment.tensor][place] += 1
            assert any(run.at <= segment.at and segment.at + segment.bytes <= run.at + run.bytes for run in runs)
        assert runs[-1].at + runs[-1].bytes <= chunks.bytes_of(chunk) <= chunk_bytes
        assert (len(runs) == 1) or len(runs) <= SEGMENTS_MAX
    assert all(set(counts) <= {1} for counts in seen)


def test_a_crowded_chunk_goes_through_a_block_and_back() -> None:
    tensors = [torch.full((1 + n % 7,), n, dtype=torch.uint8) for n in range(SEGMENTS_MAX + 1)]
    chunks = Chunks([tensor.nbytes for tensor in tensors])
    segments = chunks.segments(0)
    source, made = TensorMemory(tensors, chunks), [torch.zeros_like(tensor) for tensor in tensors]
    target = TensorMemory(made, chunks)
    block = source.block()
    block.view[:] = b"\xff" * len(block.view)
    assert source.views(chunks.runs(0, segments), segments) is None
    source.gather(segments, block.view)
    target.scatter(segments, block.view)
    assert all(torch.equal(a, b) for a, b in zip(made, tensors, strict=True))
    assert block.view[1:64] == bytes(63)  # what is between tensors is always the same


ROW_BYTES = PIECE_BYTES // 63  # what moves by so much within a piece is not seen


def digest(data: bytearray) -> bytes:
    checksum = Checksum()
    checksum.add(memoryview(data))
    return checksum.digest()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_changed_bit_and_any_two_words_swapped_change_the_checksum(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 7, 8, 4096, 16384, 16385, 100_000, PIECE_BYTES, PIECE_BYTES + 20_001]))
    content = bytearray(random.Random(data.draw(st.integers(0, 9))).randbytes(size))
    before = digest(content)
    place = data.draw(st.integers(0, size - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(content) != before
    width = data.draw(st.sampled_from([1, 4, 8, 4096]))
    if size >= 2 * width:
        content[:width], original = (value := bytearray(content[:width])), digest(content)
        other = data.draw(st.integers(1, size // width - 1).filter(lambda n: n * width % ROW_BYTES)) * width
        content[:width], content[other : other + width] = content[other : other + width], value
        assert (digest(content) == original) == (content[:width] == content[other : other + width])


def test_words_of_which_only_the_signs_differ_are_told_apart_when_swapped() -> None:
    numbers = (ctypes.c_double * 8192)(*([1.0] * 8192))
    numbers[0] = -1.0
    view = bytearray(numbers)
    before = digest(view)
    view[:8], view[4096:4104] = view[4096:4104], view[:8]
    assert digest(view) != before


def test_a_missing_end_changes_the_checksum() -> None:
    assert digest(bytearray(5)) != digest(bytearray(4))


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    one, other = (Stream(end, 5.0) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def greet(one: Stream, other: Stream, keys: tuple[bytes, bytes]) -> list[str]:
    """What the server and the client complain of when they greet each other."""
    complaints = ["", ""]

    def serve() -> None:
        try:
            greet_client(one, keys[0])
        except (PullWireError, Gone) as error:
            complaints[0] = str(error)

    server = threading.Thread(target=serve)
    server.start()
    try:
        greet_server(other, keys[1])
    except (PullWireError, Gone) as error:
        complaints[1] = str(error)
    server.join()
    return complaints


def test_who_knows_the_key_is_let_in(pair: tuple[Stream, Stream]) -> None:
    assert greet(*pair, (b"key", b"key")) == ["", ""]


def test_who_does_not_know_the_key_is_not(pair: tuple[Stream, Stream]) -> None:
    server, client = greet(*pair, (b"key", b"another"))
    assert server == "the other side does not know the key"
    assert client == "the key of the state server is another one"


def test_a_frame_that_comes_a_second_time_is_refused(pair: tuple[Stream, Stream]) -> None:
    server, client = pair
    assert greet(server, client, (b"key", b"key")) == ["", ""]
    client.send_frame({"do": "hold"})
    assert server.receive_frame() == {"do": "hold"}
    assert client.seal is not None
    body = b'{"do":"layout"}'
    sent = len(body).to_bytes(4, "big") + body + client.seal.of(body)
    client.send(sent)
    assert server.receive_frame() == {"do": "layout"}
    client.send(sent)  # again
    with pytest.raises(PullWireError, match="a frame that the other side has not sent at this point"):
        server.receive_frame()


def test_a_frame_that_was_changed_on_the_way_is_refused(pair: tuple[Stream, Stream]) -> None:
    server, client = pair
    assert greet(server, client, (b"key", b"key")) == ["", ""]
    assert server.seal is not None
    body = b'{"step":1}'
    server.send(len(body).to_bytes(4, "big") + body.replace(b"1", b"2") + server.seal.of(body))
    with pytest.raises(PullWireError, match="a frame that the other side has not sent at this point"):
        client.receive_frame()


def test_a_client_that_hands_back_what_a_server_said_is_not_let_in(pair: tuple[Stream, Stream]) -> None:
    server, client = pair
    complaints = []

    def serve() -> None:
        try:
            greet_client(server, b"key")
        except PullWireError as error:
            complaints.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    nonce = client.receive_frame()["nonce"]
    # The proof that a server would give for the same two texts.
    proof = hmac.new(b"key", json.dumps(["server", nonce, nonce]).encode(), hashlib.sha256).hexdigest()
    client.send_frame({"nonce": nonce, "proof": proof})
    assert "refused" in client.receive_frame()
    thread.join()
    assert complaints == ["the other side does not know the key"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_whatever_is_sent_is_a_frame_or_a_complaint(data: bytes) -> None:
    one, other = (Stream(end, 5.0) for end in socket.socketpair())
    try:
        one.send(data)
        one.close()
        with pytest.raises((PullWireError, Gone)):  # in the end it is over
            all(isinstance(other.receive_frame(50), dict) for _ in range(100))
    finally:
        other.close()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(pair: tuple[Stream, Stream]) -> None:
    one, other = pair
    one.send_frame({"a": "b" * 100})
    with pytest.raises(PullWireError, match="a frame of 108 bytes where at most 50 may come"):
        other.receive_frame(50)


def test_silence_is_noticed(pair: tuple[Stream, Stream]) -> None:
    one, _ = pair
    one.patience_s = 0.05
    with pytest.raises(Gone, match=r"silent for 0\.05 s"):
        one.receive_frame()
