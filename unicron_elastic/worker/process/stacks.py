"""Lets the agent read this worker's Python stacks, of all threads, also while the main thread waits in C.

Python's own ``faulthandler`` writes them, on a real-time signal that nothing else uses, into an anonymous file
which the agent finds under /proc. It needs neither the interpreter's lock nor another program.
"""

from __future__ import annotations

import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGRTMAX - 2
FILE_NAME = "unicron-stacks"


def offer_stacks() -> int | None:
    """The descriptor into which the stacks will be written; None if the script uses the signal itself."""
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return None
    fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    return fd
