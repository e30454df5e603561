"""Whoever is killed, and whatever workers have started: nothing lives on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from conftest import HAS_SHUTDOWN_TIMEOUT

CHILDREN = """
import os, subprocess, time
for number in range(20):
    subprocess.Popen(["sleep", "600"], start_new_session=bool(number % 2))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.write(1, f"UP {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\\n".encode())
time.sleep(600)
"""

DEAF = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.write(1, f"HEARD {number}\\n".encode()))
os.write(1, b"UP\\n")
while True:
    signal.pause()
"""


def test_killed_agent_takes_everything_along(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", launcher.script("children.py", CHILDREN))
    run.until_line(r"^UP 0", count=2)
    assert len(run.carriers()) > 40
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    run.assert_gone()


def test_killed_keeper_costs_one_restart(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", "--max-restarts=1", launcher.script("children.py", CHILDREN))
    first = {int(pid) for pid in run.until_line(r"^UP 0 (\d+)", count=2)}
    os.kill(run.named("unicron-keeper"), signal.SIGKILL)
    run.until_line(r"^UP 1", count=2)
    assert not first & set(run.carriers())
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1


def test_killed_keeper_at_start_is_one_sentence(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=1", launcher.script("good.py", "print('UP', flush=True)\n"))
    os.kill(run.named("unicron-keeper"), signal.SIGKILL)
    run.wait()
    assert "Traceback" not in run.err


def test_interrupt_before_the_job_began_ends_as_any_program(launcher: Any) -> None:
    waits = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")  # for a node that never comes
    run = launcher.start(*waits, "--nproc-per-node=1", launcher.script("good.py", "print('UP', flush=True)\n"))
    run.named("unicron-keeper")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == -signal.SIGINT
    assert "Traceback" not in run.err
    assert "UP" not in run.out


def test_killed_warm_process_is_replaced_by_plain_starts(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", "--max-restarts=2", launcher.script("children.py", CHILDREN))
    pids = run.until_line(r"^UP 0 (\d+)", count=2)
    os.kill(run.named("unicron-warm"), signal.SIGKILL)
    os.kill(int(pids[0]), signal.SIGKILL)
    run.until_line(r"^UP 1", count=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGHUP", "SIGQUIT"))]
)
def test_handled_signal_lets_workers_save_and_exits_1(launcher: Any, name: str) -> None:
    launcher.script(
        "save.py",
        "import os, signal, sys, time\n"
        f"def save(*_):\n    os.write(1, b'SAVED\\n')\n    sys.exit(0)\nsignal.signal(signal.{name}, save)\n"
        "os.write(1, b'UP\\n')\ntime.sleep(600)\n",
    )
    run = launcher.start("--nproc-per-node=2", "save.py")
    run.until_line(r"^UP", count=2)
    run.process.send_signal(getattr(signal, name))
    assert run.wait() == 1
    assert run.out.count("SAVED") == 2


def test_unhandled_signal_kills_launcher_and_workers(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", launcher.script("children.py", CHILDREN))
    run.until_line(r"^UP 0", count=2)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == -signal.SIGUSR1
    run.assert_gone()


@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")], ids="-".join)
def test_second_signal_lets_workers_save_as_under_torchrun(launcher: Any, names: tuple[str, str]) -> None:
    launcher.script(
        "save.py",
        "import os, signal, sys\n"
        "heard = []\n"
        "def save(number, _):\n"
        "    heard.append(signal.Signals(number).name)\n"
        "    os.write(1, f'HEARD {heard[-1]}\\n'.encode())\n"
        "    if len(heard) == 2:\n"
        "        os.write(1, f'SAVED {heard}\\n'.encode())\n"
        "        sys.exit(0)\n"
        "signal.signal(signal.SIGINT, save)\nsignal.signal(signal.SIGTERM, save)\n"
        "os.write(1, b'UP\\n')\nwhile True:\n    signal.pause()\n",
    )
    run = launcher.start("--nproc-per-node=2", "save.py")
    run.until_line(r"^UP", count=2)
    run.process.send_signal(getattr(signal, names[0]))
    run.until_line(rf"^HEARD {names[0]}", count=2)
    run.process.send_signal(getattr(signal, names[1]))
    assert run.wait(20) == 1
    assert run.out.count(f"SAVED {[names[0], 'SIGTERM']}") == 2
    assert f"A second signal ({names[1]}) came: the workers get SIGTERM, and are killed in 30 seconds" in run.err


def _interrupted_twice(launcher: Any, shutdown_timeout_s: int) -> Any:
    """Workers that ignore all signals, and were told to end twice."""
    launcher.script("deaf.py", DEAF)
    run = launcher.start("--nproc-per-node=2", f"--shutdown-timeout={shutdown_timeout_s}", "deaf.py")
    run.until_line(r"^UP", count=2)
    run.process.send_signal(signal.SIGINT)
    run.until_line(r"^HEARD 2$", count=2)
    run.process.send_signal(signal.SIGINT)
    return run


def test_second_signal_gives_workers_the_shutdown_timeout(launcher: Any) -> None:
    run = _interrupted_twice(launcher, 1)
    assert run.wait(20 if HAS_SHUTDOWN_TIMEOUT else 50) == 1
    run.assert_gone()


def test_third_signal_kills_workers_that_ignore_the_others(launcher: Any) -> None:
    run = _interrupted_twice(launcher, 600)
    run.until_line(r"^HEARD 15$", count=2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 1
    assert "One more signal (SIGINT) came: the workers are killed now." in run.err
    run.assert_gone()


def test_exit_heard_in_two_ways_at_once_is_one_fault(launcher: Any) -> None:
    run = launcher.start("--nproc-per-node=2", "--max-restarts=1", launcher.script("children.py", CHILDREN))
    pids = run.until_line(r"^UP 0 (\d+)", count=2)
    run.process.send_signal(signal.SIGSTOP)  # so that the exit and the end of the control channel wait for it together
    os.kill(int(pids[0]), signal.SIGKILL)
    run.process.send_signal(signal.SIGCONT)
    run.until_line(r"^UP 1", count=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    assert "stopped: " in run.err
