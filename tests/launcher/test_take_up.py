"""What is held is taken up if it serves the launch; else it is declined, in time, with a clause that says why."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unicron_elastic.launcher.agent.held.meeting_place import MeetingPlace, peer
from unicron_elastic.launcher.agent.held.take_up import Declined, Taken, code_stamp, take_up
from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.helper_tasks import (
    Forgotten,
    HeldWarm,
    HelperAnswer,
    HelperReady,
    Launch,
    Learned,
    TakeUp,
    Unfit,
)

ASKED = TakeUp(launch=Launch(argv=("a",), env={}, preload="", streams=(), standing={}), sets=(), mark="m")
DEADLINE_S = 0.5
Offer = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_PATH)
    yield opened
    os.close(opened)


@pytest.fixture
def offer(folder: int) -> Iterator[Offer]:
    """Has somebody wait in the folder who says what a held keeper says, and what its warm process answers."""
    threads = []
    over = threading.Event()

    def serve(place: MeetingPlace, said: HeldWarm | None, answers: tuple[HelperAnswer, ...]) -> None:
        ours, theirs = Channel.pair()
        while not over.wait(0.005):
            if (sock := place.accept()) is not None:
                keeper = Channel(sock)
                if said is not None:
                    fds = (theirs.fileno(),) if said.warm else ()
                    keeper.send(HeldWarm(since=5.0, warm=said.warm, code=said.code, has_learned=False, fds=fds))
                theirs.close()
                for answer in answers:
                    ours.send(answer)
                over.wait(30.0)
                keeper.close()
        ours.close()
        place.leave()

    def begin(said: HeldWarm | None, *answers: HelperAnswer) -> None:
        place = MeetingPlace(folder)
        place.listen()
        threads.append(threading.Thread(target=serve, args=(place, said, answers)))
        threads[-1].start()

    yield begin
    over.set()
    for thread in threads:
        thread.join(30.0)


def held(warm: int = 7, code: str = "code") -> HeldWarm:
    return HeldWarm(since=5.0, warm=warm, code=code, has_learned=False)


def taken(folder: int) -> Taken:
    found = take_up(folder, ASKED, "code", DEADLINE_S)
    assert found is not None
    found.keeper.close()
    found.warm.close()
    return found


def test_where_nobody_waits_there_is_nothing(folder: int) -> None:
    assert take_up(folder, ASKED, "code", DEADLINE_S) is None


def test_a_socket_that_somebody_left_is_nothing_and_another_may_wait_there(folder: int) -> None:
    place = MeetingPlace(folder)
    place.listen().close()
    assert os.listdir(f"/proc/self/fd/{folder}") == ["held"]
    assert take_up(folder, ASKED, "code", DEADLINE_S) is None
    other = MeetingPlace(folder)
    other.listen()
    place.leave()  # what is there is the other's by now
    assert os.listdir(f"/proc/self/fd/{folder}") == ["held"]
    other.leave()
    assert os.listdir(f"/proc/self/fd/{folder}") == []


@pytest.mark.parametrize(
    ("answers", "has_learned"),
    [
        ((HelperReady(),), False),
        ((Learned(modules=3), HelperReady()), True),
        ((Learned(modules=3), Forgotten(why="x has changed"), HelperReady()), False),
    ],
)
def test_one_that_serves_is_taken_up(
    folder: int, offer: Offer, answers: tuple[HelperAnswer, ...], has_learned: bool
) -> None:
    offer(held(), *answers)
    found = taken(folder)
    assert (found.keeper_pid, found.warm_pid, found.since) == (os.getpid(), 7, 5.0)
    assert found.has_learned == has_learned


@pytest.mark.parametrize(
    ("said", "answers", "why"),
    [
        (None, (), "it does not answer"),
        (held(), (), "it does not answer"),
        (held(warm=0), (), "it offers no warm process"),
        (held(code="older"), (), "unicron-elastic has changed"),
        (held(), (Unfit(reason="this launch has another umask"),), "this launch has another umask"),
    ],
)
def test_one_that_does_not_is_declined_in_time(
    folder: int, offer: Offer, said: HeldWarm | None, answers: tuple[HelperAnswer, ...], why: str
) -> None:
    offer(said, *answers)
    began = time.monotonic()
    with pytest.raises(Declined) as declined:
        take_up(folder, ASKED, "code", DEADLINE_S)
    assert str(declined.value) == why
    assert time.monotonic() - began < 4 * DEADLINE_S


def test_who_waits_is_told_apart_from_who_comes(folder: int) -> None:
    place = MeetingPlace(folder)
    place.listen()
    came = MeetingPlace(folder).connect(DEADLINE_S)
    assert came is not None
    accepted = place.accept()
    assert accepted is not None
    assert peer(came) == peer(accepted) == (os.getpid(), os.geteuid())
    came.close()
    accepted.close()
    place.leave()


def test_the_stamp_of_our_files_stays_as_they_do() -> None:
    assert code_stamp() == code_stamp()


def _keeper(folder: int, gate: int, waits: int) -> int:
    """Fork a keeper that begins to wait when the gate opens, says so, and ends when it is told to."""
    child = os.fork()
    if child == 0:
        os.read(gate, 1)
        listener = MeetingPlace(folder).listen()
        os.write(waits, b"x")
        select.select([listener], [], [])
        os._exit(0)
    return child


def test_of_keepers_that_begin_to_wait_at_once_one_stays(folder: int, tmp_path: Path) -> None:
    for _ in range(40):
        gate, opened = os.pipe()
        waiting, waits = os.pipe()
        os.set_blocking(waiting, False)
        keepers = [_keeper(folder, gate, waits) for _ in range(4)]
        os.write(opened, b"xxxx")
        end = time.monotonic() + 5.0
        said = b""
        try:
            while len(keepers) > 1 or len(said) < 4:
                with contextlib.suppress(BlockingIOError):
                    said += os.read(waiting, 4)
                assert time.monotonic() < end, keepers
                keepers = [pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        finally:
            for pid in keepers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for fd in (gate, opened, waiting, waits):
                os.close(fd)
        assert os.listdir(tmp_path) == ["held"]
