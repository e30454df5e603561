"""The worker's end of the control channel against scripts that close or reuse descriptors."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.control import SEND_TIMEOUT_S, Control
from unicron_elastic.worker.instructions import INSTRUCTIONS, AskPosition
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.notices import Ending, Left


@pytest.fixture
def ends() -> tuple[Channel, Control]:
    agents, workers = Channel.pair()
    agents.settimeout(10.0)
    fd = os.dup(workers.fileno())
    workers.close()
    return agents, Control(fd)


def fd_of(control: Control) -> int:
    return control._channel.fileno()


def test_it_speaks_to_the_agent(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    control.send(Left())
    assert agents.hear([Left]) == Left()
    control.close()
    with pytest.raises(ChannelClosed):
        agents.receive()
    with pytest.raises(ChannelClosed, match="closed the control channel"):
        control.send(Left())


def test_a_closed_descriptor_is_not_spoken_to(ends: tuple[Channel, Control]) -> None:
    _, control = ends
    os.close(fd_of(control))
    with pytest.raises(ChannelClosed, match="closed the control channel"):
        control.send(Left())
    control.close()


def test_a_file_of_the_scripts_under_the_same_number_is_left_alone(
    ends: tuple[Channel, Control], tmp_path: Path
) -> None:
    _, control = ends
    number = fd_of(control)
    path = tmp_path / "file"
    with open(path, "wb") as file:
        os.dup2(file.fileno(), number)
        with pytest.raises(ChannelClosed):
            control.send(Left())
        control.close()
        os.write(number, b"still open")
        os.close(number)
    assert path.read_bytes() == b"still open"


def test_the_interpreter_does_not_end_before_an_answer_that_is_under_way(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    order: list[str] = []
    is_answering = threading.Event()

    def answer() -> None:
        with control.answering():
            is_answering.set()
            agents.hear([Ending])
            order.append("answered")

    thread = threading.Thread(target=answer)
    thread.start()
    assert is_answering.wait(10.0)
    control.say_goodbye(Ending())
    order.append("ends")
    thread.join()
    assert order == ["answered", "ends"]
    with pytest.raises(ChannelClosed), control.answering():
        pass


def test_a_descriptor_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match=r"."):
        Control(file.fileno())


def test_it_waits_for_what_the_agent_says(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    later = threading.Timer(
        SEND_TIMEOUT_S + 0.1, lambda: agents.send(AskPosition(question=1))
    )  # it has no deadline of its own
    later.start()
    assert control.wait(INSTRUCTIONS) == AskPosition(question=1)
    later.join()


def test_what_was_said_before_is_there_at_once_and_in_order(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    for number in range(3):
        agents.send(AskPosition(question=number))
    assert [control.wait(INSTRUCTIONS) for _ in range(3)] == [AskPosition(question=number) for number in range(3)]


def test_descriptors_that_come_with_it_are_closed(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    before = os.listdir("/proc/self/fd")
    read, write = os.pipe()
    socket.send_fds(agents._sock, [b'i{"is": "AskPosition", "question": 1}'], [write])
    os.close(write)
    assert control.wait(INSTRUCTIONS) == AskPosition(question=1)
    assert os.read(read, 1) == b""  # no copy is open
    os.close(read)
    assert os.listdir("/proc/self/fd") == before


def test_the_end_of_the_agent_ends_the_wait(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    later = threading.Timer(0.05, agents.close)
    later.start()
    with pytest.raises(ChannelClosed):
        control.wait(INSTRUCTIONS)
    later.join()


def test_what_is_no_message_is_told_and_the_next_one_heard(ends: tuple[Channel, Control]) -> None:
    agents, control = ends
    agents._sock.send(b"i[")
    agents.send(AskPosition(question=1))
    said = control.wait(INSTRUCTIONS)
    assert isinstance(said, Odd)
    assert said.why.startswith("not a message")
    assert control.wait(INSTRUCTIONS) == AskPosition(question=1)


def test_a_script_that_closes_the_descriptor_meanwhile_is_not_disturbed(
    ends: tuple[Channel, Control], tmp_path: Path
) -> None:
    agents, control = ends
    number = fd_of(control)
    path = tmp_path / "file"
    with open(path, "wb") as file:

        def reuse() -> None:
            os.dup2(file.fileno(), number)
            agents.send(AskPosition(question=1))

        later = threading.Timer(0.05, reuse)
        later.start()
        with pytest.raises(ChannelClosed):
            control.wait(INSTRUCTIONS)
        later.join()
        os.write(number, b"still open")
        os.close(number)
    assert path.read_bytes() == b"still open"
