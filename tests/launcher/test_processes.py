"""The keeper with real processes: starts, exits, what is left behind, and every order of deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unicron_elastic.launcher.agent.process.processes import KeeperLost
from unicron_elastic.worker.process.mark import MARK, token_of

if TYPE_CHECKING:
    from conftest import Lab

# A worker that leaves a daemon behind, in a session of its own and no child of anybody, and tells its pid on fd 5.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(5, b"%d\\n" % os.getpid())
        os.close(5)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_exit_codes_and_their_times_are_reported(lab: Lab) -> None:
    before = time.monotonic()
    codes = {
        lab.start_python(code): expected
        for code, expected in (
            ("pass", 0),
            ("import os; os._exit(7)", 7),
            ("import os; os.kill(os.getpid(), 9)", -9),
            ("import os; os.abort()", -6),
        )
    }
    for pid, expected in codes.items():
        ended = lab.exit_of(pid)
        assert ended.exit_code == expected
        assert before < ended.at < time.monotonic()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b'i{"is": "SweepAll", "number": 1, "keep": [{}]}', "SweepAll.keep[0] is not a whole number"),
        (b'i{"do": "start"}', "it is of no kind that is known here"),
        (b"i[", "not a message"),
    ],
)
def test_what_the_keeper_cannot_read_is_said_and_it_goes_on(
    capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest, packet: bytes, why: str
) -> None:
    lab = request.getfixturevalue("lab")  # a keeper that is begun now writes where this test reads
    assert lab.processes._channel is not None
    lab.processes._channel._sock.send(packet)
    assert lab.exit_of(lab.start_python("pass")).exit_code == 0
    assert f"unicron keeper: what the agent asks is left out: {why}" in capfd.readouterr().err


def test_a_program_gets_what_it_was_promised(lab: Lab, pipe: tuple[int, int], tmp_path: Path) -> None:
    code = (
        "import json, os, signal\n"
        "os.write(5, json.dumps([dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(),"
        " [signal.getsignal(n) == signal.SIG_DFL for n in (15, 1, 17, 20)],"
        " sorted(int(fd) for fd in os.listdir('/proc/self/fd'))]).encode() + b'\\n')\n"
    )
    big = "x" * 100_000  # an environment that fits no packet
    env = {"BIG": big, "ODD": "\udcff", "PATH": os.environ["PATH"]}
    pid = lab.start([sys.executable, "-S", "-c", code], {5: pipe[1]}, env, str(tmp_path))
    told = json.loads(lab.read_line(pipe[0]))
    assert token_of(told[0].pop(MARK)) == lab.processes.token
    told[0].pop("LC_CTYPE", None)  # Python's own, in the C locale
    assert told[0] == env
    assert told[1] == str(tmp_path)
    assert told[2] is True
    # The keeper ignores these; a worker only what this process does, which may run under nohup.
    assert told[3] == [signal.getsignal(number) != signal.SIG_IGN for number in (15, 1, 17, 20)]
    assert told[4] == [0, 2, 5]  # 0 is the folder that is being listed, 2 the launcher's own
    assert lab.exit_of(pid).exit_code == 0


def test_descriptors_may_trade_numbers(lab: Lab) -> None:
    first, second = os.pipe(), os.pipe()
    numbers = {first[1]: second[1], second[1]: first[1]}
    lab.start_python(f"import os; os.write({first[1]}, b'2\\n'); os.write({second[1]}, b'1\\n')", numbers)
    assert (lab.read_line(first[0]), lab.read_line(second[0])) == ("1", "2")
    for fd in (*first, *second):
        os.close(fd)


def test_many_descriptors_all_arrive_at_their_numbers(lab: Lab) -> None:
    numbers = range(30, 14, -1)  # among them, the other way round, are numbers under which the keeper holds them
    pipes = {number: os.pipe() for number in numbers}
    code = f"import os\nfor n in {list(numbers)}: os.write(n, b'%d\\n' % n)"
    lab.start_python(code, {number: ends[1] for number, ends in pipes.items()})
    assert {number: lab.read_line(ends[0]) for number, ends in pipes.items()} == {n: str(n) for n in numbers}
    for ends in pipes.values():
        os.close(ends[0])
        os.close(ends[1])


def test_an_ignored_signal_stays_ignored(lab: Lab, pipe: tuple[int, int]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        code = "import os, signal; os.write(5, b'%d\\n' % (signal.getsignal(1) == signal.SIG_IGN))"
        lab.start_python(code, {5: pipe[1]})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert lab.read_line(pipe[0]) == "1"


def test_what_cannot_be_started_gives_the_systems_error(lab: Lab, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        lab.start(["no-such-program"])
    with pytest.raises(PermissionError):
        lab.start([str(plain)])
    with pytest.raises(FileNotFoundError):
        lab.start([sys.executable], cwd=str(tmp_path / "nowhere"))
    assert lab.exit_of(lab.start_python("pass")).exit_code == 0  # and the keeper goes on


def test_many_at_once(lab: Lab) -> None:
    numbers = [lab.processes.request_start(["/bin/true"], {}, "/", {}) for _ in range(20)]
    pids = [lab.processes.wait_for_pid(number, "true") for number in numbers]
    assert len(set(pids)) == 20
    for pid in pids:
        assert lab.exit_of(pid).exit_code == 0


def test_a_sweep_kills_daemons_and_keeps_whom_it_should(lab: Lab, pipe: tuple[int, int]) -> None:
    kept = lab.start(["/bin/sleep", "600"])
    worker = lab.start_python(DAEMON, {5: pipe[1]})
    daemon = int(lab.read_line(pipe[0]))
    assert lab.exit_of(worker).exit_code == 0
    assert lab.is_alive(daemon)
    lab.processes.sweep([kept])
    assert not lab.is_alive(daemon)
    assert lab.is_alive(kept)
    os.kill(kept, signal.SIGTERM)
    assert lab.exit_of(kept).exit_code == -signal.SIGTERM  # its end is still reported


def test_a_sweep_lets_shared_memory_be_given_back(lab: Lab) -> None:
    # The segments of a killed worker are removed by its resource tracker, which therefore has to outlive it.
    code = (
        "import os, multiprocessing.shared_memory as m\n"
        "segment = m.SharedMemory(create=True, size=100)\n"
        "os.write(5, segment.name.encode() + b'\\n')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    segments: list[Path] = []
    try:
        for _ in range(3):
            read_end, write_end = os.pipe()
            null = os.open(os.devnull, os.O_WRONLY)
            pid = lab.start_python(code, {2: null, 5: write_end})
            os.close(null)
            os.close(write_end)
            segments.append(Path("/dev/shm") / lab.read_line(read_end).lstrip("/"))
            os.close(read_end)
            lab.exit_of(pid)
            lab.processes.sweep([])
        deadline = time.monotonic() + 20.0
        while any(segment.exists() for segment in segments) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [segment for segment in segments if segment.exists()] == []
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)


def test_the_end_takes_everything_along(lab: Lab, pipe: tuple[int, int]) -> None:
    worker = lab.start(["/bin/sleep", "600"])
    lab.start_python(DAEMON, {5: pipe[1]})
    daemon = int(lab.read_line(pipe[0]))
    lab.processes.end()
    assert not lab.processes.is_up
    assert not lab.is_alive(worker)
    assert not lab.is_alive(daemon)
    with pytest.raises(KeeperLost):
        lab.start(["/bin/true"])
    lab.processes.end()  # a second time is no error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_everybody_do_not_end_the_keeper(lab: Lab, number: signal.Signals) -> None:
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0  # it is up
    os.kill(lab.processes.keeper_pid, number)
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0


def test_empty_folders_go_and_full_ones_stay(lab: Lab, tmp_path: Path) -> None:
    empty, full = tmp_path / "empty" / "attempt_0" / "0", tmp_path / "full" / "attempt_0"
    empty.mkdir(parents=True)
    full.mkdir(parents=True)
    (full / "stdout.log").touch()
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0  # it is up
    lab.processes.remember(paths=[str(tmp_path / "empty"), str(tmp_path / "full")])
    lab.processes.end()
    assert not (tmp_path / "empty").exists()
    assert (full / "stdout.log").exists()


OWNER = """
import os, sys
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.agent.process.processes import Processes
loop = Loop()
processes = Processes(loop, lambda ended: None)
processes.begin()
worker = processes.request_start([sys.executable, "-S", "-c", sys.argv[1]], os.environ, "/", {5: 1})
pid = processes.wait_for_pid(worker, "worker")
os.write(1, b"%d %d\\n" % (processes.keeper_pid, pid))
loop.run_until(lambda: False)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_owner(lab: Lab, number: signal.Signals) -> None:
    code = DAEMON + "time.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", OWNER, code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        lines = sorted((lab.read_line(owner.stdout.fileno()) for _ in range(2)), key=len)
        pids = [int(pid) for line in lines for pid in line.split()]
        assert len(pids) == 3
        owner.send_signal(number)
        for pid in pids:
            lab.wait_for_death(pid)


def test_workers_die_with_the_keeper_when_nobody_can_act(lab: Lab) -> None:
    code = "import os, time; os.write(5, b'up\\n'); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", OWNER, code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        lines = {lab.read_line(owner.stdout.fileno()) for _ in range(2)}
        keeper, worker = map(int, (lines - {"up"}).pop().split())
        owner.send_signal(signal.SIGSTOP)
        try:
            os.kill(keeper, signal.SIGKILL)
            lab.wait_for_death(worker)
        finally:
            owner.kill()


def test_an_owner_that_ends_at_once_leaves_no_word_on_the_terminal() -> None:
    code = """
import os
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.agent.process.processes import Processes
processes = Processes(Loop(), lambda ended: None)
processes.begin()
os._exit(0)
"""
    # run() waits until the last holder of stderr, the keeper, has ended as well.
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_nothing_survives_the_keeper(lab: Lab, pipe: tuple[int, int]) -> None:
    workers = [lab.start(["/bin/sleep", "600"]) for _ in range(2)]
    workers.append(lab.start_python(DAEMON + "time.sleep(600)\n", {5: pipe[1]}))
    daemon = int(lab.read_line(pipe[0]))
    lost_at = time.monotonic()
    os.kill(lab.processes.keeper_pid, signal.SIGKILL)
    for pid in workers:
        ended = lab.exit_of(pid)
        assert ended.exit_code == -signal.SIGKILL
        assert lost_at < ended.at
        lab.wait_for_death(pid)
    assert not lab.processes.is_up
    lab.wait_for_death(daemon)  # it hangs on init now, and is known by its mark
    with pytest.raises(KeeperLost):
        lab.start(["/bin/true"])
    lab.processes.sweep([])

    lab.begin()  # a new keeper takes over
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0


def test_a_start_that_the_keeper_does_not_live_to_answer(lab: Lab) -> None:
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0  # it is up
    os.kill(lab.processes.keeper_pid, signal.SIGSTOP)
    number = lab.processes.request_start(["/bin/true"], {}, "/", {})
    os.kill(lab.processes.keeper_pid, signal.SIGKILL)
    with pytest.raises(KeeperLost):
        lab.processes.wait_for_pid(number, "true")


def test_a_file_in_the_current_folder_does_not_stand_in_for_the_standard_library(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.processes.end()
    (tmp_path / "selectors.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    lab.begin()
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0


def test_the_path_of_the_user_is_not_cut(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the current folder on the path there is nothing to take off it.
    lab.processes.end()
    popped = tmp_path / "popped"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Watched(list):\n"
        "    def pop(self, *where):\n"
        "        gone = list.pop(self, *where)\n"
        f"        open({str(popped)!r}, 'a').write(gone + '\\n')\n"
        "        return gone\n"
        "sys.path = Watched(sys.path)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    lab.begin()
    assert lab.exit_of(lab.start(["/bin/true"])).exit_code == 0
    assert not popped.exists() or str(tmp_path) not in popped.read_text().split()
