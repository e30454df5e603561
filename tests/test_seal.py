"""The seal of a connection: what was said, once, in its order, by the other end, and nothing else."""

from __future__ import annotations

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.base.seal import SEAL_BYTES, Seal

SECRET, THROWN = b"secret", ("one", "other")


def ends(secret: bytes = SECRET, *thrown: str) -> tuple[Seal, Seal]:
    """The server's and the client's."""
    thrown = thrown or THROWN
    return Seal(secret, *thrown, is_server=True), Seal(secret, *thrown, is_server=False)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), max_size=20))
def test_each_end_takes_what_the_other_says_however_they_take_turns(said: list[tuple[bool, bytes]]) -> None:
    server, client = ends()
    for is_server, message in said:
        sender, receiver = (server, client) if is_server else (client, server)
        seal = sender.of(message)
        assert len(seal) == SEAL_BYTES
        assert receiver.fits(message, seal)


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=5), st.data())
def test_what_is_not_the_next_message_of_the_other_end_fits_not(messages: list[bytes], data: st.DataObject) -> None:
    server, client = ends()
    sealed = [(message, client.of(message)) for message in messages]
    order = data.draw(st.lists(st.sampled_from(range(len(sealed))), max_size=8))
    taken = [server.fits(*sealed[number]) for number in order]
    assert taken == [order[: place + 1] == list(range(place + 1)) for place in range(len(order))]


def test_a_seal_is_of_one_connection_one_secret_and_one_direction() -> None:
    server, client = ends()
    seal = client.of(b"hello")
    assert not client.fits(b"hello", seal), "it came back to who had said it"
    for other, _ in (ends(b"another"), ends(SECRET, "one", "another"), ends(SECRET, "other", "one")):
        assert not other.fits(b"hello", seal)
    assert server.fits(b"hello", seal)


def test_texts_that_are_cut_elsewhere_make_other_keys() -> None:
    assert not ends(SECRET, "ab", "c")[0].fits(b"hello", ends(SECRET, "a", "bc")[1].of(b"hello"))


def test_it_is_the_hmac_that_the_docstring_says() -> None:
    """Written out once more, so that another implementation can be held against it."""
    key = hmac.new(SECRET, b'["seal", "c", "one", "other"]', hashlib.sha256).digest()
    expected = hmac.new(key, b"\0\0\0\0\0\0\0\1" + b"hello", hashlib.sha256).digest()[:16]
    assert ends()[1].of(b"hello") == expected
