"""What a worker answers when it is asked how far it has come, with real process groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron_elastic.worker import answer_questions as position
from unicron_elastic.worker import worlds
from unicron_elastic.worker.answer_questions import GROUPS_MAX, answer_questions
from unicron_elastic.worker.channel import INLINE_BYTES_MAX, Channel, ChannelClosed
from unicron_elastic.worker.collectives import recorder
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.instructions import AskPosition, MakeSnapshot, SnapshotOffers
from unicron_elastic.worker.notices import Position

DEADLINE_S = 30.0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recorder, "_numbers", recorder._Numbers())  # nothing of an earlier test's groups
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Control]]:
    agents, workers = Channel.pair()
    agents.settimeout(DEADLINE_S)
    control = Control(os.dup(workers.fileno()))
    workers.close()
    yield agents, control
    agents.close()  # ends the thread that answers
    control.close()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def until_threads(count: int) -> None:
    """A thread that is no ``threading.Thread`` can only be counted."""
    end = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if threads() <= count:
            return
        end.wait(0.005)
    pytest.fail(f"{threads()} threads, {count} wanted")


def test_without_torch_distributed_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    assert position.position() == ()


def test_without_a_group_there_is_nothing_to_say() -> None:
    assert position.position() == ()


@pytest.mark.usefixtures("group")
def test_each_collective_counts_in_its_group() -> None:
    assert [(each.begun, each.ended) for each in position.position()] == [(0, 0)]
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    recorder.learn()
    (now,) = position.position()
    assert now.begun == 3
    assert now.begun - 2 <= now.ended <= now.begun  # gloo's threads count these, at times out of order
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    recorder.learn()
    first, second = position.position()
    assert first.name == now.name
    assert second.begun == 1
    assert second.ended in (0, 1)


@pytest.mark.usefixtures("group")
def test_a_back_end_without_a_recorder_tells_what_has_begun() -> None:
    dist.all_reduce(torch.ones(1))
    (world,) = position.position(lambda _names: {})
    assert (world.begun > 0, world.ended) == (True, None)


@pytest.mark.usefixtures("group")
def test_questions_are_answered_while_the_main_thread_waits(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    before = set(threading.enumerate())
    answer_questions(control)
    assert set(threading.enumerate()) <= before  # a script that counts its threads does not see it
    for number in (1, 2, 3):
        agents.send(AskPosition(question=number))
        answer = agents.hear([Position])
        assert isinstance(answer, Position)
        assert (answer.question, answer.uses_gpu, len(answer.groups)) == (number, False, 1)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b'i{"is": "AskPosition", "question": "x"}', "AskPosition.question is not a whole number"),
        (b'i{"is": "ServeState", "newcomer": 1}', "ServeState.key is missing"),
        (b'i{"is": "NewWorld", "world": {"number": 0}, "name": "a"}', "NewWorld.world: a world's number must be 1"),
        (b'i{"is": "BePatient"}', "BePatient.patience_s is missing"),
        (b'i{"is": "SnapshotOffers", "slots": [{}]}', "SnapshotOffers.slots[0] is not a whole number"),
        (b'i{"hello": "from another agent"}', "it is of no kind that is known here"),
        (b"i[", "not a message"),
    ],
)
def test_what_is_no_order_of_ours_is_told_once_and_the_next_one_is_carried_out(
    ends: tuple[Channel, Control], capsys: pytest.CaptureFixture[str], packet: bytes, why: str
) -> None:
    agents, control = ends
    answer_questions(control)
    for number in (7, 8):
        agents._sock.send(packet)
        agents.send(AskPosition(question=number))
        assert agents.hear([Position]) == Position(question=number, groups=(), uses_gpu=False, is_at_prompt=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"unicron: what the agent said is left out: {why}")
    assert line.endswith(".")


def test_an_order_that_cannot_be_carried_out_is_told_once_and_the_next_one_is(
    ends: tuple[Channel, Control], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    def fail() -> bool:
        raise RuntimeError("can't start new thread")

    agents, control = ends
    worlds.offer(control, lambda: None)
    to_agent = worlds.link()
    assert to_agent is not None
    request.addfinalizer(worlds._links.clear)
    to_agent.on_save = fail
    answer_questions(control)
    for number in (7, 8):
        agents.send(MakeSnapshot())
        agents.send(AskPosition(question=number))
        assert isinstance(agents.hear([Position]), Position)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "unicron: what the agent wants is not done: RuntimeError: can't start new thread."


def test_descriptors_that_come_for_a_script_that_asks_for_none_are_closed(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    answer_questions(control)
    read, write = os.pipe()
    agents.send(SnapshotOffers(fds=(write,)))
    os.close(write)
    agents.send(AskPosition(question=1))
    assert isinstance(agents.hear([Position]), Position)
    assert os.read(read, 1) == b""  # no copy is open
    os.close(read)


def test_who_cannot_say_where_it_is_answers_nevertheless(
    ends: tuple[Channel, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    agents, control = ends
    monkeypatch.setattr(position, "position", fail)
    answer_questions(control)
    agents.send(AskPosition(question=1))
    assert agents.hear([Position]) == Position(question=1, groups=(), uses_gpu=False, is_at_prompt=False)


def test_the_answer_of_a_worker_with_many_groups_is_bounded(
    ends: tuple[Channel, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Named(f"{number:040x}") for number in range(5 * GROUPS_MAX)]
    world: Any = SimpleNamespace(_world=SimpleNamespace(pg_map=dict.fromkeys(many)))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", world)
    agents, control = ends
    answer_questions(control)
    agents.send(AskPosition(question=1))
    packet = agents._sock.recv(1 << 20)
    assert len(packet) <= INLINE_BYTES_MAX  # one packet, no file
    agents.send(AskPosition(question=2))
    found = agents.hear([Position])
    assert isinstance(found, Position)
    assert [group.name for group in found.groups] == [group.group_name for group in many[:GROUPS_MAX]]


class Named:
    """A process group."""

    def __init__(self, name: str) -> None:
        self.group_name = name

    def _get_sequence_number_for_group(self) -> int:
        return 2**40


@pytest.mark.parametrize("how", ["the agent is gone", "the script closed it", "it was closed here", "it was reused"])
def test_it_ends_with_the_channel(how: str, tmp_path: Path) -> None:
    before = threads()
    agents, workers = Channel.pair()
    control = Control(os.dup(workers.fileno()))
    workers.close()
    number = control._channel.fileno()
    with open(tmp_path / "file", "wb") as file:
        answer_questions(control)
        if how == "the script closed it":
            os.close(number)
        elif how == "it was closed here":
            control.close()
        elif how == "it was reused":
            os.dup2(file.fileno(), number)
        if how != "the agent is gone":
            with contextlib.suppress(ChannelClosed):  # the thread had not begun to wait
                agents.send(AskPosition(question=1))
        agents.close()
        until_threads(before)
        if how == "it was reused":
            os.write(number, b"the script's own")
            os.close(number)
    assert (tmp_path / "file").read_bytes() == (b"the script's own" if how == "it was reused" else b"")
    control.close()


def test_a_closed_channel_is_no_reason_to_spin() -> None:
    agents, workers = Channel.pair()
    control = Control(os.dup(workers.fileno()))
    workers.close()
    control.close()
    before = threads()
    answer_questions(control)
    until_threads(before)
    agents.close()


def test_a_process_that_the_script_forks_does_not_answer(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    answer_questions(control)
    agents.send(AskPosition(question=1))
    assert isinstance(agents.hear([Position]), Position)
    os.register_at_fork(after_in_child=control.close)  # as the bootstrap does
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        threading.Event().wait()
    try:
        control.close()  # the worker itself says no more
        with contextlib.suppress(ChannelClosed):  # wakes the thread, if it still has the closed socket in its hand
            agents.send(AskPosition(question=2))
        with pytest.raises(ChannelClosed):
            agents.receive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_whether_a_gpu_is_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert position._uses_gpu()
    fake: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert not position._uses_gpu()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pdb; pdb.set_trace(); end = 1", True),
        ("import code; code.interact(banner='')", True),
        ("import pdb, sys; sys.modules['not_here'] = None; pdb.set_trace(); end = 1", True),
        ("import pdb, threading; print('(Pdb)', flush=True); threading.Event().wait()", False),
        ("import pdb, sys; print('(Pdb)', flush=True); sys.stdin.read()", False),
    ],
)
def test_a_debuggers_prompt_is_known_by_its_frames(code: str, expected: bool) -> None:
    program = (
        "import _thread, os, sys\nsys.ps1 = '(Pdb)'\nfrom unicron_elastic.worker.answer_questions import is_at_prompt\n"
        "def look():\n    import time\n    end = time.monotonic() + 1.0\n"
        f"    while is_at_prompt() is not {expected} and time.monotonic() < end:\n        time.sleep(0.01)\n"
        f"    os._exit(7 if is_at_prompt() is {expected} else 8)\n"
        f"import threading\n_thread.start_new_thread(look, ())\n{code}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.wait(DEADLINE_S) == 7
    assert process.stdin is not None
    process.stdin.close()
