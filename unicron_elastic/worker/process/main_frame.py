"""What the main thread runs, for who looks from another thread."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def main_frame() -> FrameType | None:
    """Return its innermost frame; None if it has ended, or nobody has imported ``threading``.

    Python 3.11 makes objects for that while it holds a lock for which each new thread waits. If they have it collect
    garbage, and something of that lets go of the interpreter, as the end of a collective does, then who starts a thread
    at that moment and this one wait for each other (CPython's issue 106883). So nothing is collected meanwhile.
    """
    threading = sys.modules.get("threading")
    if threading is None:
        return None
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    return frames.get(threading.main_thread().ident)
