"""The connections of agents, on real sockets. No thread: each test says whose turn it is."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from unicron_elastic.base.seal import Seal
from unicron_elastic.base.seldom import EVERY_S, Seldom
from unicron_elastic.membership.coordination import Answer
from unicron_elastic.rendezvous.cluster.heartbeat_wire import LINE_BYTES_MAX, Hello, line, read, seal_of, sealed_line
from unicron_elastic.rendezvous.cluster.links import PROBE_S, LinkLimits, Links

DEADLINE_S = 20.0
SECRET = "5e" * 32
LIMITS = LinkLimits()


class End:
    """One agent's connections, and all that was heard of them."""

    def __init__(
        self,
        name: str,
        job: str = "job",
        *,
        leads: bool = False,
        host: str = "127.0.0.1",
        limits: LinkLimits = LIMITS,
    ) -> None:
        self.name = f"{name}/1"
        self.opened: list[str] = []
        self.lost: list[str] = []
        self.probed: list[tuple[str, Answer]] = []
        self.heard: list[tuple[str, str, Mapping[str, Any]]] = []
        self.links = Links(
            host,
            Hello(self.name, name, job),
            on_opened=self.opened.append,
            on_lost=self.lost.append,
            on_probed=lambda node, answer: self.probed.append((node, answer)),
            on_message=lambda node, job, told: self.heard.append((node, job, told)),
            limits=limits,
        )
        self.links.secret, self.links.leads = SECRET, leads
        self.address = f"127.0.0.1:{self.links.port}"


Make = Callable[..., End]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as opened:

        def end(*given: Any, **named: Any) -> End:
            made = End(*given, **named)
            opened.callback(made.links.close)
            return made

        yield end


def turn(ends: tuple[End, ...], until: Callable[[], object]) -> float:
    """Lets each do its work until something is so; the seconds that took. Fails the test at the deadline."""
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + DEADLINE_S, "deadline passed"
        for end in ends:
            end.links.poll(0.001)
    return time.monotonic() - began


def turn_for(ends: tuple[End, ...], seconds: float) -> None:
    """Lets some time pass."""
    end = time.monotonic() + seconds
    turn(ends, lambda: time.monotonic() >= end)


def linked(make: Make, *names: str, limits: LinkLimits = LIMITS) -> tuple[End, ...]:
    """A coordinator, ``boss``, and agents that are connected to it."""
    boss = make("boss", leads=True, limits=limits)
    others = tuple(make(name, limits=limits) for name in names)
    for other in others:
        other.links.connect(boss.name, boss.address)
    turn((boss, *others), lambda: all(other.opened for other in others) and len(boss.opened) == len(others))
    return boss, *others


def stranger(boss: End) -> socket.socket:
    """Somebody who connects and says nothing yet."""
    made = socket.create_connection(("127.0.0.1", boss.links.port), DEADLINE_S)
    made.settimeout(DEADLINE_S)
    return made


def is_closed(boss: End, connection: socket.socket) -> bool:
    """Whether the coordinator has ended a connection, all that it said before having been read."""
    boss.links.poll(0.001)
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def open_fds() -> int:
    gc.collect()  # what tests before this one have left in circles may hold some
    return len(os.listdir("/proc/self/fd"))


# -- links -------------------------------------------------------------------------------------------------------------


def test_both_sides_prove_who_they_are(make: Make) -> None:
    boss, one = linked(make, "one")
    assert (boss.opened, one.opened) == (["one/1"], ["boss/1"])
    assert (boss.lost, one.lost) == ([], [])


def test_beats_go_both_ways_and_nothing_piles_up(make: Make) -> None:
    boss, one, two = ends = linked(make, "one", "two", limits=LinkLimits(beat_s=0.01))
    before = open_fds()
    turn_for(ends, 1.0)
    assert (boss.lost, one.lost, two.lost, boss.heard, open_fds()) == ([], [], [], [], before)
    for end in ends:
        for link in end.links._links:
            assert len(link.out) <= 1
            assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] == 1  # established
    (link,) = one.links._links
    sent, got = [
        int.from_bytes(link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)[at : at + 8], "little")
        for at in (120, 128)  # tcpi_bytes_acked, tcpi_bytes_received
    ]
    assert min(sent, got) > 30, "a beat is a byte"


def test_what_is_told_arrives(make: Make) -> None:
    boss, one, two = ends = linked(make, "one", "two")
    assert one.links.tell_coordinator({"a": 1})
    turn(ends, lambda: boss.heard)
    boss.links.tell_nodes("job", {"b": 2}, but="one/1")
    turn(ends, lambda: two.heard)
    assert (boss.heard, two.heard) == ([("one/1", "job", {"a": 1})], [("boss/1", "", {"b": 2})])
    boss.links.tell_nodes("other", {"c": 3})
    boss.links.tell_nodes("job", {"d": 4})
    turn(ends, lambda: one.heard)
    assert one.heard == [("boss/1", "", {"d": 4})]


def test_without_a_link_nothing_is_told(make: Make) -> None:
    assert make("one").links.tell_coordinator({"a": 1}) is False


@pytest.mark.parametrize("gone", [0, 1])
def test_a_peer_that_has_closed_is_noticed_at_once(make: Make, gone: int) -> None:
    ends = linked(make, "one")
    stays = ends[1 - gone]
    ends[gone].links.close()
    assert turn((stays,), lambda: stays.lost) < 0.5
    assert stays.lost == [ends[gone].name]


def test_a_new_link_takes_the_place_of_the_old_one_without_a_word(make: Make) -> None:
    boss, one = ends = linked(make, "one")
    one.links.connect(boss.name, boss.address)
    turn(ends, lambda: len(one.opened) == 2 and len(boss.opened) == 2)
    turn_for(ends, 0.1)
    assert (one.lost, len(boss.links._links)) == ([], 1)


def test_who_does_not_lead_lets_nobody_in(make: Make) -> None:
    one, two = ends = make("one"), make("two")
    one.links.connect(two.name, two.address)
    turn(ends, lambda: one.lost)
    assert (one.opened, two.opened, two.lost) == ([], [], [])


@pytest.mark.parametrize("who", [0, 1])
def test_without_the_secret_there_is_no_link(make: Make, who: int) -> None:
    boss, one = ends = make("boss", leads=True), make("one")
    ends[who].links.secret = "another"
    one.links.connect(boss.name, boss.address)
    turn(ends, lambda: one.lost)
    assert (one.opened, boss.opened, boss.lost) == ([], [], [])


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:x", "a..b:1", "127.0.0.1:1:2:3", "\0:1"])
def test_an_address_that_is_none_is_a_lost_link(make: Make, address: str) -> None:
    one = make("one")
    one.links.connect("boss/1", address)
    turn((one,), lambda: one.lost)
    assert one.lost == ["boss/1"]


def test_a_coordinator_that_says_nothing_is_given_up(make: Make) -> None:
    one = make("one", limits=LinkLimits(greeting_s=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one.links.connect("boss/1", f"127.0.0.1:{silent.getsockname()[1]}")
        assert 0.3 <= turn((one,), lambda: one.lost) < 2.0
    assert one.lost == ["boss/1"]


def test_a_greeting_that_takes_its_time_is_not_begun_anew(make: Make) -> None:
    """The decision to connect comes each half second, and a greeting needs three round trips."""
    boss, one = make("boss", leads=True), make("one")
    for _ in range(4):
        one.links.connect(boss.name, boss.address)
        turn_for((one,), 0.1)  # the coordinator is slow
    before = open_fds()
    turn((boss, one), lambda: one.opened)
    turn_for((boss, one), 0.1)
    assert (one.lost, boss.lost, boss.opened, open_fds() - before) == ([], [], ["one/1"], 1)


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_strangers_keep_no_agent_out_by_silence(make: Make) -> None:
    boss, one = ends = linked(make, "one", limits=LinkLimits(greetings=8))
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(stranger(boss)) for _ in range(20)]
        turn(ends, lambda: sum(is_closed(boss, each) for each in silent) == 12)
        two = make("two")
        two.links.connect(boss.name, boss.address)
        assert turn((*ends, two), lambda: two.opened) < LIMITS.greeting_s / 2
    assert (boss.lost, one.lost) == ([], [])


def test_who_says_nothing_is_dropped_and_they_are_bounded(make: Make) -> None:
    boss, one = ends = linked(make, "one", limits=LinkLimits(greeting_s=0.5, greetings=8))
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(stranger(boss)) for _ in range(20)]
        turn(ends, lambda: sum(is_closed(boss, each) for each in silent) == 12)
        assert len(boss.links._links) == 1 + 8
        took_s = turn(ends, lambda: all(is_closed(boss, each) for each in silent))
    assert took_s < 2.0
    assert (len(boss.links._links), boss.lost, one.lost) == (1, [], [])
    two = make("two")
    two.links.connect(boss.name, boss.address)
    turn((*ends, two), lambda: two.opened)


STRANGE = [
    b"garbage\n", b"[]\n", b"\xff\xfe\n", b"[" * 10_000 + b"\n", b"x" * (LINE_BYTES_MAX + 1), b"\n" * 100_000,
    b"{}\n", b'{"nonce": "n"}\n', b'{"proof": "p", "beat_s": 0.1}\n', b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\0\n",
    line({"node": "one/1", "host": "one", "job": "job", "nonce": "n", "proof": "0" * 64}),
    line({"node": "one/1", "host": "one", "job": "job", "nonce": "n", "proof": "\u00fc" * 64}),
    line({"node": "one/1", "host": "one", "job": "job", "nonce": "n", "proof": "\ud800"}),
    line({"node": 1, "host": [], "job": {}, "nonce": None, "proof": True}),
    line({"fault": {"job": "job", "round": 1, "reason": "it is not so"}}),
]  # fmt: skip


@pytest.mark.parametrize("said", STRANGE, ids=lambda said: repr(said[:30]))
def test_whatever_a_stranger_says_harms_nobody(make: Make, said: bytes) -> None:
    boss, one = ends = linked(make, "one", limits=LinkLimits(greeting_s=0.3))
    with stranger(boss) as odd:
        odd.setblocking(False)
        odd.send(said)
        turn(ends, lambda: is_closed(boss, odd))
    one.links.tell_coordinator({"a": 1})
    turn(ends, lambda: boss.heard)
    assert (boss.heard, boss.lost, one.lost, boss.opened) == ([("one/1", "job", {"a": 1})], [], [], ["one/1"])


def test_many_that_say_nonsense_are_one_warning_and_later_one_that_counts_them(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    boss = make("boss", leads=True)
    boss.links._closed = Seldom(now=lambda: now)

    def tell(count: int) -> list[str]:
        caplog.clear()
        for _ in range(count):
            with stranger(boss) as odd:
                odd.sendall(b"garbage\n")
                turn((boss,), partial(is_closed, boss, odd))
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    said = "A heartbeat connection is closed: a line that is no JSON object."
    assert tell(5) == [said]
    now += EVERY_S - 1.0
    assert tell(2) == []
    now += 1.0
    assert tell(3) == [f"{said} So were 6 more since this was last said."]
    now += EVERY_S
    assert tell(1) == [f"{said} So were 2 more since this was last said."]
    now += EVERY_S
    assert tell(1) == [said]
    assert not boss.links._links


STRANGE_COORDINATORS = [
    b"garbage\n", b'{"nonce": 1}\n', b'{"proof": "\xc3\xbc", "beat_s": 1}\n', b'{"refused": "go away"}\n', b"x" * 20_000
]  # fmt: skip


@pytest.mark.parametrize("said", STRANGE_COORDINATORS, ids=lambda said: repr(said[:30]))
def test_whatever_a_false_coordinator_says_is_a_lost_link(make: Make, said: bytes) -> None:
    one = make("one")
    with socket.create_server(("127.0.0.1", 0)) as false:
        one.links.connect("boss/1", f"127.0.0.1:{false.getsockname()[1]}")
        turn_for((one,), 0.05)
        odd, _ = false.accept()
        with odd:
            odd.sendall(said)
            turn((one,), lambda: one.lost)
    assert (one.opened, one.lost, len(one.links._links)) == ([], ["boss/1"], 0)


def greeted(boss: End, job: str = "job") -> tuple[socket.socket, Seal]:
    """A peer that is let in, by hand, and its seal."""
    peer = stranger(boss)
    turn((boss,), lambda: boss.links._links)
    said, nonces = Hello("odd/1", "odd", job).line(SECRET, read(peer.recv(4096).strip()))
    peer.sendall(said)
    turn((boss,), lambda: "odd/1" in boss.opened)
    return peer, seal_of(SECRET, nonces, is_coordinator=False)


def test_a_peer_that_never_reads_holds_a_bounded_amount(make: Make) -> None:
    boss = make("boss", leads=True, limits=LinkLimits(out_bytes=100_000))
    with greeted(boss)[0]:
        (link,) = boss.links._links
        for _ in range(2_000):
            boss.links.tell_nodes("job", {"text": "x" * 10_000})
            boss.links.poll(0.0)
        assert 0 < len(link.out) <= 100_000


def test_a_link_that_waited_gets_what_was_said_whole(make: Make) -> None:
    boss = make("boss", leads=True, limits=LinkLimits(out_bytes=100_000))
    peer, _ = greeted(boss)
    with peer:
        for number in range(2_000):
            boss.links.tell_nodes("job", {"number": number, "text": "x" * 10_000})
        peer.setblocking(False)
        got = b""
        while not got.endswith(b"\n\n"):  # a beat after the last line
            boss.links.poll(0.001)
            with contextlib.suppress(BlockingIOError):
                got += peer.recv(1_000_000)
    numbers = [json.loads(text[text.index(b"{") :]).get("number") for text in got.split(b"\n") if text]
    assert numbers == [None, *range(len(numbers) - 1)]
    assert len(numbers) < 2_000


def test_a_message_of_whatever_kind_is_handed_on(make: Make) -> None:
    boss = make("boss", leads=True)
    peer, seal = greeted(boss)
    with peer:
        peer.sendall(b"\n\n" + sealed_line({}, seal) + sealed_line({"fault": []}, seal))
        turn((boss,), lambda: len(boss.heard) == 2)
    assert boss.heard == [("odd/1", "job", {}), ("odd/1", "job", {"fault": []})]


def _without_a_seal(_seal: Seal) -> bytes:
    return line({"fault": {"job": "job", "round": 1, "reason": "it is not so"}})


def _a_second_time(seal: Seal) -> bytes:
    return sealed_line({"a": 1}, seal) * 2


def _changed(seal: Seal) -> bytes:
    return sealed_line({"a": 1}, seal).replace(b"1}", b"2}")


def _with_one_missing(seal: Seal) -> bytes:
    sealed_line({"a": 1}, seal)
    return sealed_line({"a": 1}, seal)


@pytest.mark.parametrize("forge", [_without_a_seal, _a_second_time, _changed, _with_one_missing])
def test_who_sits_in_between_is_not_believed(make: Make, forge: Callable[[Seal], bytes]) -> None:
    boss = make("boss", leads=True)
    peer, seal = greeted(boss)
    with peer:
        peer.setblocking(False)
        peer.send(forge(seal))
        turn((boss,), lambda: boss.lost)
        assert is_closed(boss, peer)
    assert boss.heard == ([("odd/1", "job", {"a": 1})] if forge is _a_second_time else [])


# -- probes ------------------------------------------------------------------------------------------------------------


def full() -> tuple[socket.socket, list[socket.socket]]:
    """A port whose kernel answers no more, as its queue of connections is full."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    waiting = []
    for _ in range(8):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(listener.getsockname())
    return listener, waiting


def test_a_probe_of_who_listens(make: Make) -> None:
    one, two = make("one"), make("two")
    one.links.probe("two/1", two.address)  # which does nothing: its kernel answers
    assert turn((one,), lambda: one.probed) < 0.2
    assert one.probed == [("two/1", Answer.ANSWERS)]


def test_a_probe_of_who_has_ended(make: Make) -> None:
    one, two = make("one"), make("two")
    two.links.close()
    one.links.probe("two/1", two.address)
    assert turn((one,), lambda: one.probed) < 0.2
    assert one.probed == [("two/1", Answer.REFUSED)]


def test_a_probe_of_who_is_silent(make: Make) -> None:
    one = make("one")
    listener, waiting = full()
    with contextlib.ExitStack() as opened:
        for each in (listener, *waiting):
            opened.enter_context(each)
        began = time.monotonic()
        one.links.probe("two/1", f"127.0.0.1:{listener.getsockname()[1]}")
        turn((one,), lambda: one.probed)
        assert PROBE_S <= time.monotonic() - began < PROBE_S + 0.3
    assert one.probed == [("two/1", Answer.SILENT)]


@pytest.mark.parametrize("address", ["", "nowhere.invalid:1", "127.0.0.1:x", "a..b:1", "127.0.0.1:99999999999"])
def test_who_could_not_be_asked_is_not_called_silent(make: Make, address: str) -> None:
    """A name that does not resolve says nothing of the host, which would be removed."""
    one = make("one")
    one.links.probe("two/1", address)
    turn((one,), lambda: one.probed)
    assert one.probed == [("two/1", Answer.ANSWERS)]


def test_a_name_that_is_found_late_costs_nobody_the_time_to_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a probe begins with its packets."""
    one, two = make("one"), make("two")
    find, asked, ends_at = socket.getaddrinfo, [], []

    def slow(*given: Any, **named: Any) -> Any:
        asked.append(given)
        time.sleep(PROBE_S + 0.05)
        return find(*given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    one.links.probe("two/1", two.address)
    now = time.monotonic()
    ends_at += [probe.ends_at for probe in one.links._probes]
    assert len(asked) == 1, "its name is looked up once"
    assert ends_at[0] - now > 0.8 * PROBE_S


def test_who_listens_on_all_addresses_is_found_by_each_of_its_names(make: Make) -> None:
    """A name may stand for an IPv6 address, which is then the first to be tried."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    one, two = make("one"), make("two", host="")
    for host in ("127.0.0.1", "[::1]", "localhost"):
        one.links.probe(host, f"{host}:{two.links.port}")
        turn((one,), lambda: one.probed)
        assert one.probed.pop() == (host, Answer.ANSWERS)


@pytest.mark.parametrize("host", ["node1..cluster", "x" * 64])
def test_where_nobody_can_listen_is_an_os_error(make: Make, host: str) -> None:
    with pytest.raises(OSError, match=f"^'{host}' is no name of a host$"):
        make("one", host=host)


def test_ipv6_by_itself(make: Make) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    boss, one = make("boss", leads=True, host="::1"), make("one")
    one.links.connect(boss.name, f"[::1]:{boss.links.port}")
    turn((boss, one), lambda: one.opened)


# -- descriptors -------------------------------------------------------------------------------------------------------


def has_heard(end: End, count: int) -> bool:
    """Whether it knows what came of so many connections, besides the first, and of as many probes."""
    return len(end.opened) + len(end.lost) == count + 1 and len(end.probed) == count


def test_two_hundred_connections_and_probes_leave_no_descriptor(make: Make) -> None:
    boss, one = ends = linked(make, "one")
    before = open_fds()
    for number in range(200):
        one.links.connect(boss.name, boss.address if number % 2 else "127.0.0.1:1")
        one.links.probe(boss.name, boss.address if number % 3 else "127.0.0.1:1")
        turn(ends, partial(has_heard, one, number + 1))
    one.links.connect(boss.name, boss.address)
    turn(ends, lambda: one.opened and len(boss.links._links) == 1 and len(one.links._links) == 1)
    turn(ends, lambda: open_fds() == before)


def test_close_may_come_twice_and_closes_all(make: Make) -> None:
    before = open_fds()
    ends = linked(make, "one", "two")
    ends[0].links.probe("one/1", ends[1].address)
    for end in (*ends, *ends):
        end.links.close()
    assert open_fds() == before


def test_to_wake_what_is_closed_writes_to_nobody_s_file(make: Make) -> None:
    """The number of a closed descriptor belongs to whoever opens the next one."""
    one = make("one")
    one.links.close()
    with contextlib.ExitStack() as opened:
        pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(4)]
        for fd in (fd for pipe in pipes for fd in pipe):
            opened.callback(os.close, fd)
        one.links.wake()
        for reader, _ in pipes:
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)


def test_without_descriptors_it_waits_and_goes_on(make: Make) -> None:
    """What cannot be opened is a lost link, or an open question; it raises nothing and takes no processor."""
    import resource

    boss, _ = ends = linked(make, "one")
    two = make("two")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        peer = opened.enter_context(socket.socket())
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_fds(), limits[1]))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
                opened.callback(os.close, held[-1])
        two.links.connect(boss.name, boss.address)
        two.links.probe(boss.name, boss.address)
        turn((two,), lambda: two.lost and two.probed)
        assert two.probed == [(boss.name, Answer.ANSWERS)]
        peer.connect(("127.0.0.1", boss.links.port))
        polls = 0
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            boss.links.poll(0.05)
            polls += 1
        assert polls < 100
    two.links.connect(boss.name, boss.address)
    turn((*ends, two), lambda: two.opened)


def test_a_forked_child_keeps_no_connection_open(make: Make) -> None:
    """Else nobody notices the end of this process before that of all its children."""
    boss, one = linked(make, "one")
    reader, writer = os.pipe()
    is_there, is_here = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(is_here, b".")  # what runs in a child after a fork has run
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(is_there, 1)
        one.links.close()
        turn((boss,), lambda: boss.lost)
        boss.links.probe("one/1", one.address)
        turn((boss,), lambda: boss.probed)
        assert boss.probed == [("one/1", Answer.REFUSED)]
    finally:
        for end in (writer, reader, is_there, is_here):
            os.close(end)
        os.waitpid(child, 0)
