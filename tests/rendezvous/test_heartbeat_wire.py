"""What goes over a heartbeat connection: only who knows the secret gets in, and whatever comes is at worst refused."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.rendezvous.cluster.heartbeat_wire import (
    BEAT,
    LINE_BYTES_MAX,
    Hello,
    Lines,
    Nonces,
    WireError,
    challenge,
    line,
    read,
    read_sealed,
    read_welcome,
    seal_of,
    sealed_line,
    welcome,
)

SECRET = "5e" * 32
HELLO = Hello("one/1", "one", "job")
NONCES = Nonces("c", "n")
NAMES = st.text(max_size=300)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TOLD = st.dictionaries(
    st.sampled_from(("node", "host", "job", "nonce", "proof", "beat_s", "refused", "fault")) | st.text(max_size=5),
    VALUES | st.text(min_size=64, max_size=64),
)


def greet(secret_of_agent: str, secret_of_coordinator: str, hello: Hello = HELLO) -> tuple[Hello, float]:
    """The whole greeting: whom the coordinator sees, and the interval that the agent is told."""
    challenged, coordinator_nonce = challenge()
    said, theirs = hello.line(secret_of_agent, read(challenged))
    seen, ours = Hello.parse(read(said), secret_of_coordinator, coordinator_nonce)
    return seen, read_welcome(read(welcome(secret_of_coordinator, ours, 0.25)), secret_of_agent, theirs)


def only_wire_errors(told: Iterable[bytes]) -> None:
    """Reads lines as both sides do; whatever else than WireError comes out fails the test."""
    for text in told:
        for side in (
            lambda said: Hello.parse(said, SECRET, "n"),
            lambda said: HELLO.line(SECRET, said),
            lambda said: read_welcome(said, SECRET, NONCES),
        ):
            with contextlib.suppress(WireError):
                side(read(text))


def test_both_know_the_secret() -> None:
    assert greet(SECRET, SECRET) == (HELLO, 0.25)


@given(NAMES, NAMES, NAMES)
def test_whatever_they_are_called(node_id: str, host: str, job: str) -> None:
    hello = Hello(node_id, host, job)
    assert greet(SECRET, SECRET, hello)[0] == hello


@pytest.mark.parametrize(("agent", "coordinator"), [("", SECRET), (SECRET, ""), (SECRET, SECRET.upper())])
def test_an_agent_without_the_secret_is_refused(agent: str, coordinator: str) -> None:
    with pytest.raises(WireError, match="the other side does not know the cluster's secret"):
        greet(agent, coordinator)


def test_a_coordinator_without_the_secret_is_refused() -> None:
    _, nonces = HELLO.line(SECRET, {"nonce": "n"})
    with pytest.raises(WireError, match="the coordinator does not know"):
        read_welcome(read(welcome("another", nonces, 0.1)), SECRET, nonces)


def test_a_greeting_is_of_no_use_a_second_time() -> None:
    first, first_nonce = challenge()
    said, nonces = HELLO.line(SECRET, read(first))
    welcomed = welcome(SECRET, nonces, 0.1)
    _, second_nonce = challenge()
    with pytest.raises(WireError, match="does not know"):
        Hello.parse(read(said), SECRET, second_nonce)
    _, another = HELLO.line(SECRET, read(first))
    with pytest.raises(WireError, match="does not know"):
        read_welcome(read(welcomed), SECRET, another)
    with pytest.raises(WireError, match="does not know"):
        read_welcome(read(welcomed), SECRET, nonces._replace(coordinator=second_nonce))
    assert len({first_nonce, second_nonce, nonces.agent, another.agent}) == 4


@pytest.mark.parametrize("field", ["node", "host", "job", "nonce"])
def test_what_was_changed_on_the_way_is_refused(field: str) -> None:
    challenged, coordinator_nonce = challenge()
    told = dict(read(HELLO.line(SECRET, read(challenged))[0]))
    with pytest.raises(WireError, match="does not know"):
        Hello.parse({**told, field: told[field] + "x"}, SECRET, coordinator_nonce)


def test_a_proof_of_one_side_is_none_for_the_other() -> None:
    """Else an agent would be let in with the answer to its own question."""
    proof = read(welcome(SECRET, NONCES, 0.1))["proof"]
    told = {"node": "", "host": "", "job": "", "nonce": NONCES.agent, "proof": proof}
    with pytest.raises(WireError, match="does not know"):
        Hello.parse(told, SECRET, NONCES.coordinator)


def test_texts_that_are_cut_elsewhere_make_another_proof() -> None:
    told = dict(read(Hello("ab", "c", "d").line(SECRET, {"nonce": "n"})[0]))
    with pytest.raises(WireError, match="does not know"):
        Hello.parse({**told, "node": "a", "host": "bc"}, SECRET, "n")


def test_a_refusal_says_why() -> None:
    with pytest.raises(WireError, match=r"^no room$"):
        read_welcome({"refused": "no room"}, SECRET, NONCES)


def test_a_refusal_of_a_stranger_is_one_line_of_the_log() -> None:
    with pytest.raises(WireError, match=r"^no room ERROR: all is lost \[2J$"):
        read_welcome({"refused": "no room\nERROR: all is lost \x1b[2J"}, SECRET, NONCES)


def test_an_interval_that_was_changed_on_the_way_is_refused() -> None:
    told = {**read(welcome(SECRET, NONCES, 0.1)), "beat_s": 10}
    with pytest.raises(WireError, match="the coordinator does not know"):
        read_welcome(told, SECRET, NONCES)


@pytest.mark.parametrize(
    "beat_s", [None, "1", [], 0, 0.009, 10.1, -1, 10**400, math.inf, -math.inf, math.nan, True, False]
)
def test_an_interval_that_cannot_be_right(beat_s: object) -> None:
    told = {**read(welcome(SECRET, NONCES, 1.0)), "beat_s": beat_s}
    with pytest.raises(WireError, match=r"^beat_s is no number of seconds from 0\.01 to 10$"):
        read_welcome(told, SECRET, NONCES)


@pytest.mark.parametrize("field", ["node", "host", "job", "nonce", "proof"])
@pytest.mark.parametrize("value", [None, 1, True, math.nan, ["a"], {}, "x" * 301])
def test_a_field_that_is_no_short_text_is_named(field: str, value: object) -> None:
    told = {**read(HELLO.line(SECRET, {"nonce": "n"})[0]), field: value}
    with pytest.raises(WireError, match=f"^{field} is no text of at most 300 characters$"):
        Hello.parse(told, SECRET, "n")


@pytest.mark.parametrize("proof", ["ü" * 64, "\ud800", "\0", "", "0" * 300])
def test_a_proof_of_whatever_characters_is_refused(proof: str) -> None:
    told = {**read(HELLO.line(SECRET, {"nonce": "n"})[0]), "proof": proof}
    with pytest.raises(WireError, match="does not know"):
        Hello.parse(told, SECRET, "n")
    with pytest.raises(WireError, match="does not know"):
        read_welcome({"proof": proof, "beat_s": 0.1}, SECRET, NONCES)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"1", b'"a"', b"{", b"{}x", b"\xff\xfe", b"\0" * 100, b'{"a": \xc3}',
        b"[" * 16_000, b'{"a":' * 3_000, b"9" * 16_000, b'{"a": ' + b"9" * 16_000 + b"}", b"NaN",
        "\ufeff[]".encode(), "[]".encode("utf-16"),
    ],
)  # fmt: skip
def test_what_is_no_object(text: bytes) -> None:
    with pytest.raises(WireError, match=r"^a line that is no JSON object$"):
        read(text)


@given(st.binary(max_size=200))
def test_garbage(text: bytes) -> None:
    only_wire_errors([text])


@given(TOLD)
def test_objects_of_whatever_kind(told: dict[str, object]) -> None:
    only_wire_errors([json.dumps(told).encode(), json.dumps(told, ensure_ascii=False).encode(errors="surrogatepass")])


@given(st.lists(st.binary(max_size=30).filter(lambda text: b"\n" not in text)), st.lists(st.integers(1, 9), min_size=1))
def test_lines_come_out_as_they_went_in(texts: list[bytes], sizes: list[int]) -> None:
    """However the network cuts them; empty ones are beats."""
    lines, stream = Lines(), b"".join(text + b"\n" for text in texts)
    found: list[bytes] = []
    at = turn = 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += lines.take(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == [text for text in texts if text]


def test_a_line_is_bounded_whether_it_has_ended_or_not() -> None:
    longest = b"x" * LINE_BYTES_MAX
    assert list(Lines().take(longest + b"\n")) == [longest]
    for told in (longest + b"x", longest + b"x\n"):
        lines = Lines()
        with pytest.raises(WireError, match=f"^a line of more than {LINE_BYTES_MAX} bytes$"):
            list(lines.take(told))
    slowly = Lines()
    for _ in range(LINE_BYTES_MAX):
        assert list(slowly.take(b"x")) == []
    with pytest.raises(WireError, match="more than"):
        list(slowly.take(b"x"))


def test_what_was_said_before_a_line_that_is_too_long_is_heard() -> None:
    found = Lines().take(b"{}\n" + b"x" * (LINE_BYTES_MAX + 1))
    assert next(found) == b"{}"
    with pytest.raises(WireError):
        next(found)


def test_beats_are_nothing_to_read() -> None:
    assert list(Lines().take(BEAT * 1000 + line({"a": 1}) + BEAT)) == [b'{"a": 1}']


# -- after the greeting ------------------------------------------------------------------------------------------------


def sealed(count: int = 3) -> tuple[list[bytes], list[dict[str, int]]]:
    """Lines of an agent, without their ends, and what they say."""
    seal, told = seal_of(SECRET, NONCES, is_coordinator=False), [{"fault": n} for n in range(count)]
    return [sealed_line(each, seal).removesuffix(b"\n") for each in told], told


def heard(texts: Iterable[bytes], nonces: Nonces = NONCES, secret: str = SECRET, *, is_coordinator: bool = True) -> int:
    """How many of them the other end takes."""
    seal, count = seal_of(secret, nonces, is_coordinator=is_coordinator), 0
    with contextlib.suppress(WireError):
        for text in texts:
            read_sealed(text, seal)
            count += 1
    return count


def test_what_one_says_the_other_hears_in_both_directions() -> None:
    texts, told = sealed()
    seal = seal_of(SECRET, NONCES, is_coordinator=True)
    assert [read_sealed(text, seal) for text in texts] == told
    back = [sealed_line(each, seal).strip() for each in told]
    assert heard(back, is_coordinator=False) == len(told)


def test_only_what_was_said_on_this_connection_in_its_order_and_direction_is_heard() -> None:
    (one, two, three), _ = sealed()
    assert heard([one, three]) == 1, "a line was dropped on the way"
    assert heard([two, one]) == 0, "lines changed places"
    assert heard([one, one]) == 1, "a line came again"
    assert heard([one], is_coordinator=False) == 0, "a line came back to who had said it"
    assert heard([one], NONCES._replace(agent="m")) == heard([one], NONCES._replace(coordinator="d")) == 0
    assert heard([one], secret="6f" * 32) == 0
    assert heard([one[33:]]) == heard([line({"fault": 0}).strip()]) == 0, "a line has no seal"
    assert heard([one.replace(b"0}", b"1}")]) == 0
    assert heard([one, two, three]) == 3


@given(st.integers(0, 43), st.integers(1, 255), st.binary(max_size=60))
def test_whatever_is_changed_in_a_line_it_is_refused(at: int, by: int, instead: bytes) -> None:
    (one, two), _ = sealed(2)
    changed = bytearray(one)
    changed[at] ^= by
    if bytes(changed[:32]).lower() + changed[32:] != one:  # a seal in capital letters is the same seal
        assert heard([bytes(changed), two]) == 0
    assert heard([instead, one]) == 0
