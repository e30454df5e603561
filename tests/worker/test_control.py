"""The worker's end of the control channel against scripts that close or reuse descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.control import Control


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
    control.send({"hello": 1})
    assert agents.receive() == ({"hello": 1}, [])
    control.close()
    with pytest.raises(ChannelClosed):
        agents.receive()
    with pytest.raises(ChannelClosed, match="closed the control channel"):
        control.send({"hello": 2})


def test_a_closed_descriptor_is_not_spoken_to(ends: tuple[Channel, Control]) -> None:
    _, control = ends
    os.close(fd_of(control))
    with pytest.raises(ChannelClosed, match="closed the control channel"):
        control.send({"hello": 1})
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
            control.send({"hello": 1})
        control.close()
        os.write(number, b"still open")
        os.close(number)
    assert path.read_bytes() == b"still open"


def test_a_descriptor_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match=r"."):
        Control(file.fileno())
