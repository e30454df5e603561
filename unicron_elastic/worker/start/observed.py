"""What of its process a script can observe before it imports anything: no learned import may change it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def observed() -> dict[str, Any]:
    """Return it, in words for people: values that can be compared."""
    found: dict[str, Any] = {}
    for what, look in _LOOKS.items():
        with contextlib.suppress(Exception):  # the module is there in part, or another version's
            found[what] = look()
    return found


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Say what of it has changed, None if nothing has; what can only now be observed has not."""
    return next((what for what, value in before.items() if after.get(what) != value), None)


def _of(module: str, *paths: str) -> Callable[[], Any]:
    """Return what looks at names in a module, calling what can be called; it raises if there is none."""

    def look() -> list[str]:
        values = []
        for path in paths:
            value: Any = sys.modules[module]
            for name in path.split("."):
                value = getattr(value, name)
            values.append(repr(value() if callable(value) else value))
        return values

    return look


def _descriptors() -> list[str]:
    """Those open, but for what is the same in each process that has it open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{fd}")
            if not kind.startswith(("/dev/null", "/dev/urandom", "/memfd:libffi", "/proc/")):
                found.append(f"{fd} {kind}")
    return sorted(found)


def children() -> list[int]:
    """Return the children of this process's main thread."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))


def _of_root_logger() -> list[Any]:
    logging: Any = sys.modules["logging"]
    root = logging.root
    return [root.level, list(map(id, root.handlers)), logging.getLoggerClass(), root.manager.disable]


def _hooks() -> list[int]:
    names = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "stdin", "stdout", "stderr")
    return [id(getattr(sys, name)) for name in names] + [id(threading.excepthook), id(warnings.showwarning)]


def _random_of_torch() -> bytes:
    state: Any = sys.modules["torch"].get_rng_state()
    return bytes(state.tolist())  # NumPy need not be there


_LOOKS: dict[str, Callable[[], Any]] = {
    "the environment": lambda: dict(os.environ),
    "the current folder": os.getcwd,
    "sys.path": lambda: list(sys.path),
    "a handler of a signal": lambda: [repr(signal.getsignal(number)) for number in signal.valid_signals()],
    "a timer": lambda: [signal.getitimer(which) for which in range(3)],
    "a hook of the interpreter": _hooks,
    "the recursion limit": sys.getrecursionlimit,
    "the collector's settings": lambda: (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
    "tracing": lambda: (sys.gettrace(), sys.getprofile()),
    "limits of the process": lambda: [resource.getrlimit(number) for number in range(16)],
    "which processors it may use": lambda: sorted(os.sched_getaffinity(0)),
    "open descriptors": _descriptors,
    "its children": children,
    "the locale": lambda: sys.modules["locale"].setlocale(sys.modules["locale"].LC_ALL),
    "how processes are started": lambda: sys.modules["multiprocessing"].get_start_method(allow_none=True),
    "faulthandler": _of("faulthandler", "is_enabled"),
    "decimal's context": _of("decimal", "getcontext"),
    "the root logger": _of_root_logger,
    "numpy's settings": _of("numpy", "geterr"),
    "numpy's random numbers": _of("numpy.random", "get_state"),
    "torch's random numbers": _random_of_torch,
    "torch's settings": _of(
        "torch", "get_default_dtype", "is_grad_enabled", "get_num_threads", "get_float32_matmul_precision",
        "are_deterministic_algorithms_enabled", "backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32",
        "backends.cudnn.benchmark", "cuda.is_initialized",
    ),
    "how torch's processes share memory": _of("torch.multiprocessing", "get_sharing_strategy"),
}  # fmt: skip
