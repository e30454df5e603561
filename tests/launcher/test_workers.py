"""The workers of one generation, as real processes: started, heard, ended, cleared away."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

from unicron_elastic.launcher.agent.process.activity import is_ending
from unicron_elastic.launcher.agent.process.helper import HelperPatience
from unicron_elastic.launcher.agent.process.processes import Exit
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.agent.process.workers import WorkerProcess, WorkersContext
from unicron_elastic.launcher.config.options import Options
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.notices import Notice, Raised

if TYPE_CHECKING:
    from conftest import Lab

DEADLINE_S = 30.0
BRIEF = HelperPatience(woken_s=0.4, stopped_s=0.8, given_up_s=0.8)  # with helpers that owe an answer
_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207  # Linux's include/uapi/linux/ptrace.h
WAIT = "import time; time.sleep(600)"
# Its interpreter shuts down and does not come to an end.
LINGER = """
import signal, sys
class Lingers:
    def __del__(self, pause=signal.pause):
        pause()
sys.it = Lingers()
raise SystemExit(7)
"""
# Leaves a process behind that is nobody's child and in a session of its own, and says its pid.
LEAVE_A_DAEMON = """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        os.close(1)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
# Starts a child, one in a session of its own, one that knows nothing of the run and a daemon, and says their pids.
START_HELPERS = """
import subprocess, time
pids = [subprocess.Popen(["sleep", "600"], **options).pid for options in ({}, {"start_new_session": True}, {"env": {}})]
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write_end, b"%d" % os.getpid())
        time.sleep(600)
    os._exit(0)
os.wait()
print(*pids, int(os.read(read_end, 20)), flush=True)
"""


class Node:
    """A runtime, its generations of workers, and all that was heard of them in order."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.runtime = Runtime(options, BRIEF, replace(BRIEF, given_up_s=30.0))
        script = folder / "train.py"
        script.write_text("import os\nexec(os.environ['CODE'])\n")
        self.command = (sys.executable, "-u", str(script))  # the same for all, as the warm process wants it
        self.contexts: list[WorkersContext] = []
        self.heard: list[tuple[int, str, Any]] = []  # (local rank, what, more)
        self.ending: list[int] = []  # local ranks
        self.ending_when_raised: list[int] = []  # as it was when an exception was heard
        self.raised_in: list[int] = []  # pids

    def workers(self, *codes: str, entrypoint: str = sys.executable, redirects: Std = Std.ALL) -> WorkersContext:
        """A generation, not yet started, of one worker for each piece of Python."""
        args: dict[int, tuple[Any, ...]] = dict.fromkeys(range(len(codes)), self.command[1:])
        envs = {local: {"RANK": str(local), "CODE": code} for local, code in enumerate(codes)}
        context = WorkersContext(
            runtime=self.runtime,
            on_exit=self._exited,
            on_message=self._said,
            on_ending=self._ending,
            on_replaced=self._replaced,
            name="trainer",
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder), redirects=redirects),
        )
        self.contexts.append(context)
        return context

    def start(self, *codes: str, **options: Any) -> WorkersContext:
        context = self.workers(*codes, **options)
        context.start()
        return context

    def _exited(self, worker: WorkerProcess, ended: Exit) -> None:
        self.heard.append((worker.local_rank, "exit", ended.exit_code))

    def _replaced(self, worker: WorkerProcess) -> None:
        self.heard.append((worker.local_rank, "replaced", worker.reading()))

    def _ending(self, worker: WorkerProcess) -> None:
        self.ending.append(worker.local_rank)

    def _said(self, worker: WorkerProcess, said: Notice | Odd) -> None:
        if isinstance(said, Raised):
            self.heard.append((worker.local_rank, "exception", said.exception))
            self.raised_in.append(worker.pid)
            self.ending_when_raised = list(self.ending)
        else:
            self.heard.append((worker.local_rank, type(said).__name__, said))

    def wait(self, condition: Callable[[], object]) -> None:
        assert self.runtime.loop.run_until(lambda: bool(condition()), time.monotonic() + DEADLINE_S), self.heard

    def exits(self) -> dict[int, int]:
        return {local: code for local, what, code in self.heard if what == "exit"}

    def wait_for_exits(self, count: int) -> dict[int, int]:
        self.wait(lambda: len(self.exits()) == count)
        return self.exits()

    def said_by(self, local_rank: int) -> list[str]:
        return [what for local, what, _ in self.heard if local == local_rank]

    def output(self, local_rank: int) -> str:
        """The line that a worker wrote first to its log file."""
        path = self.contexts[-1].stdouts[local_rank]
        self.wait_for_line(path)
        return Path(path).read_text().splitlines()[0]

    def wait_for_line(self, path: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not (os.path.exists(path) and "\n" in Path(path).read_text()):
            assert time.monotonic() < end, f"nothing came into {path}"
            self.runtime.loop.run_until(lambda: False, time.monotonic() + 0.01)

    def children(self) -> list[int]:
        """What the keeper still has as its children."""
        keeper = self.runtime.processes.keeper_pid
        return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Makes nodes whose warm process, if there is one, imports next to nothing."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    made: list[Node] = []

    def make(*, warm: bool = False, in_band: bool = True) -> Node:
        node = Node(tmp_path, Options(preload="colorsys", warm=warm, in_band=in_band))
        made.append(node)
        node.runtime.begin(node.command if warm else None, os.environ)
        return node

    yield make
    for node in made:
        for context in node.contexts:
            context.close(signal.SIGKILL)
        node.runtime.end()
    for number, handler in handlers.items():  # torch puts its own in place of them
        signal.signal(number, handler)


@pytest.fixture(params=[False, True], ids=["plain", "warm"])
def node(request: pytest.FixtureRequest, make_node: MakeNode) -> Node:
    """A node in each of the two ways to start workers."""
    return make_node(warm=request.param)


def _open_descriptors() -> set[str]:
    gc.collect()
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in _numbers() if os.path.lexists(f"/proc/self/fd/{fd}")}


def _numbers() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_every_end_is_reported_once_with_its_exit_code(node: Node) -> None:
    context = node.start("pass", "raise SystemExit(7)", "os.kill(os.getpid(), 9)", "os.abort()")
    assert all(worker.is_warm is (node.runtime.warm is not None) for worker in context.workers.values())
    assert node.wait_for_exits(4) == {0: 0, 1: 7, 2: -9, 3: -6}
    assert len([what for _, what, _ in node.heard if what == "exit"]) == 4
    assert {local: worker.poll() for local, worker in context.workers.items()} == {0: 0, 1: 7, 2: -9, 3: -6}
    result = context.wait(0)  # torch's own question
    assert {local: failure.exitcode for local, failure in result.failures.items()} == {1: 7, 2: -9, 3: -6}


def test_each_worker_has_its_environment_and_its_log_file(node: Node) -> None:
    node.start(*["import sys; print(os.environ['RANK'], os.getpid(), sys.argv)"] * 2)
    node.wait_for_exits(2)
    for local, pid in node.contexts[-1].pids().items():
        assert node.output(local) == f"{local} {pid} {[str(node.folder / 'train.py')]}"


def test_an_exception_is_heard_before_the_exit_that_it_causes(node: Node) -> None:
    node.start("raise ValueError('bad input')", "pass")
    node.wait_for_exits(2)
    assert node.said_by(0) == ["exception", "exit"]
    assert node.said_by(1) == ["exit"]
    told = next(message for local, what, message in node.heard if (local, what) == (0, "exception"))
    assert (told["type"], told["message"]) == ("ValueError", "bad input")


def test_who_is_ending_is_told_before_the_exception_of_another(node: Node) -> None:
    # As after a rank that left: its peer complains while the kernel, or the interpreter, is not done with it.
    context = node.start(LINGER, "import time; time.sleep(0.5); raise ValueError('a peer is gone')")
    node.wait(lambda: "exception" in node.said_by(1))
    assert node.ending_when_raised == [0]
    assert 0 not in node.exits()
    context.kill([0])
    node.wait_for_exits(2)


COMPLAINTS = {
    "exception": "raise ValueError('a peer is gone')",
    "Broke": "link().say(Broke(world=1, error='a peer is gone'))",
}
COMPLAINS = (
    "import os, time\nfrom unicron_elastic.worker.notices import Broke\n"
    "from unicron_elastic.worker.worlds import link\nprint('ready', flush=True)\n"
    "while not os.path.exists({go!r}): time.sleep(0.001)\n"
)


@pytest.mark.parametrize("what", COMPLAINTS)
def test_who_was_killed_is_told_to_end_before_another_complains(node: Node, what: str) -> None:
    """As where the kernel takes its time to take a large process down, and nobody has its exit yet."""
    go = node.folder / "go"
    context = node.start(WAIT, COMPLAINS.format(go=str(go)) + COMPLAINTS[what])
    assert node.output(1) == "ready"  # a keeper that is stopped is woken soon after a death
    killed, keeper = context.pids()[0], node.runtime.processes.keeper_pid
    os.kill(keeper, signal.SIGSTOP)
    try:
        os.kill(killed, signal.SIGKILL)
        node.wait(lambda: is_ending(killed))
        go.touch()
        node.wait(lambda: what in node.said_by(1))
        assert node.ending == [0]
        assert 0 not in node.exits()
    finally:
        os.kill(keeper, signal.SIGCONT)
    node.wait_for_exits(2)


def test_what_was_said_is_heard_first_even_if_the_agent_was_away(node: Node, lab: Lab) -> None:
    # The agent does not listen while the workers speak and end: the exit and the words are there at the same time.
    context = node.start(*["raise ValueError('bad input')"] * 2)
    for pid in context.pids().values():
        lab.wait_for_death(pid)
    node.wait_for_exits(2)
    for local in range(2):
        assert node.said_by(local) == ["exception", "exit"]


def test_words_that_are_none_of_ours_do_no_harm(make_node: MakeNode) -> None:
    node = make_node()
    node.start("for word in (b'x', b'i[]', b'f', b'i{\"other\": 7}'): os.write(3, word)\nos._exit(5)")
    assert node.wait_for_exits(1) == {0: 5}
    assert node.said_by(0) == [*["Odd"] * 4, "exit"]


@pytest.mark.parametrize("word", ['{"is": "Left"}', '{"is": "SnapshotMade"}', '{"other": 1}', "["])
def test_descriptors_that_come_with_what_needs_none_are_closed(make_node: MakeNode, word: str) -> None:
    node = make_node()
    node.start(
        f"import socket; file = open({str(node.folder / 'theirs')!r}, 'w');"
        f"socket.send_fds(socket.socket(fileno=3), [b'i' + {word.encode()!r}], [file.fileno()]); os._exit(5)"
    )
    assert node.wait_for_exits(1) == {0: 5}
    held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert str(node.folder / "theirs") not in held


def test_without_in_band_parts_nothing_is_attached(make_node: MakeNode) -> None:
    node = make_node(in_band=False)
    context = node.start("raise SystemExit('UNICRON_CONTROL_FD' in os.environ)")
    assert context.workers[0].reading() is None
    assert node.wait_for_exits(1) == {0: 0}
    assert node.said_by(0) == ["exit"]


def test_a_program_that_is_not_our_python_gets_no_parts(make_node: MakeNode) -> None:
    node = make_node()
    (node.folder / "program").write_text("#!/bin/sh\nexit 3\n")
    (node.folder / "program").chmod(0o755)
    context = node.start("", entrypoint=str(node.folder / "program"))
    assert context.workers[0].reading() is None
    assert node.wait_for_exits(1) == {0: 3}


def test_the_pulse_page_of_a_worker_can_be_read_after_its_end(node: Node) -> None:
    context = node.start("pass")
    node.wait_for_exits(1)
    reading = context.workers[0].reading()
    assert reading is not None
    assert (reading.step, reading.at) == (0, None)
    context.close()
    assert context.workers[0].reading() is None


def test_an_exit_that_is_heard_before_the_pid_is_not_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # The answer to a fork and the report of an exit come over two channels, in either order.
    context = node.workers("raise ValueError('bad input')", "pass")
    seen: list[int] = []
    on_exit, wait_for_pid = node.runtime.on_exit, node.runtime.processes.wait_for_pid

    def see(ended: Exit) -> None:
        on_exit(ended)
        seen.append(ended.pid)

    def answer_late(number: int, program: str) -> int:
        pid = wait_for_pid(number, program)
        if program == sys.executable:  # the warm process is waited for as well
            node.wait(lambda: pid in seen)
        return pid

    node.runtime.on_exit = see
    monkeypatch.setattr(node.runtime.processes, "wait_for_pid", answer_late)
    context.start()
    assert node.exits() == {0: 1, 1: 0}
    assert node.said_by(0) == ["exception", "exit"]
    assert node.raised_in == [context.pids()[0]]  # else the exception were nobody's


def test_a_signal_that_comes_while_workers_start_lets_them_save(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = "import signal, sys; signal.signal(15, lambda *_: sys.exit('saved')); print('up'); signal.pause()"
    context = node.workers(saves, saves)
    wait_for_pid = node.runtime.processes.wait_for_pid
    signals = [signal.SIGTERM]

    def answer_late(number: int, program: str) -> int:
        if program == sys.executable and signals:  # the warm process is waited for as well
            node.wait_for_line(context.stdouts[0])
            signal.raise_signal(signals.pop())
        return wait_for_pid(number, program)

    monkeypatch.setattr(node.runtime.processes, "wait_for_pid", answer_late)
    with pytest.raises(SignalException):
        context.start()
    node.wait_for_line(context.stdouts[1])
    context.close(signal.SIGTERM)
    assert [Path(context.stderrs[local]).read_text() for local in range(2)] == ["saved\n", "saved\n"]


def test_a_missing_program_is_an_error_and_leaves_nothing(make_node: MakeNode) -> None:
    node = make_node()
    context = node.workers("", "", entrypoint="no-such-program")
    before = _open_descriptors()
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        context.start()
    assert context.workers == {}
    assert _open_descriptors() == before
    assert node.children() == []
    context.close()  # as torch does after any failure
    assert node.heard == []
    node.start("pass")
    assert node.wait_for_exits(1) == {0: 0}  # the node serves on


def test_if_one_cannot_be_started_the_others_are_taken_back(node: Node) -> None:
    context = node.workers(WAIT, WAIT, WAIT)
    node.runtime.ready_warm()
    shutil.rmtree(os.path.dirname(context.stdouts[1]))  # its log file cannot be opened
    before = _open_descriptors()
    with pytest.raises(FileNotFoundError, match=r"stdout\.log"):
        context.start()
    assert context.workers == {}
    assert _open_descriptors() == before
    assert node.heard == []
    warm = node.runtime.warm
    assert node.children() == ([] if warm is None else [warm.pid])


def test_what_is_forked_late_is_taken_back_as_well(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(warm=True)
    context = node.workers(WAIT, WAIT)
    warm = node.runtime.ready_warm()
    assert warm is not None
    assert warm.pid is not None
    shutil.rmtree(os.path.dirname(context.stdouts[1]))
    answers: list[int] = []
    answered = node.runtime.processes.answered
    monkeypatch.setattr(
        node.runtime.processes, "answered", lambda answer: (answers.append(answer.number), answered(answer))
    )
    os.kill(warm.pid, signal.SIGSTOP)  # it gets to the fork when all else has been taken back
    with pytest.raises(FileNotFoundError, match=r"stdout\.log"):
        context.start()
    assert len(answers) == 1
    assert node.children() == [warm.pid]


def test_a_generation_starts_once(node: Node) -> None:
    context = node.start("pass")
    with pytest.raises(ValueError, match="started already"):
        context.start()
    assert node.wait_for_exits(1) == {0: 0}


def test_a_signal_reaches_those_it_is_for(node: Node) -> None:
    context = node.start(f"print('up'); {WAIT}", f"print('up'); {WAIT}", "pass")
    for local in range(2):
        assert node.output(local) == "up"
    node.wait_for_exits(1)
    context.stop([0, 2], "to end")  # 2 has ended: its pid may be another's
    assert node.wait_for_exits(2) == {0: -signal.SIGTERM, 2: 0}
    context.kill([1])
    assert node.wait_for_exits(3)[1] == -signal.SIGKILL


class Heard:
    """A worker's control channel: ``before`` is done before anything is said on it."""

    def __init__(self, control: Any, before: Callable[[], None]) -> None:
        self._control, self._before = control, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def send(self, instruction: Any) -> None:
        self._before()
        self._control.send(instruction)


def test_all_have_their_signal_before_any_leaves_a_collective_in_which_others_wait(node: Node, lab: Lab) -> None:
    context = node.start(f"print('up'); {WAIT}", f"print('up'); {WAIT}")
    assert [node.output(local) for local in range(2)] == ["up", "up"]
    first, second = context.workers.values()
    first.control = Heard(first.control, lambda: lab.wait_for_death(second.pid))
    context.stop([0, 1], "to end")
    assert node.wait_for_exits(2) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}


def test_a_signal_reaches_what_a_worker_has_started_too(node: Node, lab: Lab) -> None:
    code = f"import subprocess as s; child = s.Popen(['sleep', '600']); print(child.pid, flush=True); {WAIT}"
    context = node.start(code)
    child = int(node.output(0))
    context.stop([0], "to end")
    assert node.wait_for_exits(1) == {0: -signal.SIGTERM}
    lab.wait_for_death(child)


def test_what_a_lost_worker_has_started_ends_while_the_others_work_on(node: Node, lab: Lab) -> None:
    context = node.start(*[START_HELPERS + WAIT] * 2)
    lost, others = ([int(pid) for pid in node.output(rank).split()] for rank in range(2))
    assert len(lost) == len(others) == 4
    os.kill(context.pids()[0], signal.SIGKILL)
    node.wait_for_exits(1)
    for pid in lost:
        lab.wait_for_death(pid)
    assert all(map(lab.is_alive, others))
    assert context.workers[1].returncode is None


def test_what_a_lost_worker_has_started_is_gone_before_its_replacement_begins(node: Node, lab: Lab) -> None:
    # It may hold a port or a file that the replacement wants.
    code = START_HELPERS + "raise SystemExit(0)\n"  # of a member that is lost whatever it says in the end
    context = node.start(code, START_HELPERS + WAIT)
    lost, others = ([int(pid) for pid in node.output(rank).split()] for rank in range(2))
    node.wait_for_exits(1)
    assert all(map(lab.is_alive, lost))  # who ends well may leave something that works on
    context.replace(0, {"CODE": START_HELPERS + WAIT})
    assert not any(map(lab.is_alive, lost))
    assert all(map(lab.is_alive, others))


def test_the_close_ends_workers_and_daemons_and_may_come_twice(node: Node, lab: Lab) -> None:
    before = _open_descriptors() if node.runtime.ready_warm() is None else None
    context = node.start(LEAVE_A_DAEMON + WAIT, "import signal; signal.signal(15, signal.SIG_IGN); print(); " + WAIT)
    daemon = int(node.output(0))
    assert node.output(1) == ""
    context.close(signal.SIGTERM, timeout=1)
    assert node.exits() == {0: -signal.SIGTERM, 1: -signal.SIGKILL}  # rank 1 had its second to end by itself
    assert not lab.is_alive(daemon)
    context.close()
    if before is not None:
        assert _open_descriptors() == before


def test_a_wait_for_a_worker_has_its_time(node: Node) -> None:
    context = node.start(f"print('up'); {WAIT}")
    assert node.output(0) == "up"
    with pytest.raises(subprocess.TimeoutExpired):
        context.workers[0].wait(0.01)
    context.kill([0])
    assert context.workers[0].wait() == -signal.SIGKILL


@pytest.mark.parametrize("count", [1, 8])
def test_a_worker_that_becomes_another_program_is_not_taken_for_what_it_was(node: Node, count: int) -> None:
    go = node.folder / "go"
    program = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nraise SystemExit(3)"
    node.start(*[f"import sys; os.execv(sys.executable, [sys.executable, '-c', {program!r}])"] * count)
    node.wait(lambda: len(node.heard) == count)  # who has ended meanwhile cannot be told from what it was
    go.touch()
    assert node.wait_for_exits(count) == dict.fromkeys(range(count), 3)
    for local in range(count):
        assert node.said_by(local) == ["replaced", "exit"]
    assert {reading for _, what, reading in node.heard if what == "replaced"} == {None}


def test_a_worker_that_closes_all_descriptors_is_still_what_it_was(node: Node) -> None:
    context = node.start("os.closerange(3, 256); print('closed', flush=True); import time; time.sleep(600)")
    assert node.output(0) == "closed"
    node.wait(lambda: context.workers[0].control is None)
    assert context.workers[0].reading() is not None
    context.kill([0])
    node.wait_for_exits(1)
    assert node.said_by(0) == ["exit"]


def test_the_next_generation_is_told_from_the_last(node: Node) -> None:
    first = node.start("pass")
    node.wait_for_exits(1)
    first.close()
    node.heard.clear()
    second = node.start("raise SystemExit(4)")
    assert second.pids() != first.pids()
    assert node.wait_for_exits(1) == {0: 4}
    assert first.workers[0].returncode == 0


def test_the_loss_of_the_keeper_is_the_end_of_every_worker(node: Node, lab: Lab) -> None:
    context = node.start(WAIT, WAIT)
    os.kill(node.runtime.processes.keeper_pid, signal.SIGKILL)
    assert node.wait_for_exits(2) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    for pid in context.pids().values():
        lab.wait_for_death(pid)
    context.close()
    node.runtime.begin(None, os.environ)  # the next generation has a new one
    node.start("pass")
    node.wait(lambda: (0, "exit", 0) in node.heard)


def test_a_warm_process_that_died_meanwhile_is_done_without(make_node: MakeNode, lab: Lab) -> None:
    node = make_node(warm=True)
    warm = node.runtime.ready_warm()
    assert warm is not None
    assert warm.pid is not None
    os.kill(warm.pid, signal.SIGKILL)
    lab.wait_for_death(warm.pid)  # its end has not been read yet
    context = node.start("pass", "pass")
    assert [worker.is_warm for worker in context.workers.values()] == [False, False]
    assert node.wait_for_exits(2) == {0: 0, 1: 0}


def test_a_warm_process_that_dies_with_a_request_in_hand_is_done_without(make_node: MakeNode) -> None:
    node = make_node(warm=True)
    warm = node.runtime.ready_warm()
    assert warm is not None
    pid = warm.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it takes the requests and does not come to answer them
    node.runtime.loop.call_at(time.monotonic() + 0.1, lambda: os.kill(pid, signal.SIGKILL))
    context = node.start("pass", "pass")
    assert [worker.is_warm for worker in context.workers.values()] == [False, False]
    assert node.wait_for_exits(2) == {0: 0, 1: 0}


@contextlib.contextmanager
def _traced(pid: int) -> Iterator[None]:
    """Holds a process as a debugger does: SIGCONT does not let it go on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None):
        pytest.skip(f"no process may be traced here: {os.strerror(ctypes.get_errno())}")
    libc.ptrace(_PTRACE_INTERRUPT, pid, None, None)
    os.waitpid(pid, 0)  # until it stands
    is_over = threading.Event()
    collecting = threading.Thread(target=_collect, args=(pid, is_over))
    collecting.start()
    try:
        yield
    finally:
        is_over.set()
        collecting.join(DEADLINE_S)
        libc.ptrace(_PTRACE_DETACH, pid, None, None)


def _collect(pid: int, is_over: threading.Event) -> None:
    """Takes note of its end, of which its tracer hears before its parent."""
    with contextlib.suppress(ChildProcessError):
        while not is_over.wait(0.01):
            os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    yield


HELD = {"stopped": _stopped, "traced": _traced}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("how", ["a generation", "a replacement"])
def test_a_warm_process_that_does_not_answer_costs_seconds(make_node: MakeNode, held: str, how: str) -> None:
    node = make_node(warm=True)
    warm = node.runtime.ready_warm()
    assert warm is not None
    assert warm.pid is not None
    context = node.workers(WAIT) if how == "a generation" else node.start(WAIT)
    if how == "a replacement":
        context.kill([0])
        node.wait_for_exits(1)
    begun = time.monotonic()
    with HELD[held](warm.pid):
        if how == "a replacement":
            context.replace(0, {"CODE": "raise SystemExit(4)"})
        else:
            context.envs[0]["CODE"] = "raise SystemExit(4)"
            context.start()
        assert time.monotonic() - begun < 5.0
        assert context.workers[0].is_warm is (held == "stopped")  # which was woken
        why = None if held == "stopped" else "the warm process cannot serve: it did not answer"
        assert node.runtime.why_plain == why
        node.wait(lambda: (0, "exit", 4) in node.heard)
    node.runtime.begin(node.command, os.environ)
    assert node.runtime.ready_warm() is not None
    assert (node.runtime.ready_warm() is warm) is (held == "stopped")


@pytest.mark.parametrize("held", HELD)
def test_a_death_is_seen_without_the_keeper_and_once(node: Node, held: str) -> None:
    context = node.start(WAIT, "raise SystemExit(7)", WAIT)
    node.wait_for_exits(1)
    lost = context.pids()[0]
    with HELD[held](node.runtime.processes.keeper_pid):
        begun = time.monotonic()
        os.kill(lost, signal.SIGKILL)
        assert node.wait_for_exits(2) == {0: -signal.SIGKILL, 1: 7}
        assert time.monotonic() - begun < 3.0
    node.wait(lambda: lost not in node.children())  # the keeper has collected it, and says so
    context.replace(0, {"CODE": "raise SystemExit(4)"})
    node.wait(lambda: (0, "exit", 4) in node.heard)
    told = [(local, code) for local, what, code in node.heard if what == "exit"]
    assert told == [(1, 7), (0, -signal.SIGKILL), (0, 4)]
    assert context.workers[2].returncode is None


def test_a_keeper_that_stays_silent_is_replaced_when_a_worker_is_to_start(make_node: MakeNode) -> None:
    node = make_node()
    node.start("pass").close()
    first = node.runtime.processes.keeper_pid
    begun = time.monotonic()
    with _traced(first):
        node.start("raise SystemExit(4)")
        assert time.monotonic() - begun < 5.0
    node.wait(lambda: (0, "exit", 4) in node.heard)
    assert node.runtime.processes.keeper_pid != first


def test_a_replacement_that_is_forked_needs_no_keeper(make_node: MakeNode) -> None:
    node = make_node(warm=True)
    context = node.start(WAIT, WAIT)
    with _traced(node.runtime.processes.keeper_pid):
        context.kill([0])
        node.wait_for_exits(1)
        assert context.replace(0, {"CODE": "raise SystemExit(4)"}).is_warm
        node.wait(lambda: (0, "exit", 4) in node.heard)
        assert context.workers[1].returncode is None
