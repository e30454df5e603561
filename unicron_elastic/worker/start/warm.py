"""The warm process: torch imported, nothing else done; workers are forked from it.

It is the worker's own command, stopped before the script. A fork of it returns from ``serve`` and goes on as that
command, so a start costs milliseconds instead of an interpreter and ``import torch``. Before it offers itself, it
proves that a fork of it works: no thread that a fork would lose, no CUDA context, and arithmetic in a child ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import resource
import select
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NoReturn

from unicron_elastic.compat.loaded import DYNAMO, forbids_cuda
from unicron_elastic.worker.channel import Channel, ChannelClosed, close_all
from unicron_elastic.worker.helper_tasks import (
    Forgotten,
    ForkWorker,
    HelperAnswer,
    HelperReady,
    Learn,
    Learned,
    ProcessStarted,
    TakeUp,
    Unfit,
    WarmUp,
)
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.process.collector_paused import collector_paused
from unicron_elastic.worker.process.ignored_signals import ignore_instead, ignored_signals
from unicron_elastic.worker.process.mark import MARK, show_mark
from unicron_elastic.worker.process.prctl import die_with_parent, set_thread_name, wait_for_parent
from unicron_elastic.worker.process.show_command import show_command
from unicron_elastic.worker.start.hidden_modules import hidden_modules, script_folder
from unicron_elastic.worker.start.in_between import InBetween
from unicron_elastic.worker.start.late import hold_back
from unicron_elastic.worker.start.learner import Learner
from unicron_elastic.worker.start.learner import serve as serve_learned
from unicron_elastic.worker.start.learning import Learning
from unicron_elastic.worker.start.likeness import arguments_at, how_different
from unicron_elastic.worker.start.renewal import Renewal
from unicron_elastic.worker.start.reuse import Reuse
from unicron_elastic.worker.start.variables import ImportedVariables

PRELOAD = "UNICRON_PRELOAD"
TRIAL_DEADLINE_S = 10.0
# In the environment while modules are imported, unless the user has set them; no worker finds them there.
_WHILE_IMPORTING = {
    # Makes torch.cuda.is_available() ask NVML instead of opening CUDA in a process that will fork
    # (pytorch.org/docs: "Environment Variables").
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Keeps pyarrow's allocator from starting a thread of its own, which returns memory a little earlier and which a
    # fork would lose; allocations then return it as they go (jemalloc.net/jemalloc.3.html, "background_thread").
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# Where there is no GPU there is no NVML to ask, and torch opens CUDA to count none.
_WITHOUT_A_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


_TASKS: tuple[type[ForkWorker | Learn | TakeUp], ...] = (ForkWorker, Learn, TakeUp)


class _Unfit(Exception):
    """This process must not be forked from; the text says why."""


def serve(fd: int, loaded_before: Iterable[str], refusal: str | None = None) -> tuple[int, int]:
    """Preloads, then forks a worker for each request; returns (control fd, pulse fd) in each worker only.

    A module that the script brings along must not be among those loaded since ``loaded_before``. With a ``refusal``
    nothing is preloaded, and the agent is told why.
    """
    channel = Channel.from_fd(fd)
    ignored = ignored_signals()
    with open("/proc/self/comm") as comm:
        original_name = comm.read().rstrip("\n")
    set_thread_name("unicron-warm")
    try:
        asked = channel.hear([WarmUp])
        if isinstance(asked, Odd):
            raise _Unfit(f"what the agent asks is not known: {asked.why}")
        refusal = refusal or how_different(asked.launch.argv, asked.launch.env, {MARK, PRELOAD})
        if refusal is not None:
            raise _Unfit(refusal)
        renewal = Renewal()
        variables = ImportedVariables(asked.launch.env)
        reuse = Reuse(asked, loaded_before) if asked.may_be_held else None
        with collector_paused():  # later, too, it leaves these pages alone: the workers share them
            with renewal.watching():
                threads = _preload(os.environ.pop(PRELOAD, "torch").split(","), variables)
            if early := variables.read_of(asked.sets):
                raise _Unfit(f"the script sets {early}, which is read when what is preloaded is imported")
            _check_shadowing(loaded_before)
            hold_back()
            gc.collect()
        _try_fork(threads)
        if reuse is not None:
            reuse.imported()
    except BaseException as error:  # whatever it is, this process must never go on to the script
        _send_and_exit(channel, Unfit(reason=_why(error)))
    _send(channel, HelperReady())
    taken_up = partial(_taken_up, reuse, variables, loaded_before)
    task, channel = _fork_workers(channel, partial(_learn, (renewal, variables), loaded_before), taken_up)
    try:
        channel.close()
        set_thread_name(original_name)
        return _become_worker(task, ignored, renewal, variables)
    except BaseException as error:
        sys.stderr.write(f"unicron: this worker could not be set up: {type(error).__name__}: {error}\n")
        os._exit(1)


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, _Unfit) else f"{type(error).__name__}: {error}"


def _fork_workers(
    channel: Channel,
    learn: Callable[[Learn, Channel, int], ForkWorker],
    taken_up: Callable[[TakeUp, Learner], HelperAnswer],
) -> tuple[ForkWorker, Channel]:
    """Forks a worker for each request until the agent is gone; returns, in each worker, what it is to be.

    The other thing that is returned is a channel that is the worker's to close. ``learn`` returns in a worker as well.
    """
    warm_pid = os.getpid()
    learner = Learner()
    between = InBetween()
    while True:
        try:
            task = _next_task(channel, learner, between)
            if isinstance(task, TakeUp):
                channel.send(taken_up(task, learner))
                continue
            if isinstance(task, Learn):
                learners_end = learner.begin(between)
                if learners_end is not None:
                    channel.close()
                    return learn(task, learners_end, warm_pid), learners_end
                continue
            is_worker = _fork_from_either(channel, learner, between, task)
        except BaseException:  # ChannelClosed at the end; a signal sent to all processes of the job
            os._exit(0 if os.getpid() == warm_pid else 1)
        if is_worker:
            learner.forget()
            return task, channel
        close_all(task.fds)


def _taken_up(
    reuse: Reuse | None, variables: ImportedVariables, loaded_before: Iterable[str], asked: TakeUp, learner: Learner
) -> HelperAnswer:
    """Serve another launch from now on, with what there is of the last one's; or say why not."""
    try:
        if (why := "it was not to be held" if reuse is None else reuse.why_not(asked, variables)) is not None:
            raise _Unfit(why)
        _check_shadowing(loaded_before)
    except Exception as error:
        return Unfit(reason=_why(error))
    assert reuse is not None
    if reuse.sets_more(asked):
        learner.stop()
    reuse.begin_anew(asked)
    _take_arguments(list(asked.launch.argv))
    show_mark(asked.mark)
    return HelperReady()


def _next_task(channel: Channel, learner: Learner, between: InBetween) -> ForkWorker | Learn | TakeUp:
    """Waits for what the agent wants, and tells it what the learner says meanwhile."""
    while True:
        watched = [each for each in (channel, learner.channel) if each is not None]
        if learner.channel in between.wait_readable(watched):
            channel.send(learner.hear())
            continue
        task = channel.hear(_TASKS)
        if isinstance(task, Odd):
            raise ValueError(task.why)
        return task


def _fork_from_either(channel: Channel, learner: Learner, between: InBetween, task: ForkWorker) -> bool:
    """Forks a worker from the learner, or from this process where that cannot serve; true in a worker of the latter."""
    answer = learner.fork(task)
    if answer is not None:
        channel.send(answer)
    return not isinstance(answer, ProcessStarted) and _fork_worker(channel, between, task)


def _learn(
    left: tuple[Renewal, ImportedVariables], loaded_before: Iterable[str], task: Learn, channel: Channel, home: int
) -> ForkWorker:
    """Learns, in a fork of its own, and then forks workers; returns in each what it is to be.

    ``left`` knows what imports leave.
    """
    renewal, variables = left
    set_thread_name("unicron-learns")
    began_bytes = _resident_bytes()
    try:
        die_with_parent(home)
        _replace_environment(task.env)
        with collector_paused(), renewal.watching(), _set_while_importing(), _without_warnings(), _in_silence():
            learning = Learning(task, home, _try_fork)
            had = len(sys.modules)
            learning.run()
            _check_shadowing(loaded_before)
            variables.keep(learning.set_variables)
            hold_back()
            gc.collect()
        answer = Learned(
            modules=len(sys.modules) - had,
            grown_bytes=max(0, _resident_bytes() - began_bytes),
            left_out=tuple(learning.left_out),
        )
        _send(channel, answer)
    except BaseException as error:  # whatever it is, this process must never go on to the script
        _send_and_exit(channel, Forgotten(why=_why(error)))

    def why_forgotten() -> str | None:
        path = learning.stamps.changed()
        if path is not None:
            return f"{path} has changed"
        try:
            _check_shadowing(loaded_before)
        except _Unfit as error:
            return str(error)
        return None

    between = InBetween()
    return serve_learned(channel, between, why_forgotten, partial(_fork_worker, channel, between))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """What is said while modules are imported was said by those who have imported them first."""
    kept = [os.dup(fd) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def _send(channel: Channel, answer: HelperAnswer) -> None:
    try:
        channel.send(answer)
    except ChannelClosed:
        os._exit(0)


def _send_and_exit(channel: Channel, answer: HelperAnswer) -> NoReturn:
    _send(channel, answer)
    os._exit(0)


def _preload(names: list[str], variables: ImportedVariables) -> dict[str, str]:
    """Imports ``names``; one prefixed ``?`` may be absent. Returns by thread which module has started it."""
    threads = dict.fromkeys(_threads(), "python")
    with _set_while_importing(), _without_warnings():
        for name in filter(None, names):
            # What is held back (late) is yet to be imported by the script, and its changes come then.
            with variables.watching(keeps_changes=name.lstrip("?") != DYNAMO):
                _import(name)
            threads |= dict.fromkeys(_threads() - threads.keys(), name.lstrip("?"))
    return threads


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def _set_while_importing() -> Iterator[None]:
    wanted = _WHILE_IMPORTING if any(map(os.path.exists, _GPUS)) else {**_WHILE_IMPORTING, **_WITHOUT_A_GPU}
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _import(name: str) -> None:
    try:
        importlib.import_module(name.lstrip("?"))
    except ModuleNotFoundError as error:
        if not name.startswith("?"):
            raise _Unfit(f"cannot import {name}: {error}") from error
    except Exception as error:
        raise _Unfit(f"importing {name} failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Shows no warnings: a script may import those modules never, or with filters of its own.

    The agent imports torch as well, and shows what there is to say of that. Filters stay as the modules set them.
    """

    def drop(*_: object, **__: object) -> None:
        pass

    shows, warnings.showwarning = warnings.showwarning, drop
    try:
        yield
    finally:
        if warnings.showwarning is drop:
            warnings.showwarning = shows


def _check_shadowing(loaded_before: Iterable[str]) -> None:
    """A script may bring its own module of a preloaded name; only a plain start then imports the right one."""
    folder = script_folder(sys.orig_argv)
    if folder is not None:
        for name in hidden_modules(folder, loaded_before):
            raise _Unfit(f"{os.path.join(folder, name)} stands in for a module that was preloaded")


def _try_fork(threads: Mapping[str, str]) -> None:
    """Forks a child that does arithmetic. Libraries that know of fork have then put their threads away.

    ``threads`` says which module has started each.
    """
    child = os.fork()
    if child == 0:
        _trial()
    if _wait(child, TRIAL_DEADLINE_S) != 0:
        raise _Unfit("a trial fork could not compute; torch was in use before the fork")
    left = _threads() - {str(os.getpid())}
    if left:
        starters = sorted({threads.get(thread, "a module") for thread in left})
        raise _Unfit(f"{', '.join(starters)} has started {_named(left)}, and a fork would lose that")


def _named(threads: Iterable[str]) -> str:
    names = set()
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as comm:
            names.add(comm.read().rstrip("\n"))
    return f"a thread ({', '.join(sorted(names))})" if len(names) == 1 else f"threads ({', '.join(sorted(names))})"


def _trial() -> None:
    code = 1
    try:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            if forbids_cuda(torch):
                os._exit(2)
        code = 0
    finally:
        os._exit(code)


def _wait(pid: int, deadline_s: float) -> int:
    """The exit code of ``pid``, which is killed at the deadline."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], deadline_s)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)


def _fork_worker(channel: Channel, between: InBetween, task: ForkWorker) -> bool:
    """Forks twice, so that the worker becomes the keeper's child; true in the worker."""
    try:
        child = os.fork()
    except OSError as error:
        channel.send(ProcessStarted(number=task.number, errno=error.errno or 0))
        return False
    if child:
        between.add(child)
        return False
    try:
        _fork_in_between(channel, task)
    except OSError as error:
        channel.send(ProcessStarted(number=task.number, errno=error.errno or 0))
        os._exit(0)
    return True


def _fork_in_between(channel: Channel, task: ForkWorker) -> None:
    """Returns in the worker. Its pid is told once it leads a session of its own, so that a signal to it arrives."""
    is_leader, becomes_leader = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        os.close(becomes_leader)
        os.close(is_leader)
        return
    os.close(becomes_leader)
    os.read(is_leader, 1)  # the end comes with the session, or with the worker's death
    with contextlib.suppress(ChannelClosed, OSError):
        channel.send(ProcessStarted(number=task.number, pid=worker))
    os._exit(0)


def _become_worker(
    task: ForkWorker, ignored: Collection[int], renewal: Renewal, variables: ImportedVariables
) -> tuple[int, int]:
    """Gives this fork the descriptors, environment and arguments of the worker it is to be.

    ``ignored`` are the signals that the warm process found ignored. The agent may handle them since.
    """
    ignore_instead(ignored, task.ignored_signals)
    control_fd, pulse_fd, *streams = task.fds
    for fd, target in zip(streams, task.streams, strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    show_mark(task.env[MARK])
    _replace_environment(variables.applied_to(task.env))
    os.chdir(task.cwd)
    _take_arguments(list(task.argv))
    renewal.renew()
    atexit.register(_unfreeze)
    wait_for_parent(task.keeper)  # the process in between may not have ended yet
    die_with_parent(task.keeper)
    return control_fd, pulse_fd


def _take_arguments(argv: list[str]) -> None:
    """Becomes the command ``argv``, which differs from this process's own in the script's arguments alone."""
    begin = arguments_at(sys.orig_argv)
    if argv[:begin] != sys.orig_argv[:begin]:
        raise ValueError(f"{shlex.join(argv)} was asked of a fork of {shlex.join(sys.orig_argv)}")
    if argv != sys.orig_argv:
        show_command(argv)
    sys.argv[1:] = argv[begin:]
    sys.orig_argv[:] = argv


def _replace_environment(env: dict[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _unfreeze() -> None:
    """Let the interpreter's end collect what was frozen if nanobind is there, which tells of all that is left.

    It collects it in a plain start, too. That takes a second of processor time, which is else saved.
    """
    if any(each.__module__ == "nanobind" for each in type.__subclasses__(type)):
        gc.unfreeze()
