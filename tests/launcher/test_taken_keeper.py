"""A keeper that is no child of this process: it is signalled and waited for by the kernel's descriptor of it."""

from __future__ import annotations

import signal
import subprocess

import pytest

from unicron_elastic.launcher.agent.held.taken_keeper import TakenKeeper


def test_it_is_waited_for_and_killed() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        keeper = TakenKeeper(process.pid)
        keeper.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(0.01)
        assert keeper.returncode is None
        keeper.kill()
        assert keeper.wait(30.0) == 0
        keeper.kill()  # of one that has ended nothing comes
        assert keeper.wait(0.0) == 0
        assert process.wait(30.0) == -signal.SIGKILL


def test_one_that_has_ended_and_was_collected_is_none() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait(30.0)
        with pytest.raises(OSError, match="No such process"):
            TakenKeeper(process.pid)
