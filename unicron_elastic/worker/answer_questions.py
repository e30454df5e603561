"""Tells the agent, when it asks, how far this worker has come in the collectives of its process groups.

On the agent's word they are broken, too. A thread of its own answers, so that a main thread that waits in a
collective or in a system call need not. It sleeps in the kernel until it is asked, and is no ``threading.Thread``,
so that a script which counts its threads does not see it. A worker that does not answer holds the interpreter, or
was stopped: that is an answer, too.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from unicron_elastic.compat.loaded import (
    C10D_FILE,
    all_groups,
    has_other_default_type,
    sequence_number,
)
from unicron_elastic.worker.arrivals import arrivals
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.collectives.broken import free_to_stop
from unicron_elastic.worker.collectives.recorder import counts, learn, needs_to_learn
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.exceptions import hide_broken_connections
from unicron_elastic.worker.instructions import (
    INSTRUCTIONS,
    AskCollectives,
    AskImported,
    AskPosition,
    ExpectBreaks,
    FreeToStop,
    Instruction,
)
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.notices import GroupCounts, Imported, LatestCollectives, Position
from unicron_elastic.worker.process.imported_modules import ImportedModules
from unicron_elastic.worker.process.main_stack import in_ascii, main_stack
from unicron_elastic.worker.worlds import hear

THREAD_NAME = "unicron-answers"  # for the kernel: who asks whether a worker is at work does not mean this thread

GROUPS_MAX = 256  # in an answer; Megatron makes dozens
FRAMES_MAX = 20  # from the innermost: between a script's call and the wait there are three
OP_CHARACTERS = 40


def answer_questions(control: Control, imported: ImportedModules | None = None) -> None:
    """Begins to answer; returns at once. ``imported`` knows what was."""
    _thread.start_new_thread(_answer, (control, imported))


def _answer(control: Control, imported: ImportedModules | None) -> None:
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w") as name:
        name.write(THREAD_NAME)
    tell_odd = _once(lambda why: _say(f"what the agent said is left out: {why}."))
    tell_failed = _once(lambda why: _say(f"what the agent wants is not done: {why}."))
    while True:
        try:
            instruction = control.wait(INSTRUCTIONS)
            with control.answering():
                if isinstance(instruction, Odd):
                    tell_odd(instruction.why)
                elif isinstance(instruction, AskImported):
                    if imported is not None:
                        control.send(_imported(imported))
                else:
                    _do(control, instruction)
        except TimeoutError:
            continue  # the agent was stopped, and its questions come when it goes on
        except (ChannelClosed, OSError):
            return  # the agent is gone, or the script closed our descriptor: to ask again could go on for ever
        except Exception as error:
            tell_failed(f"{type(error).__name__}: {error}")


def _do(control: Control, instruction: Instruction) -> None:
    """Answer a question of the agent, or do what it wants. Raises ChannelClosed and OSError as ``Control``."""
    match instruction:
        case AskPosition(question=question):
            answer = Position(
                question=question,
                groups=_position_or_nothing(),
                uses_gpu=_uses_gpu(),
                is_at_prompt=is_at_prompt(),
            )
            control.send(answer)
            _learn_groups()
        case AskCollectives():
            control.send(_arrivals_or_nothing())
        case ExpectBreaks():
            hide_broken_connections()
        case FreeToStop(reason=reason):
            if free_to_stop(reason):
                hear(instruction)
        case _:
            hear(instruction)


def _imported(imported: ImportedModules) -> Imported:
    return Imported(
        modules=imported.installed(),
        changed=imported.changed_variables,
        seeded_before=imported.seeded_before,
        after_group=imported.after_group,
        changed_since=imported.changed_since,
        has_other_type=has_other_default_type(),
    )


def _once(tell: Callable[[str], object]) -> Callable[[str], None]:
    """Return what tells the first thing that it is given, and nothing after that."""
    told: list[str] = []

    def tell_first(what: str) -> None:
        if not told:
            told.append(what)
            tell(what)

    return tell_first


def _say(sentence: str) -> None:
    with contextlib.suppress(Exception):  # the script may have closed or replaced its stderr
        sys.stderr.write(f"unicron: {sentence}\n")


def _position_or_nothing() -> tuple[GroupCounts, ...]:
    """An answer in any case: who gives none is taken for a worker whose interpreter does not run."""
    try:
        return position()
    except Exception:  # the main thread makes or destroys groups meanwhile
        return ()


def _arrivals_or_nothing() -> LatestCollectives:
    try:
        return arrivals()
    except Exception:  # another torch, which records otherwise
        return LatestCollectives()


def _recorded(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What torch's flight recorder knows of each group, by its name; nothing if it does not record."""
    with contextlib.suppress(Exception):
        return counts(names)
    return {}


def position(recorded: Callable[[Sequence[str]], dict[str, tuple[int, int]]] = _recorded) -> tuple[GroupCounts, ...]:
    """Return each process group, the whole job's first: its name and how many collectives it has begun and ended.

    The numbers are those of torch's flight recorder, which counts for all back ends; ``ended`` is None without it. If
    one group alone is waited in, ``op`` says for what, where that is known.
    """
    groups = {str(group.group_name): group for group in all_groups()[:GROUPS_MAX]}
    counted = recorded(list(groups))
    found: list[GroupCounts] = []
    for name, group in groups.items():
        if name in counted:
            begun, ended = counted[name]
            found.append(GroupCounts(name=name, begun=begun, ended=ended))
        else:
            with contextlib.suppress(Exception):  # a back end that counts nothing
                begun = sequence_number(group)
                found.append(GroupCounts(name=name, begun=begun, ended=None if begun else 0))
    waiting = [place for place, each in enumerate(found) if each.ended is not None and each.begun > each.ended]
    if len(waiting) == 1:
        found[waiting[0]] = replace(found[waiting[0]], op=_operation())
    return tuple(found)


def _operation() -> str:
    """The collective that the main thread has called, "all_reduce"; "" where it waits outside, as in a backward pass.

    The recorder knows the names, too, but tells them only together with the last 2000 collectives, which takes longer
    than an answer may.
    """
    with contextlib.suppress(Exception):
        for call in main_stack()[:FRAMES_MAX]:
            if call.file.endswith(C10D_FILE):
                return call.function[:OP_CHARACTERS]
    return ""


# Whose prompt it is where the main thread waits in them, and in what they may wait there.
_PROMPTS = (
    *("IPython", "_pydevd_bundle", "_pyrepl", "bdb", "bpdb", "bpython", "cmd", "code", "debugpy", "getpass", "ipdb"),
    *("pdb", "prompt_toolkit", "ptpython", "pudb", "pydevd", "remote_pdb", "rpdb", "urwid", "web_pdb"),
)
_WAITS = (
    *("_pydev_bundle", "asyncio", "codecs", "contextlib", "queue", "readline", "selectors", "socket", "socketserver"),
    *("ssl", "threading"),
)


def is_at_prompt() -> bool:
    """Whether the main thread waits in a debugger or a console, for a person."""
    with contextlib.suppress(Exception):
        calls = main_stack()[:FRAMES_MAX]
        names = _modules_of({call.file for call in calls})
        for call in calls:
            module = names.get(call.file, "").partition(".")[0]
            if module not in _WAITS:
                return module in _PROMPTS
    return False


def _modules_of(files: set[str]) -> dict[str, str]:
    """Return the names of the modules that are in these files, which are called as ``main_stack`` calls them."""
    found = {file: file.removeprefix("<frozen ").rstrip(">") for file in files if file.startswith("<frozen ")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # None stands for one that must not be imported
        if isinstance(file, str) and (called := in_ascii(file)) in files:
            found[called] = name
    return found


def _uses_gpu() -> bool:
    with contextlib.suppress(Exception):
        return bool(sys.modules["torch"].cuda.is_initialized())
    return False


def _learn_groups() -> None:
    """After an answer, which must not wait for it: the next one knows more."""
    with contextlib.suppress(Exception):
        if needs_to_learn():
            learn()
