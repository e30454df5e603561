"""A keeper and a warm process that are forks, too, of a launcher that is one (see warm_launcher.py).

An interpreter that imports torch anew, for each job, takes most of the processor's time of a test that trains for a few
steps. Here the keeper is a fork that was made before the launcher's script began, with torch in memory, and the warm
process is a fork of it that becomes the workers' command without exec: it gets the environment, descriptors, signals,
arguments and path which the interpreter would have, runs our ``sitecustomize``, and then the script. From there on all
is the product's own: it checks the warm process, which forks the workers. A second keeper of a launcher, a worker that
is started without the warm process, and whatever else is started are what they always are.

That a start and an end are the interpreter's own is for other tests to show; what cannot be the same here are the
command that the kernel shows and the hash seed, which all forks have in common, and the end leaves torch to the kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

MARK = "UNICRON_RUN_TOKEN"  # as in unicron_elastic.worker.process.mark
MARK_ROOM = len("unicron-") + 32 + len(".00000000")
_LARGEST_REQUEST = 1 << 18
_OF_LAUNCHERS = ("unicron_elastic.launcher", "unicron_elastic.rendezvous")
_STANDARD = (0, 1, 2)


class Ground:
    """What a fork needs to know of the process that all are forks of, which makes this before it imports anything."""

    def __init__(self) -> None:
        self.end = QuickEnd()
        self.loaded_before = frozenset(sys.modules)
        self.path = sys.path[1:]
        self.renewal: Any = None
        self.variables: Any = None
        self._execvpe = os.execvpe
        self._libc = ctypes.CDLL(None)
        self._libc.getenv.restype = ctypes.c_void_p
        self._mark = self._libc.getenv(MARK.encode())
        self._hide_mark()

    @contextlib.contextmanager
    def preloading(self) -> Iterator[None]:
        """Imports what a warm process preloads, and notes of all that is imported what it would."""
        from unicron_elastic.launcher.config.options import PRELOAD_DEFAULT
        from unicron_elastic.worker.start import warm
        from unicron_elastic.worker.start.renewal import Renewal
        from unicron_elastic.worker.start.variables import ImportedVariables

        self.renewal, self.variables = Renewal(), ImportedVariables(dict(os.environ))
        with self.renewal.watching():
            warm._preload(PRELOAD_DEFAULT.split(","), self.variables)
            yield

    def offer_keeper(self) -> None:
        """Forks the launcher's first keeper, which waits until the launcher begins it."""
        from unicron_elastic.launcher.agent.process import processes

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._wait_as_keeper(theirs)
            finally:
                os._exit(1)
        theirs.close()
        spare = [(pid, ours)]

        def begin(command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **streams: Any) -> Any:
            if not spare:
                return subprocess.Popen(command, pass_fds=pass_fds, env=env, **streams)
            return ForkedKeeper(*spare.pop(), fds=pass_fds, env=env)

        instead: Any = SimpleNamespace(
            Popen=begin, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        processes.subprocess = instead

    def _wait_as_keeper(self, asked: socket.socket) -> None:
        from unicron_elastic.launcher.agent.process import supervisor

        Path("/proc/self/comm").write_text("unicron-spare")
        text, fds, *_ = socket.recv_fds(asked, _LARGEST_REQUEST, 1)
        asked.close()
        if not text:
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(null, stream)
        os.close(null)
        _take_environment(json.loads(text))
        os.execvpe = self._become  # type: ignore[assignment]
        supervisor.main(*fds)

    def _become(self, program: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        os.execvpe = self._execvpe
        if self._is_warm(argv, env):
            self._run(list(argv), env)
        os.execvpe(program, argv, env)

    @staticmethod
    def _is_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether this is to be a warm process with torch."""
        of_script = tuple(argv[:2]) == (sys.executable, "-u") and not argv[2].startswith("-")
        return "UNICRON_WARM_FD" in env and of_script and "torch" in env.get("UNICRON_PRELOAD", "").split(",")

    def _run(self, argv: list[str], env: Mapping[str, str]) -> NoReturn:
        """Goes on as ``python -u SCRIPT ...``, of which the kernel knows nothing."""
        _close_what_exec_closes()
        _take_environment(env)
        self._show_mark(env[MARK])
        Path("/proc/self/comm").write_text(os.path.basename(argv[0]))
        _handle_signals()
        _open_streams()
        sys.orig_argv[:] = argv
        sys.argv[:] = argv[2:]
        sys.path[:] = self.path
        self._forget_launcher()
        _run_sitecustomize()
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[2])))
        self.end.begin()
        run_script(argv[2])

    def _hide_mark(self) -> None:
        """Give its place another name until it is shown: a launcher has none, and who has one is a worker to others."""
        del os.environ[MARK]
        ctypes.memset(self._mark - len(f"{MARK}="), ord("-"), 1)

    def _show_mark(self, mark: str) -> None:
        """Show it where the kernel shows the environment; the product finds it there, and shows those of workers."""
        assert len(ctypes.string_at(self._mark)) == len(mark)
        ctypes.memset(self._mark - len(f"{MARK}="), ord(MARK[0]), 1)
        ctypes.memmove(self._mark, mark.encode(), len(mark))
        self._libc.putenv(ctypes.c_void_p(self._mark - len(f"{MARK}=")))

    def _forget_launcher(self) -> None:
        for name in list(sys.modules):
            if name in _OF_LAUNCHERS or name.startswith(tuple(f"{of}." for of in _OF_LAUNCHERS)):
                del sys.modules[name]
        from unicron_elastic.worker import exceptions
        from unicron_elastic.worker.start import bootstrap, likeness, warm
        from unicron_elastic.worker.start.renewal import Renewal

        exceptions._called_by_interpreter = _called_by_interpreter
        exceptions._ended_the_process = _ended_the_process
        begin = bootstrap.start
        bootstrap.start = lambda _, refusal: begin(self.loaded_before, refusal)
        likeness._of_kernel = lambda: list(sys.orig_argv)
        warm.Renewal = lambda: _Renewals(self.renewal, Renewal())  # type: ignore[assignment, misc]
        warm.ImportedVariables = lambda _: self.variables  # type: ignore[assignment, misc]


class QuickEnd:
    """`QuickEnd` leaves to the kernel what an interpreter's end does with all that was there before the script began.

    Threads are waited for, callbacks are called, and what the script made is finalized, as ever. To free torch as well
    a fork first copies its memory, page by page, which takes a third of a second of a processor.
    """

    def __init__(self) -> None:
        self._before: frozenset[str] | None = None
        atexit.register(self._keep)  # the first of all callbacks, which is called last

    def begin(self) -> None:
        """Has this process and its forks end so."""
        self._before = frozenset(sys.modules) - {"__main__", "builtins", "sys"}
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # instead of what C++ would destroy
        libc["__cxa_atexit"](libc.fflush, None, None)  # which is done before

    def _keep(self) -> None:
        if self._before is not None:
            kept = [sys.modules.pop(name) for name in self._before if name in sys.modules]
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class _Renewals:
    """What is renewed of imports here, and of those in the warm process."""

    def __init__(self, before: Any, now: Any) -> None:
        self._before, self._now = before, now
        self.watching = now.watching

    def renew(self) -> None:
        """Give this fork what is to be its own."""
        self._before.renew()
        self._now.renew()


class ForkedKeeper:
    """The keeper as its launcher sees it, with what it uses of ``subprocess.Popen``."""

    def __init__(self, pid: int, asked: socket.socket, fds: Sequence[int], env: Mapping[str, str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        with asked:
            socket.send_fds(asked, [json.dumps(dict(env)).encode()], fds)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once there is one."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the keeper", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _close_what_exec_closes() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            if int(name) not in _STANDARD and not os.get_inheritable(int(name)):
                os.close(int(name))


def _handle_signals() -> None:
    """Handles what an interpreter does at its start."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    """Opens the standard streams as ``python -u`` does."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        raw: Any = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
        raw.name = f"<{name}>"
        buffer = io.BufferedReader(raw) if number == 0 else raw
        opened = io.TextIOWrapper(
            buffer, encoding=before.encoding, errors=before.errors, newline="\n" if number else None, write_through=True
        )
        opened.mode = "r" if number == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)


def _run_sitecustomize() -> None:
    """Runs ours, as ``site`` does; a worker, forked in it, is who comes back."""
    from unicron_elastic.worker import inject

    file = Path(inject.__file__).with_name("sitecustomize.py")
    module = ModuleType("sitecustomize")
    module.__file__ = str(file)
    sys.modules["sitecustomize"] = module
    try:
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules.pop("sitecustomize", None)


def run_script(path: str) -> NoReturn:
    """Runs it as the interpreter does, which then ends with all that belongs to an end."""
    main = ModuleType("__main__")
    given: dict[str, Any] = {"__builtins__": sys.modules["builtins"]}
    main.__dict__.update(given if sys.version_info >= (3, 14) else {**given, "__annotations__": {}})
    sys.modules["__main__"] = main
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    name = os.path.abspath(path).encode()
    file = ctypes.c_void_p(libc.fopen(name, b"rb"))
    failed = ctypes.pythonapi.PyRun_SimpleFileExFlags(file, name, 1, None)
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
    raise AssertionError("an interpreter has ended and goes on")


def _is_outermost(frame: FrameType) -> bool:
    """Whether no frame is beneath that an interpreter of its own would have."""
    return frame.f_back is None or frame.f_back.f_code is run_script.__code__


def _called_by_interpreter() -> bool:
    """Return what the function of this name in unicron_elastic.worker.exceptions would."""
    frame = sys._getframe(1)
    while not _is_outermost(frame):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code is getattr(getattr(sys.excepthook, "__func__", sys.excepthook), "__code__", None)


def _ended_the_process(error: BaseException) -> bool:
    """Return what the function of this name in unicron_elastic.worker.exceptions would."""
    return error.__traceback__ is not None and _is_outermost(error.__traceback__.tb_frame)


def freeze() -> None:
    """Keeps the memory of what is there now shared between the forks."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may hang"
    gc.collect()
    gc.freeze()
