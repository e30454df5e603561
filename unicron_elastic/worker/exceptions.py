"""Exception propagation: type, message and stack reach the agent before the interpreter begins to tear down."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
import traceback
from types import TracebackType

from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.notices import Raised
from unicron_elastic.worker.process.imported_modules import is_installed

MESSAGE_CHARS_MAX = 4_000
STACK_CHARS_MAX = 20_000
HIDDEN_FOR_S = 5.0  # so long after the word of a departure its breaks are no news

# Of a collective or store whose peer has ended: gloo, NCCL, torch's TCPStore.
_BROKEN = re.compile(
    r"connection (?:was )?(?:closed|reset)|broken pipe|socket closed|remote process exited", re.IGNORECASE
)


class _Reporter:
    """Sends the exception that ends this process, once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._pid = os.getpid()
        self._reported: BaseException | None = None
        self._previous_hook = sys.excepthook

    def hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._report(error, trace, is_final=_called_by_interpreter())
        self._previous_hook(kind, error, trace)

    def hide_broken(self) -> None:
        """Installs a hook that prints nothing of a connection that breaks soon; the agent hears of it as of any."""
        before, until = sys.excepthook, time.monotonic() + HIDDEN_FOR_S

        def quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if time.monotonic() < until and _BROKEN.search(_text_of(error)):
                self._report(error, trace, is_final=_called_by_interpreter())
            else:
                before(kind, error, trace)

        sys.excepthook = quiet

    def at_exit(self) -> None:
        """Catches what ``hook`` missed because the script installed a hook of its own."""
        error = getattr(sys, "last_value", None)
        if sys.excepthook != self.hook and isinstance(error, BaseException) and _ended_the_process(error):
            self._report(error, error.__traceback__, is_final=True)

    def _report(self, error: BaseException, trace: TracebackType | None, is_final: bool) -> None:
        if os.getpid() != self._pid or (is_final and self._reported is error):
            return
        if is_final:
            self._reported = error
        try:
            raised = Raised(exception=describe(error, trace), is_final=is_final, at_ns=time.monotonic_ns())
            self._control.send(raised)
        except (OSError, ChannelClosed):
            pass  # no agent to tell; the traceback below still goes to stderr


def _called_by_interpreter() -> bool:
    """Whether the hook runs because an exception ends the process.

    A script may call ``sys.excepthook`` itself, to print an exception it survived. The interpreter calls it with no
    Python frame beneath; the outermost frame is then the installed hook, ours or one (torch's) that calls ours.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
    hook = sys.excepthook
    return frame.f_code is getattr(getattr(hook, "__func__", hook), "__code__", None)


def _ended_the_process(error: BaseException) -> bool:
    """Whether nothing caught ``error``: its way then began in the outermost frame.

    Debuggers, consoles and test runners leave exceptions that they caught in ``sys.last_value`` too.
    """
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_back is None


_reporters: list[_Reporter] = []  # of this process: the one that is installed


def hide_broken_connections() -> None:
    """Print no traceback of a connection that breaks in the next seconds, as a node departs: that is no failure."""
    for reporter in _reporters:
        reporter.hide_broken()


def propagate(control: Control) -> None:
    """Installs the hooks. What the script does to ``sys.excepthook`` later stays its own affair."""
    reporter = _Reporter(control)
    _reporters.append(reporter)
    sys.excepthook = reporter.hook
    atexit.register(reporter.at_exit)


def describe(error: BaseException, trace: TracebackType | None) -> dict[str, str | None]:
    """The exception as plain data: ``type``, ``message``, ``stack`` (text) and ``location`` ("file:line in function").

    The location is the innermost frame outside installed packages, which is where a user looks first.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = _text_of(error)
    frames = traceback.extract_tb(trace)
    stack = "".join(traceback.format_exception(kind, error, trace))
    described: dict[str, str | None] = {
        "type": name,
        "message": message[:MESSAGE_CHARS_MAX],
        "stack": stack if len(stack) <= STACK_CHARS_MAX else f"...\n{stack[-STACK_CHARS_MAX:]}",
        "location": _location(frames),
    }
    if isinstance(error, SyntaxError) and error.filename:
        described["location"] = f"{error.filename}:{error.lineno}"
    return described


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # a user's __str__ may fail
        return f"<str() of this exception raised {type(failure).__name__}>"


def _location(frames: traceback.StackSummary) -> str | None:
    if not frames:
        return None
    own = [frame for frame in frames if not is_installed(frame.filename)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
