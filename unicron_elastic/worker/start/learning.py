"""Imports for workers to come what workers have imported, as far as none of them could tell.

Each few imports are made by a fork. If one of them does what a fork would lose, or what a worker that finds the module
imported would miss, that fork ends, and the process that had not imported it goes on with the next module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from unicron_elastic.compat.loaded import DYNAMO, watch_default_group
from unicron_elastic.worker.helper_tasks import Learn, NotLearned
from unicron_elastic.worker.process.imported_modules import file_of
from unicron_elastic.worker.process.prctl import die_with_parent, outlive_parent, wait_for_parent
from unicron_elastic.worker.start.entropy_watch import EntropyWatch, module_that_runs
from unicron_elastic.worker.start.observed import change, children, observed
from unicron_elastic.worker.start.renewal import is_renewed, renews
from unicron_elastic.worker.start.stamps import Stamps

BATCH_S = 0.3  # of processor time between two forks
REST = 2.0  # so many times as long as it has worked it rests, for the job trains meanwhile
SILENT_MAX_S = 60.0  # in one import
FAILURES_MAX = 50  # of imports: who needs a module that cannot be learned cannot be, either
_DONE = "."


class _Unlearnable(BaseException):
    """An import is not to be made for others; the text says why. No module catches it, or goes on as without another.

    ``culprit`` is the module for which that is so; "": that is not known.
    """

    def __init__(self, culprit: str, why: str) -> None:
        super().__init__(why)
        self.culprit = culprit


class Learning:
    """`Learning` is one process after another, each of which has imported more; the last returns from `run`."""

    def __init__(
        self, task: Learn, home: int, check_fork: Callable[[Mapping[str, str]], None], rest: float = REST
    ) -> None:
        """``home`` is the process that adopts them; ``check_fork`` raises if this one must not be forked from.

        It is told which module has started which thread.
        """
        self._task = task
        self._home = home
        self._check_fork = check_fork
        self._rest = rest
        self._places = {name: place for place, name in enumerate(task.modules)}
        self._seeded = self._places.get(task.seeded_before or "", len(self._places))
        self._late = self._places.get(task.after_group or "", len(self._places))
        self._pending = [name for name, path in task.modules.items() if path and not name.startswith(DYNAMO)]
        self._failures = 0
        self._to_keep = 0  # so many imports of the attempt that failed were good: the next one makes no more
        self._alone = 0  # so many imports are to be tried one by one
        self._threads = dict.fromkeys(os.listdir("/proc/self/task"), "python")
        self._watch = _EnvironmentWatch()
        self._barrier = _Barrier()
        self.stamps = Stamps(sys.path)
        self.left_out: list[NotLearned] = []
        self.set_variables: dict[str, str] = {}

    def run(self) -> None:
        """Import all that can be."""
        sys.meta_path.insert(0, self._barrier)
        with self._watch:
            while self._find_next() is not None and self._failures < FAILURES_MAX:
                self._attempt()
        sys.meta_path.remove(self._barrier)

    def _find_next(self) -> str | None:
        while self._pending and self._pending[0] in sys.modules:
            self._pending.pop(0)
        return self._pending[0] if self._pending else None

    def _attempt(self) -> None:
        """Go on in a fork that has made some imports, or in this process without one of them."""
        here = os.getpid()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            os.close(reading)
            die_with_parent(here)
            self._be_tried(writing)
            return
        os.close(writing)
        said = list(_heard(reading))
        if said[-1:] == [_DONE]:
            os._exit(0)
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._leave_out(said)

    def _be_tried(self, writing: int) -> None:
        """Make some imports; return where they may stay, as the process that goes on."""
        began = time.process_time()
        try:
            made = 0
            name: str | None = None
            while (name := self._find_next()) is not None:
                _tell(writing, f"+{name}")
                self._import(name)
                made += 1
                if self._alone or made == self._to_keep or time.process_time() - began > BATCH_S:
                    break
            self._to_keep = 0
            self._alone = max(0, self._alone - made)
            self._check()
        except BaseException as error:  # whatever it is, the process without these imports goes on
            why = error if isinstance(error, _Unlearnable) else _Unlearnable(name or "", _ended_with(error))
            _end_children()
            _tell(writing, f"!{why.culprit} {why}")
            os._exit(0)
        outlive_parent()
        _tell(writing, _DONE)
        os.close(writing)
        wait_for_parent(self._home)
        die_with_parent(self._home)
        time.sleep(self._rest * (time.process_time() - began))

    def _leave_out(self, said: list[str]) -> None:
        """Know what to leave out, from what was heard of an attempt that failed."""
        begun = [line[1:] for line in said if line.startswith("+")]
        if not begun:
            raise RuntimeError("a fork that was to import could not")
        culprit, _, why = next(
            (line[1:] for line in said if line.startswith("!")), " its import ends the process"
        ).partition(" ")
        if not culprit and len(begun) > 1:
            self._alone = len(begun)  # which of them it was is to be seen
            return
        self._failures += 1
        self._to_keep = len(begun) - 1
        name = begun[-1]
        culprit = culprit or name
        if culprit not in self._barrier.names:
            self._barrier.names.add(culprit)
            self.left_out.append(NotLearned(module=culprit, why=why))
        self._alone = max(0, self._alone - 1)
        self._pending = [each for each in self._pending if each != name and not each.startswith(f"{culprit}.")]

    def _import(self, name: str) -> None:
        had = set(sys.modules)
        before, state = observed(), random.getstate()
        self._watch.begin()
        try:
            with watch_default_group() as asked, EntropyWatch() as entropy:
                importlib.import_module(name)
        except Exception as error:
            raise _Unlearnable(name, _ended_with(error)) from None
        if self._barrier.stopped:
            raise _Unlearnable(self._barrier.stopped, "")
        new = {each: module for each, module in list(sys.modules.items()) if each not in had}
        last = max((self._places.get(each, 0) for each in new), default=0)
        if is_late := last >= self._late:
            self._check_late(name, new, asked)
        self._check_new(new)
        self._check_environment(name, is_late=is_late)
        if (drawing := next((each for each in sorted(entropy.drawn) if not renews(each)), None)) is not None:
            raise _Unlearnable(drawing or name, "it draws from the system's entropy, which differs between processes")
        before["the environment"] = {**before["the environment"], **self.set_variables}
        if (what := change(before, observed())) is not None:
            raise _Unlearnable(name, f"it changes {what}")
        if random.getstate() != state and (is_late or last >= self._seeded):
            raise _Unlearnable(name, "it draws random numbers, and the script may have seeded them by then")
        self._threads |= {thread: name for thread in os.listdir("/proc/self/task") if thread not in self._threads}
        self.stamps.add(filter(None, map(file_of, new.values())))

    def _check_new(self, new: Mapping[str, ModuleType]) -> None:
        """All that came are the very files that the worker had, which are installed; or ours, which torch looks for."""
        for each, module in new.items():
            path, known = file_of(module), self._task.modules
            if each not in known and not each.startswith("unicron_elastic"):
                raise _Unlearnable(each, "the workers did not import it, or from a folder that may change")
            if known.get(each, path) != path:
                raise _Unlearnable(each, f"it comes from {path or 'no file'}, and the workers' did not")

    @staticmethod
    def _check_late(name: str, new: Mapping[str, ModuleType], asked: list[str]) -> None:
        """What the workers imported when they had a process group is the same for who has none."""
        for each in new:
            if each.startswith("torch."):
                raise _Unlearnable(each, "it is torch's own, and the workers had a process group by then")
        if asked:
            raise _Unlearnable(name, "it asks for the process group, which the workers had by then")

    def _check_environment(self, name: str, *, is_late: bool) -> None:
        """What it sets may stay if the worker came to that value, too; what it reads is the same for all workers.

        What a late one sets may not: its workers would find that from their start.
        """
        for variable, writer in sorted(self._watch.changed):
            if is_late or not self._is_settled(variable):
                raise _Unlearnable(writer or name, f"it changes {variable} in the environment")
        for variable, reader in sorted(self._watch.read):
            varies = variable in self._task.varying or variable in self._task.changed
            if is_late and variable in self._task.changed_since:
                raise _Unlearnable(reader or name, f"it reads {variable}")
            if varies and not self._is_settled(variable) and not is_renewed(reader, variable):
                raise _Unlearnable(reader or name, f"it reads {variable}")

    def _is_settled(self, variable: str) -> bool:
        """Whether an import has set it to what it became in the worker; workers then find that from their start."""
        value = os.environ.get(variable)
        if value is None or variable in self._task.varying or self._task.changed.get(variable) != value:
            return False
        self.set_variables[variable] = value
        return True

    def _check(self) -> None:
        try:
            self._check_fork(self._threads)
        except Exception as error:
            raise _Unlearnable("", str(error)) from None
        with open("/proc/self/maps") as maps:
            if any(line.split(maxsplit=2)[1][1:] == "w-s" for line in maps):
                raise _Unlearnable("", "it makes memory that forks share")


class _Barrier(MetaPathFinder):
    """`_Barrier` stops the import of what is not to be imported; who needs that is not to be, either."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.stopped = ""  # the last one

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:  # noqa: ARG002
        """Finds nothing, and raises _Unlearnable for one of them."""
        if fullname in self.names:
            self.stopped = fullname
            raise _Unlearnable(fullname, "")


def _end_children() -> None:
    with contextlib.suppress(OSError):
        for child in children():
            os.kill(child, signal.SIGKILL)


def _ended_with(error: BaseException) -> str:
    return f"its import ends with {type(error).__name__}: {error}"


class _EnvironmentWatch:
    """`_EnvironmentWatch` knows what Python code reads and changes of the environment, and which module has it done."""

    def __init__(self) -> None:
        self.read: set[tuple[str, str]] = set()  # (variable, module whose body runs)
        self.changed: set[tuple[str, str]] = set()
        self._hooks: dict[str, Any] = {}

    def begin(self) -> None:
        """Forgets what it knows."""
        self.read.clear()
        self.changed.clear()

    def __enter__(self) -> None:
        kind: Any = type(os.environ)
        self._hooks = {name: getattr(kind, name) for name in ("__getitem__", "__setitem__", "__delitem__")}
        get, put, remove = self._hooks.values()

        def noted_get(environ: Any, name: str) -> str:
            self.read.add((name, module_that_runs()))
            return get(environ, name)  # type: ignore[no-any-return]

        def noted_put(environ: Any, name: str, value: str) -> None:
            self.changed.add((name, module_that_runs()))
            put(environ, name, value)

        def noted_remove(environ: Any, name: str) -> None:
            self.changed.add((name, module_that_runs()))
            remove(environ, name)

        kind.__getitem__, kind.__setitem__, kind.__delitem__ = noted_get, noted_put, noted_remove

    def __exit__(self, *_: object) -> None:
        for name, hook in self._hooks.items():
            setattr(type(os.environ), name, hook)


def _tell(fd: int, line: str) -> None:
    os.write(fd, line.replace("\n", " ").encode(errors="replace") + b"\n")


def _heard(fd: int) -> Iterator[str]:
    """The lines that come, up to the end, to the word that all is done, or to a long silence."""
    rest = b""
    while select.select([fd], [], [], SILENT_MAX_S)[0]:
        text = os.read(fd, 65536)
        if not text:
            return
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            yield line.decode()
            if line == _DONE.encode():
                return
