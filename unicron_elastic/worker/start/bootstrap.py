"""Attaches the in-band parts to a worker: the pulse page, the control channel, exception propagation.

Runs before the user's script. It must never break or slow it: each part that fails says so once and steps aside.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from unicron_elastic.worker.answer_questions import answer_questions
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.collectives.broken import watch_groups
from unicron_elastic.worker.collectives.recorder import learn
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.exceptions import propagate
from unicron_elastic.worker.notices import Ending, FirstStep
from unicron_elastic.worker.phases import announce_phases
from unicron_elastic.worker.process.entry_points import watch_entry_points
from unicron_elastic.worker.process.imported_modules import ImportedModules
from unicron_elastic.worker.process.stacks import offer_stacks
from unicron_elastic.worker.pulse import Pulse
from unicron_elastic.worker.rank_monitor.finder import offer_rank_monitor
from unicron_elastic.worker.start.hidden_modules import show_hidden
from unicron_elastic.worker.step_count import count_steps
from unicron_elastic.worker.worlds import offer

# Set by the agent, removed here: the script's environment is torchrun's.
CONTROL_FD = "UNICRON_CONTROL_FD"
PULSE_FD = "UNICRON_PULSE_FD"
WARM_FD = "UNICRON_WARM_FD"
ATTACH = "UNICRON_ATTACH"  # auto: to trainers that a script imports
CHAOS = "UNICRON_CHAOS"  # a plan of faults: tests and drills

_Part = TypeVar("_Part")


def start(loaded_before: Iterable[str], refusal: str | None) -> None:
    """Called once, by ``sitecustomize``: attaches this worker, or serves as the warm process workers fork from.

    ``loaded_before`` are the modules of an interpreter without us. A warm process does not serve if there is a
    ``refusal``, which says why.
    """
    warm_fd = _take_fd(WARM_FD)
    if warm_fd is None:
        attach(_take_fd(CONTROL_FD), _take_fd(PULSE_FD))
        _guarded("clean list of modules", lambda: show_hidden(loaded_before))
        return
    from unicron_elastic.worker.start import warm

    attach(*warm.serve(warm_fd, loaded_before, refusal), is_warm=True)  # returns only in a forked worker


def attach(control_fd: int | None, pulse_fd: int | None, *, is_warm: bool = False) -> None:
    """Takes over the two inherited descriptors and installs the hooks that feed them.

    What it imports from now on is remembered if the worker ``is_warm``, for those that come after it.
    """
    attaches = _take(ATTACH) == "auto"
    control = _guarded("control channel", lambda: _open_control(control_fd))
    pulse = _guarded("pulse page", lambda: None if pulse_fd is None else Pulse(pulse_fd))
    if control is not None:
        _guarded("exception propagation", lambda: propagate(control))
    imported = _guarded("memory of imports", lambda: ImportedModules(os.environ)) if is_warm else None
    answer = _once(lambda: None if control is None else answer_questions(control, imported))

    def first_group_made() -> None:
        if imported is not None:
            imported.note_group()
        answer()

    if control is not None:
        _guarded("collective breaker", lambda: watch_groups(first_group_made))
        _guarded("word of new worlds", lambda: offer(control, answer))

    def first_step_done(step: int) -> None:
        _first_step_done(control, step, answer)

    if pulse is not None:
        _guarded("step counting", lambda: count_steps(pulse, first_step_done, pulse.count))
        _guarded("phases", lambda: announce_phases(pulse))
    _guarded("rank monitor", lambda: offer_rank_monitor(control, pulse, first_step_done))
    if attaches:
        _guarded("trainer attached to", watch_entry_points)
    if os.environ.get(CHAOS):
        _guarded("fault injection", _install_chaos)


def _install_chaos() -> None:
    from unicron_elastic.testing.chaos import install_from_environment

    install_from_environment()


def _open_control(fd: int | None) -> Control | None:
    if fd is None:
        return None
    control = Control(fd)
    # A child forked by the script is not this worker: it must not speak in its name.
    os.register_at_fork(after_in_child=control.close)
    atexit.register(control.say_goodbye, Ending())
    return control


def _once(action: Callable[[], object]) -> Callable[[], None]:
    """Does ``action`` at the first call, whichever thread calls first."""
    is_done = threading.Lock()

    def act() -> None:
        if is_done.acquire(blocking=False):
            action()

    return act


def _first_step_done(control: Control | None, step: int, answer: Callable[[], None]) -> None:
    """Says so, and answers the agent's questions from now on, if the worker does not since its first process group."""
    if control is not None:
        stack_fd = _guarded("stacks for the agent", offer_stacks)
        try:
            control.send(FirstStep(step=step, stack_fd=stack_fd))
        except (OSError, ChannelClosed):
            return  # the agent is gone or stopped; the keeper deals with that
        _guarded("answers to the agent", answer)
        _guarded("names of process groups", learn)  # few collectives are on record yet: it is quick


def _take(name: str) -> str | None:
    return os.environ.pop(name, None)


def _take_fd(name: str) -> int | None:
    value = _take(name)
    if value is None:
        return None
    fd = int(value)
    os.set_inheritable(fd, False)
    return fd


def _guarded(what: str, part: Callable[[], _Part]) -> _Part | None:
    try:
        return part()
    except Exception as error:
        sys.stderr.write(f"unicron: no {what} in this worker: {type(error).__name__}: {error}\n")
        return None
