"""Tells what the script's own signal handlers raise, in the middle of a collective, from what the collective raises."""

from __future__ import annotations

import signal
from inspect import CO_VARARGS
from types import CodeType, FrameType
from typing import Any

_OF_COLLECTIVES = ("builtins", "torch", "unicron_elastic")  # where the types of what they raise are


def is_of_script(error: BaseException) -> bool:
    """Return whether it says nothing of a collective and is the script's to handle.

    Python runs the script's signal handlers in whatever the main thread is waiting for, and a thread may raise an
    exception there (PyThreadState_SetAsyncExc). A handler is one also if it has put another in its place by now.
    """
    if type(error).__module__.partition(".")[0] not in _OF_COLLECTIVES:
        return True
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers or _was_given_its_caller(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _was_given_its_caller(frame: FrameType) -> bool:
    """Return whether the frame from which the function seems to be called is one of its arguments, as for handlers."""
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return frame.f_back is not None and any(each is frame.f_back for each in given)


def _code(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, or an object that can be called."""
    function = getattr(handler, "func", handler)  # of functools.partial
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
