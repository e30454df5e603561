"""The agent's side of the warm process: starts it early, asks it for forks, and says why when it cannot serve."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import stat
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

from unicron_elastic.launcher.agent.process.helper import Helper, HelperPatience
from unicron_elastic.launcher.agent.process.processes import KeeperLost, Processes
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.worker import inject as inject_package
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.linux import MARK, mark_of
from unicron_elastic.worker.start import bootstrap, warm

# Reads the source of a script, without running it, for variables that libraries read while they are imported.
#
# A script that sets one does so before its import of torch, which in a warm worker has happened already. Modules that
# the script imports are not read; docs/differences.md says so. What Python code reads at import, the warm process sees;
# of what C code reads there, these are the beginnings.


_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")  # a word without "_" is often something else: "USER", "CI"
# TORCH_NCCL_ variables are read when a process group is made, TORCHELASTIC_ variables by nothing that is preloaded.
_READ_AT_IMPORT = re.compile(
    r"(?!TORCH_NCCL_|TORCHELASTIC_)"
    r"(TORCH|PYTORCH_|OMP_|MKL_|KMP_|GOMP_|GOTO_|OPENBLAS_|DNNL_|ONEDNN_|MKLDNN_|NPY_|NUMPY_|KINETO_|GFORTRAN_)[A-Z0-9_]*"
)
_READERS = frozenset({"get", "getenv"})
_SOURCE_BYTES_MAX = 1024 * 1024  # to parse more takes longer than a warm start saves


def early_variable(path: str) -> str | None:
    """The first variable that the Python file seems to set and that C code reads at import; None if there is none."""
    return next(filter(_READ_AT_IMPORT.fullmatch, set_variables(path)), None)


def set_variables(path: str) -> list[str]:
    """The variables that the Python file seems to set, and other names that look like variables.

    What comes through a pipe can be read once, and is left to the worker.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return []
        with open(path, "rb") as file:
            source = file.read(_SOURCE_BYTES_MAX + 1)
        if len(source) > _SOURCE_BYTES_MAX:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's strings; the worker's interpreter says it
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the interpreter will say what is wrong with it
    return list(dict.fromkeys(_set_names(tree)))


def _set_names(tree: ast.AST) -> Iterator[str]:
    """Names of variables, however they stand there, except where one is just read."""
    only_read: set[ast.AST] = set()
    for node in ast.walk(tree):  # a parent comes before its children
        match node:
            case ast.Subscript(slice=key, ctx=ast.Load()):
                only_read.add(key)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[key, *_]) if name in _READERS:
                only_read.add(key)
            case ast.Compare(left=key):
                only_read.add(key)
            case ast.Constant(value=str(text)) if node not in only_read and _VARIABLE.fullmatch(text):
                yield text
            case ast.keyword(arg=str(text)) if _VARIABLE.fullmatch(text):
                yield text


def source_files(argv: Sequence[str]) -> list[str]:
    """The files that the interpreter's command ``argv`` runs first, as far as they are found without importing any."""
    for index, argument in enumerate(argv[1:], 1):
        if argument == "-m":
            with contextlib.suppress(KeyError, ValueError, ImportError):  # a namespace package within another
                return list(_module_files("".join(argv[index + 1 : index + 2]), [os.getcwd(), *sys.path]))
            return []
        if argument == "-":
            return []  # standard input is for the worker to read
        if not argument.startswith("-"):
            return [os.path.join(argument, "__main__.py") if os.path.isdir(argument) else argument]
    return []


def _program(argv: Sequence[str]) -> Sequence[str]:
    """The words of the interpreter's command up to the script or module."""
    ends = (at for at, word in enumerate(argv[1:], 2) if word == "-" or not word.startswith("-"))
    return argv[: next(ends, len(argv))]


def _module_files(module: str, folders: Sequence[str]) -> Iterator[str]:
    """The packages around ``module``, from the outermost, and the module itself."""
    name = ""
    for part in [*module.split("."), "__main__"]:
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return
        if spec.origin is not None:
            yield spec.origin
        if spec.submodule_search_locations is None:
            return
        folders = list(spec.submodule_search_locations)


WARM_PATIENCE = HelperPatience()
WHILE_IT_IMPORTS = HelperPatience(given_up_s=120.0)  # torch, from a cold network file system


def injected(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the folder on PYTHONPATH whose ``sitecustomize`` attaches the in-band parts."""
    changed = dict(env)
    before = env.get("PYTHONPATH")
    folder = str(Path(inject_package.__file__).parent)
    if before is not None:
        changed["UNICRON_PYTHONPATH"] = before
    changed["PYTHONPATH"] = folder + (os.pathsep + before if before else "")
    return changed


def why_not(argv: Sequence[str]) -> str | None:
    """Why this command cannot start warm, as a sentence; None if it can."""
    if not argv or argv[0] != sys.executable:
        return "the workers do not run this Python interpreter"
    if any(Template(word).safe_substitute(local_rank="0") != word for word in _program(argv)):
        return "each local rank has a script of its own"
    for path in source_files(argv):
        variable = early_variable(path)
        if variable is not None:
            return f"{path} sets {variable}, which libraries read when they are imported"
    return None


class WarmProcess:
    """A process that has imported torch and waits before the script; workers are forked from it."""

    def __init__(
        self, loop: Loop, processes: Processes, preload: str, patience: HelperPatience = WARM_PATIENCE
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._preload = preload
        self._channel: Channel | None = None
        self._is_ready = False
        self._number = 0
        self._asked: set[int] = set()  # requests that it has not answered
        self._patience = patience
        self._helper: Helper | None = None  # once its pid is known
        self.pid: int | None = None
        self.refusal: str | None = None  # why it cannot serve
        self.is_gone = False  # it died; another may be begun

    def begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[int]) -> None:
        """Starts it with the command of the workers; it imports while the agent goes on. Raises KeeperLost."""
        ours, theirs = Channel.pair()
        lowest = max(streams) + 1
        full = injected(env)
        full[bootstrap.WARM_FD] = str(lowest)
        full[warm.PRELOAD] = self._preload
        sets = [name for path in source_files(argv) for name in set_variables(path)]
        ours.send({"argv": list(argv), "env": dict(env), "sets": sets})  # what it should become, and what happens then
        fds = {**{stream: stream for stream in streams}, lowest: theirs.fileno()}
        try:
            self._number = self._processes.request_start(argv, full, cwd, fds)
        finally:
            theirs.close()
        self._channel = ours
        self._loop.on_readable(ours, self._read)

    def wait_ready(self) -> bool:
        """Waits until it can be forked from; false if it cannot serve, and ``refusal`` says why."""
        if self.pid is None and self.refusal is None:
            try:
                self.pid = self._processes.wait_for_pid(self._number, "the warm process")
            except (OSError, KeeperLost) as error:
                self.is_gone = isinstance(error, KeeperLost)
                self._refuse(str(error))
        if not self._expect(WHILE_IT_IMPORTS).wait(self._is_settled):
            self._kill()
            self._refuse(f"it was not ready within {WHILE_IT_IMPORTS.given_up_s:g} s, or was stopped")
        return self.refusal is None

    def request_fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int], streams: Sequence[int]
    ) -> int:
        """Asks for a worker; returns the number under which ``Processes.wait_for_pid`` knows the answer.

        ``fds`` are the control socket, the pulse page, then one descriptor for each of ``streams``. Raises
        ChannelClosed if the warm process is gone.
        """
        if self._channel is None:
            raise ChannelClosed("the warm process is gone")
        helper = self._expect(self._patience)
        number = self._processes.next_number(helper)
        message = {
            "id": number,
            "argv": list(argv),
            "env": {**env, MARK: mark_of(self._processes.token, number)},
            "cwd": cwd,
            "streams": list(streams),
            "ignored_signals": self._processes.ignored_by_workers(),
            "keeper": self._processes.keeper_pid,
        }
        try:
            helper.send(self._channel, message, fds)
        except TimeoutError:
            self._give_up()
            raise ChannelClosed(self.refusal) from None
        self._asked.add(number)
        return number

    def _give_up(self) -> None:
        """Kills it, as it does not answer; another may be begun."""
        self._kill()
        self._has_gone("it did not answer")

    def end(self) -> None:
        """Lets it go: it ends by itself when its channel closes."""
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None
        self.pid = None

    def _is_settled(self) -> bool:
        return self._is_ready or self.refusal is not None

    def _read(self) -> None:
        assert self._channel is not None
        try:
            message, _ = self._channel.receive()
        except ChannelClosed:
            self._has_gone("it died")
            return
        if self._helper is not None:
            self._helper.heard()
        if "ready" in message:
            self._is_ready = True
        elif "unfit" in message:
            self._refuse(str(message["unfit"]))
        elif "forked" in message:
            self._asked.discard(int(message["id"]))
            self._processes.answered(message)

    def _expect(self, patience: HelperPatience) -> Helper:
        """The helper that it is while as much is expected of it."""
        pid = self.pid or 0
        if self._helper is None or self._helper.patience != patience:
            self._helper = Helper(self._loop, pid, patience, wake=self._wake, give_up=self._give_up)
        return self._helper

    def _wake(self) -> None:
        if self.pid is not None:
            self._processes.send_signal(self.pid, signal.SIGCONT)

    def _kill(self) -> None:
        if self.pid is not None:
            self._processes.send_signal(self.pid, signal.SIGKILL)

    def _has_gone(self, reason: str) -> None:
        """Ends with it what it was about to fork, which may be no worker yet: then it carries the mark of this one."""
        self.is_gone = True
        self._processes.give_up(self._asked)
        if self.pid is not None:
            with contextlib.suppress(KeeperLost):
                self._processes.request_clearing(self.pid, self._number)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._is_ready = False
        self.end()
