"""Who follows the worlds of a round in a log that keeps the latest ones only."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.launcher.agent.worlds.log import WorldWatch
from unicron_elastic.recovery.commands import ChangeWorld

DEADLINE_S = 30.0
A, B, C = (Member(name=name, node=name, local_rank=0) for name in "abc")


def world(number: int, *members: Member) -> World:
    return World(number=number, members=members, store="127.0.0.1:1")


class ShortLog:
    """The latest worlds of a round. ``refusals``: so often a write is refused, as of one who is behind."""

    def __init__(self, *worlds: World) -> None:
        self.worlds = {each.number: each.to_json() for each in worlds}
        self.late: list[World] = []
        self.refusals = 0

    def write(self, place: int, text: str) -> str:
        if self.refusals:
            self.refusals -= 1
            self.worlds = {each.number: each.to_json() for each in self.late}
            raise ConnectionError("others have written later ones")
        return self.worlds.setdefault(place, text)

    def after(self, place: int) -> tuple[int, str] | None:
        later = min((each for each in self.worlds if each > place), default=None)
        return None if later is None else (later, self.worlds[later])


class Follower:
    """A watch, what it has told, and the trouble that it had."""

    def __init__(self, log: ShortLog) -> None:
        self.seen: queue.Queue[World] = queue.Queue()
        self.trouble: list[str] = []
        self.away: list[str] = []
        self.watch = WorldWatch(
            log,
            tell=lambda: None,
            do_others_train=lambda: True,
            first=self._first,
            make=self._make,
            on_world=self.seen.put,
            on_trouble=self.trouble.append,
            on_away=self.away.append,
        )
        self.watch.start()

    def next(self) -> World:
        return self.seen.get(timeout=DEADLINE_S)

    def _first(self) -> World | None:
        raise AssertionError("The round has a first world.")

    def _make(self, seen: World | None, wanted: ChangeWorld) -> World | None:
        assert seen is not None
        return seen.after(store=seen.store, reason=wanted.reason, lost=wanted.lost, over=wanted.over)


@pytest.fixture
def log() -> ShortLog:
    return ShortLog(world(5, A, B, C), world(6, A, C))


@pytest.fixture
def follower(log: ShortLog) -> Iterator[Follower]:
    found = Follower(log)
    yield found
    found.watch.stop()


def test_who_comes_late_sees_those_that_are_left_and_adds_to_them(log: ShortLog, follower: Follower) -> None:
    assert [follower.next() for _ in range(2)] == [world(5, A, B, C), world(6, A, C)]
    follower.watch.change(ChangeWorld(lost=("c",), reason="c is lost."))
    assert follower.next().members == (A,)
    assert sorted(log.worlds) == [5, 6, 7]
    assert not follower.trouble


def test_a_change_that_was_refused_is_made_in_the_world_that_others_have_come_to(
    log: ShortLog, follower: Follower
) -> None:
    assert [follower.next().number for _ in range(2)] == [5, 6]
    log.late, log.refusals = [world(20, B, C), world(21, B, A, C)], 1
    follower.watch.change(ChangeWorld(lost=("c",), reason="c is lost."))
    assert [follower.next().members for _ in range(3)] == [(B, C), (B, A, C), (B, A)]
    assert sorted(log.worlds) == [20, 21, 22]
    assert follower.trouble == follower.away == []  # that is no news for people


def test_a_log_that_is_away_is_told_and_that_it_is_back(log: ShortLog, follower: Follower) -> None:
    follower.next(), follower.next()
    log.late, log.refusals = [world(5, A, B, C), world(6, A, C)], 10_000
    follower.watch.change(ChangeWorld(lost=("c",), reason="c is lost."))
    _until(lambda: follower.away)
    assert follower.away == ["others have written later ones"]
    log.refusals = 0
    assert follower.next().members == (A,)
    _until(lambda: len(follower.away) > 1)
    assert follower.away[1:] == [""]


def _until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_that_the_training_is_over_is_written_also_by_one_who_follows_no_more(
    log: ShortLog, follower: Follower
) -> None:
    follower.next(), follower.next()
    follower.watch.stop()
    follower.watch.change(ChangeWorld(over=5, reason=""))
    follower.watch._thread.join(DEADLINE_S)
    assert World.parse(log.worlds[7]).over == 5
