"""A last resort: a training loop that stays in a collective whose connections are gone ends its process.

Gloo (torch 2.13) forgets a send that was under way when a connection ends, and nothing wakes who waits for it
without a time-out; ``training.collective`` says how waits of our own avoid that. Waits of others, as within a
model, cannot be reached. The rank is then lost as one that was killed: the others go on without it, and it is
replaced.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from unicron_elastic.compat.loaded import C10D_FILE
from unicron_elastic.worker.process.main_stack import StackLine, main_stack

STUCK_S = 5.0
LOOK_S = 0.5
_CPU_S = 0.001  # that a thread may use while it waits
# Where others are waited for. Not all of torch.distributed: who writes a checkpoint may wait for a slow disk.
_WAITING = (
    C10D_FILE,
    "/megatron/core/pipeline_parallel/",
    "/unicron_elastic/engine/transport/waiter.py",
)


class Glance(NamedTuple):
    """Where the main thread is, and how much of a processor it has used."""

    stack: tuple[StackLine, ...]
    cpu_s: float

    @property
    def file(self) -> str:
        """Return that of the innermost call."""
        return self.stack[0].file


def is_stuck(before: Glance, now: Glance) -> bool:
    """Whether it waits in the same place as before, and for other ranks."""
    place = now.file.replace("\\", "/")
    is_same = before.stack == now.stack
    return is_same and now.cpu_s - before.cpu_s < _CPU_S and any(part in place for part in _WAITING)


def end_if_stuck(has_gone_on: Callable[[], bool], why: str) -> None:
    """Watches the main thread from a thread of its own until it ``has_gone_on``; ``why`` it has to, as a sentence."""
    threading.Thread(target=_watch, args=(has_gone_on, why), name="unicron-stuck", daemon=True).start()


def _watch(has_gone_on: Callable[[], bool], why: str) -> None:
    first = _glance()
    since = time.monotonic()
    while not has_gone_on():
        time.sleep(LOOK_S)
        now = _glance()
        if first is None or now is None or not is_stuck(first, now):
            first, since = now, time.monotonic()
        elif time.monotonic() - since >= STUCK_S and not has_gone_on():
            sys.stderr.write(
                f"unicron: this rank waits in a collective that was broken off and does not end ({now.file}), "
                f"and begins again. {why}\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def _glance() -> Glance | None:
    main = threading.main_thread()
    stack = main_stack()
    if not stack or main.ident is None:
        return None
    return Glance(stack, time.clock_gettime(time.pthread_getcpuclockid(main.ident)))
