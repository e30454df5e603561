"""Tells the agent, when it asks, how far this worker has come in the collectives of its process groups.

On the agent's word it breaks them, too. A thread of its own answers, so that a main thread that waits in a collective
or in a system call need not. It sleeps in the kernel until it is asked, and is no ``threading.Thread``, so that a
script which counts its threads does not see it.
A worker that does not answer holds the interpreter, or was stopped: that is an answer, too.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
from collections.abc import Sequence

from unicron_elastic.compat.loaded import C10D, all_groups, sequence_number
from unicron_elastic.worker import recorder
from unicron_elastic.worker.arrivals import arrivals
from unicron_elastic.worker.channel import ChannelClosed, Message
from unicron_elastic.worker.collectives import break_collectives, free_to_stop
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.worlds import hear

THREAD_NAME = "unicron-answers"  # for the kernel: who asks whether a worker is at work does not mean this thread

GROUPS_MAX = 256  # in an answer; Megatron makes dozens
FRAMES_MAX = 20  # from the innermost: between a script's call and the wait there are three
OP_CHARACTERS = 40


def answer_questions(control: Control) -> None:
    """Begins to answer; returns at once."""
    _thread.start_new_thread(_answer, (control,))


def _answer(control: Control) -> None:
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w") as name:
        name.write(THREAD_NAME)
    while True:
        try:
            question = control.wait()
            if "where" in question:
                answer = {"where": question["where"], "groups": _position_or_nothing(), "uses_gpu": _uses_gpu()}
                control.send(answer)
                _learn_groups()
            elif "arrivals" in question:
                control.send({"arrivals": _arrivals_or_nothing()})
            elif "stopping" in question:
                free_to_stop(str(question["stopping"]))
            elif "abort" in question:
                broken = break_collectives(str(question["abort"]))
                control.send({"aborted": {"groups": broken.groups[:GROUPS_MAX], "sockets": broken.sockets}})
            else:
                hear(question)
        except TimeoutError:
            continue  # the agent was stopped, and its questions come when it goes on
        except (ChannelClosed, OSError, ValueError):
            return  # the agent is gone, or the script closed our descriptor: to ask again could go on for ever


def _position_or_nothing() -> list[Message]:
    """An answer in any case: who gives none is taken for a worker whose interpreter does not run."""
    try:
        return position()
    except Exception:  # the main thread makes or destroys groups meanwhile
        return []


def _arrivals_or_nothing() -> Message | None:
    try:
        return arrivals()
    except Exception:  # another torch, which records otherwise
        return None


def position() -> list[Message]:
    """Of each process group, the whole job's first: its name and how many collectives it has begun and ended.

    The numbers are those of torch's flight recorder, which counts for all back ends; ``ended`` is None without it. If
    one group alone is waited in, ``op`` says for what, where that is known.
    """
    groups = {str(group.group_name): group for group in all_groups()[:GROUPS_MAX]}
    recorded = _recorded(list(groups))
    found: list[Message] = []
    for name, group in groups.items():
        if name in recorded:
            begun, ended = recorded[name]
            found.append({"name": name, "begun": begun, "ended": ended})
        else:
            with contextlib.suppress(Exception):  # a back end that counts nothing
                begun = sequence_number(group)
                found.append({"name": name, "begun": begun, "ended": None if begun else 0})
    waiting = [each for each in found if each["ended"] is not None and each["begun"] > each["ended"]]
    if len(waiting) == 1 and (op := _operation()):
        waiting[0]["op"] = op
    return found


def _operation() -> str:
    """The collective that the main thread has called, "all_reduce"; "" where it waits outside, as in a backward pass.

    The recorder knows the names, too, but tells them only together with the last 2000 collectives, which takes longer
    than an answer may.
    """
    with contextlib.suppress(Exception):
        frame = sys._current_frames().get(sys.modules["threading"].main_thread().ident)
        for _ in range(FRAMES_MAX):
            if frame is None:
                break
            if frame.f_globals.get("__name__") == C10D:
                return frame.f_code.co_name[:OP_CHARACTERS]
            frame = frame.f_back
    return ""


def _uses_gpu() -> bool:
    with contextlib.suppress(Exception):
        return bool(sys.modules["torch"].cuda.is_initialized())
    return False


def _recorded(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What torch's flight recorder knows of each group, by its name; nothing if it does not record."""
    with contextlib.suppress(Exception):
        return recorder.counts(names)
    return {}


def _learn_groups() -> None:
    """After an answer, which must not wait for it: the next one knows more."""
    with contextlib.suppress(Exception):
        if recorder.needs_to_learn():
            recorder.learn()
