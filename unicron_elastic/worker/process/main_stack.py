"""What the main thread runs, for who looks from another thread."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from typing import NamedTuple

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackLine(NamedTuple):
    """`StackLine` is one call: of which ``function``, in which line of which file, whose name is ``in_ascii``."""

    file: str
    line: int
    function: str


def main_stack() -> tuple[StackLine, ...]:
    """Return its calls, the innermost first; none if it has ended, or nobody has imported ``threading``.

    They are read from text that the interpreter writes while nothing else runs. Objects of its frames, which
    ``sys._current_frames`` gives, would keep what a function has after its end, until this thread lets go of them: a
    context that is left to end with the function, as Megatron-Core leaves one behind an evaluation in a pipeline, would
    end in the middle of what the main thread does next.
    """
    threading = sys.modules.get("threading")
    if threading is None:
        return ()
    stacks = {int(ident, 16): lines for ident, lines in _THREAD.findall(_all_stacks())}
    found = _LINE.findall(stacks.get(threading.main_thread().ident, ""))
    return tuple(StackLine(file, int(line), function) for file, line, function in found)


def in_ascii(name: str) -> str:
    """Return a name as the interpreter writes it there."""
    return name.encode("ascii", "backslashreplace").decode()


def _all_stacks() -> str:
    file = os.memfd_create("unicron-stacks", os.MFD_CLOEXEC)
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    finally:
        os.close(file)
