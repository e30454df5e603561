"""Whatever happens to the sources, every chunk is accepted once, and the transfer ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.state.pull.distance import Distance
from unicron_elastic.state.pull.transfer import (
    Accept,
    ChunkArrived,
    ChunkWrong,
    Command,
    Event,
    Fail,
    Fetch,
    Finish,
    SourceLost,
    SourceReady,
    Transfer,
    handle,
)


class Play:
    """Feeds one transfer, and keeps what is asked and what was accepted."""

    def __init__(self, total: int, expected: int) -> None:
        self.state = Transfer(total, expected)
        self.asked: list[Fetch] = []
        self.accepted: list[int] = []
        self.ends: list[Command] = []
        self.fetched: list[Fetch] = []

    def feed(self, event: Event) -> list[Command]:
        self.state, commands = handle(self.state, event)
        for command in commands:
            match command:
                case Fetch():
                    self.asked.append(command)
                    self.fetched.append(command)
                case Accept(chunk=chunk):
                    self.accepted.append(chunk)
                case _:
                    self.ends.append(command)
        return commands

    def ready(self, source: int, far: Distance = Distance.OTHER_HOST, lanes: int = 1) -> None:
        self.feed(SourceReady(source, f"host-{source}", far, lanes))

    def lose(self, source: int) -> None:
        self.asked = [fetch for fetch in self.asked if fetch.source != source]
        self.feed(SourceLost(source, f"host-{source} ended"))

    def answer(self, fetch: Fetch, is_right: bool = True) -> None:
        self.asked.remove(fetch)
        self.feed((ChunkArrived if is_right else ChunkWrong)(fetch.source, fetch.chunk))

    def answer_all(self, source: int | None = None) -> None:
        """Sends all that is asked of a source, or of all of them in turns, until nothing is."""
        while mine := [fetch for fetch in self.asked if source in (None, fetch.source)]:
            self.answer(mine[0])


def test_each_of_three_sources_sends_its_part() -> None:
    play = Play(99, 3)
    for source in range(3):
        play.ready(source)
    play.answer_all()
    assert sorted(play.accepted) == list(range(99))
    assert play.ends == [Finish()]
    shares = [sum(fetch.source == source for fetch in play.fetched) for source in range(3)]
    assert min(shares) >= 32, shares


def test_a_slow_source_holds_nobody_up() -> None:
    play = Play(50, 2)
    play.ready(0)
    play.ready(1)
    play.answer_all(source=1)  # source 0 has not sent its first chunk
    assert play.ends == [Finish()]
    assert sorted(play.accepted) == list(range(50))


def test_only_what_a_lost_source_did_not_send_is_asked_again() -> None:
    play = Play(40, 2)
    play.ready(0, lanes=2)
    play.ready(1, lanes=2)
    for _ in range(10):
        play.answer(play.asked[0])
    play.lose(0)
    play.answer_all()
    assert play.ends == [Finish()]
    again = [fetch.chunk for fetch in play.fetched]
    assert len(again) <= 40 + 2 + 2  # both lanes of the lost one; copies at the end


def test_the_loss_of_the_last_source_says_what_happened_to_each() -> None:
    play = Play(10, 2)
    play.ready(0)
    play.ready(1)
    play.lose(0)
    play.lose(1)
    assert play.ends == [Fail("host-0 ended; host-1 ended")]


def test_a_source_that_is_still_expected_keeps_the_transfer_alive() -> None:
    play = Play(3, 2)
    play.ready(0)
    play.lose(0)
    assert play.ends == []
    play.ready(1)
    play.answer_all()
    assert play.ends == [Finish()]


def test_a_chunk_that_came_wrong_is_asked_of_another_source() -> None:
    play = Play(4, 2)
    play.ready(0)
    play.ready(1)
    first = next(fetch for fetch in play.asked if fetch.source == 0)
    play.answer(first, is_right=False)
    play.answer_all()
    assert [fetch.source for fetch in play.fetched if fetch.chunk == first.chunk] == [0, 1]
    assert sorted(play.accepted) == list(range(4))


def test_a_source_that_sends_wrong_chunks_again_and_again_is_let_go() -> None:
    play = Play(4, 1)
    play.ready(0)
    for _ in range(3):
        play.answer(play.asked[0], is_right=False)
    assert play.ends == [Fail("host-0 sent 3 chunks with a wrong checksum")]


def test_sources_of_this_host_alone_are_asked_and_others_are_in_reserve() -> None:
    play = Play(20, 3)
    play.ready(0, Distance.OTHER_HOST)
    for _ in range(3):
        play.answer(play.asked[0])
    play.ready(1, Distance.SAME_HOST)
    play.ready(2, Distance.SNAPSHOT)
    before = len(play.fetched)
    for _ in range(6):
        play.answer(next(fetch for fetch in play.asked if fetch.source != 0))
    assert {fetch.source for fetch in play.fetched[before:]} <= {1, 2}
    play.lose(1)
    play.lose(2)
    play.answer_all()
    assert play.ends == [Finish()]
    assert sorted(play.accepted) == list(range(20))


def test_one_in_reserve_sends_what_the_only_serving_one_sent_wrong() -> None:
    play = Play(5, 2)
    play.ready(0, Distance.SAME_HOST)
    play.ready(1, Distance.OTHER_HOST)
    play.answer(play.asked[0], is_right=False)
    assert [fetch for fetch in play.fetched if fetch.source == 1] == [Fetch(1, 0, is_copy=False)]
    play.answer_all()
    assert play.ends == [Finish()]


def test_an_empty_state_is_there_at_once() -> None:
    play = Play(0, 1)
    play.ready(0)
    assert play.ends == [Finish()]
    assert play.fetched == []


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_happens_every_chunk_is_accepted_once_and_it_ends(data: st.DataObject) -> None:
    sources = data.draw(st.integers(1, 6), "sources")
    play = Play(data.draw(st.integers(0, 30), "chunks"), sources)
    unborn, live = set(range(sources)), set()
    while not play.ends:
        choices = [("ready", source) for source in sorted(unborn)] + [
            ("lose", source) for source in sorted(unborn | live)
        ]
        choices += [(kind, fetch) for fetch in play.asked for kind in ("right", "right", "wrong")]
        assert choices, "nothing can happen any more, and the transfer has not ended"
        kind, what = data.draw(st.sampled_from(choices))
        if kind == "ready":
            unborn.discard(what)
            live.add(what)
            play.ready(what, data.draw(st.sampled_from(Distance)), data.draw(st.integers(1, 3)))
        elif kind == "lose":
            unborn.discard(what)
            live.discard(what)
            play.lose(what)
        else:
            play.answer(what, kind == "right")
        live &= set(play.state.sources)
        play.asked = [fetch for fetch in play.asked if fetch.source in live]
        assert len(set(play.accepted)) == len(play.accepted)
        for source, known in play.state.sources.items():
            assert [fetch.chunk for fetch in play.asked if fetch.source == source] == list(known.asked)
            assert len(known.asked) <= known.lanes
    if play.ends == [Finish()]:
        assert sorted(play.accepted) == list(range(play.state.total))
    else:
        assert not live
        assert not unborn


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_while_one_source_lives_and_sends_it_ends_well(data: st.DataObject) -> None:
    play = Play(data.draw(st.integers(1, 40), "chunks"), 4)
    for source in range(4):
        play.ready(source, data.draw(st.sampled_from(Distance)), 2)
    for source in data.draw(st.permutations([0, 1, 2]), "lost"):
        for _ in range(data.draw(st.integers(0, 5))):
            if play.asked and not play.ends:
                play.answer(play.asked[data.draw(st.integers(0, len(play.asked) - 1))])
        play.lose(source)
    play.answer_all(source=3)
    assert play.ends == [Finish()]
    assert sorted(play.accepted) == list(range(play.state.total))
