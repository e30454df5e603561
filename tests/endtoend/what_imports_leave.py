"""A script that writes down what imports have left in its process: numbers and words in modules, and living things."""

import io
import json
import os
import random
import socket
import sys
import threading
import time
import types
from typing import Any

import numpy
import torch
import torch._dynamo
import torch.distributed
import torch.nn.parallel
import torch.utils.data

DEPTH = 5
LONGEST = 5000  # of what is gone into
LIVING = ("Popen", "Process", "ThreadPoolExecutor", "ProcessPoolExecutor")
OURS = ("unicron_elastic", "sitecustomize", "__main__", "__mp_main__")
SKIPPED = {"__builtins__", "__cached__", "__spec__", "__loader__", "__warningregistry__"}
MARK = "TEST_RUN"


class Walk:
    """Goes through all that can be reached from modules, and keeps what it has seen."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.living: dict[str, str] = {}
        self._seen: dict[int, Any] = {}

    def modules(self) -> None:
        for name, module in sorted(sys.modules.items()):
            if isinstance(module, types.ModuleType) and not name.startswith(OURS):
                for key, value in list(vars(module).items()):
                    if key not in SKIPPED:
                        self.into(f"{name}.{key}", value, DEPTH)

    def into(self, path: str, value: Any, depth: int) -> None:
        if value is None or type(value) in (int, float, str, bytes, bool):
            self.values[path] = repr(value)[:300]
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        is_file = isinstance(value, io.IOBase)
        if is_file or isinstance(value, socket.socket | threading.Thread) or kind.__name__ in LIVING:
            self.living[path] = kind.__name__
        if repr(kind) in ("<class '_thread.lock'>", "<class '_thread.RLock'>") and repr(value).startswith("<locked"):
            self.living[path] = "locked"
        if depth > 0 and not is_file and not isinstance(value, types.ModuleType | torch.Tensor):
            for name, each in self._parts(value, kind):
                self.into(name if ":" in name.partition("[")[0] else f"{path}{name}", each, depth - 1)

    def _parts(self, value: Any, kind: type) -> list[tuple[str, Any]]:
        if isinstance(value, dict | list | tuple | set | frozenset) and len(value) > LONGEST:
            return []
        if isinstance(value, dict):
            items = [(f"{key!r:.60}", each) for key, each in list(value.items()) if isinstance(key, str | bytes | int)]
            return [(f"[{'address' if len(key) > 12 and key.isdigit() else key}]", each) for key, each in items]
        if isinstance(value, list | tuple):
            return [(f"[{number}]", each) for number, each in enumerate(value)]
        if isinstance(value, set | frozenset):
            return [("{}", repr(sorted(map(repr, value))))] if all(type(each) is str for each in value) else []
        if isinstance(value, type):
            name = f"{value.__module__}:{value.__qualname__}"
            own = value.__module__ in sys.modules and value.__module__ != "builtins"
            return [(f"{name}.{key}", each) for key, each in vars(value).items() if own and not key.startswith("__")]
        if isinstance(value, types.FunctionType):
            return [(f"({number})", each) for number, each in enumerate(value.__defaults__ or ())]
        fields = getattr(value, "__dict__", None) if kind.__module__ != "torch._ops" else None
        return [(f".{key}", each) for key, each in list(fields.items())] if type(fields) is dict else []


def born_at() -> float:
    """When this process began, in seconds since the machine did."""
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(") ")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def pids_of_run() -> set[str]:
    """Of all processes of this run but this one."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if os.environ[MARK].encode() in file.read() and int(pid) != os.getpid():
                    found.add(pid)
        except OSError:
            pass
    return found


def of_the_past(values: dict[str, str]) -> dict[str, str]:
    """Which numbers are a time within the ten minutes before this process began."""
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = {}
    for path, text in values.items():
        if not text.replace(".", "", 1).isdigit():
            continue
        number = float(text)
        seconds = number / 1e9 if "." not in text and number > 1e12 else number
        is_time = "." in text or number > 1e9
        if is_time and any(-600 < seconds - clock - born_at() < -0.05 for clock in (boot, 0.0)):
            found[path] = text
    return found


def main() -> None:
    draws = [torch.initial_seed(), random.random(), numpy.random.rand()]
    walk = Walk()
    walk.modules()
    pids = pids_of_run()
    rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    told = {
        "values": walk.values,
        "living": walk.living,
        "draws": draws,
        "past": of_the_past(walk.values),
        "pids": {path: text for path, text in walk.values.items() if text.strip("b'\"") in pids},
        "modules": sorted(name for name in sys.modules if not name.startswith(OURS)),
    }
    folder = os.environ["PROBE"]
    with open(f"{folder}/left-{count}-{rank}.part", "w") as file:
        json.dump(told, file)
    os.rename(file.name, f"{folder}/left-{count}-{rank}")
    while not all(os.path.exists(f"{folder}/left-{count}-{other}") for other in range(2)):
        time.sleep(0.02)
    sys.exit(int(count == "0"))


main()
