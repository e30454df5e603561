"""A fake NVML library made from ``fake_nvml.c``, and what it is to answer."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")

# nvmlReturn_t
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
UNKNOWN = 999

# nvmlEventType
DOUBLE_BIT_ECC = 2
XID = 8


def compile_library(compiler: str, target: Path, *options: str) -> Path:
    """Makes the library; the soname is the one that pynvml asks the loader for."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", "-pthread", *options]
    command += ["-Wl,-soname,libnvidia-ml.so.1", "-o", str(target), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return target


class FakeNvml:
    """The scenario of one test. Setting a value takes effect at the library's next call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._values: dict[str, int] = {"devices": 1}
        self._save()
        os.mkfifo(folder / "events")
        # Open at both ends, so that an event waits for a reader without blocking the test.
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self, values: Mapping[str, int]) -> None:
        self._values |= values
        self._save()

    def unset(self, *keys: str) -> None:
        for key in keys:
            del self._values[key]
        self._save()

    def event(self, gpu: int, kind: int, data: int = 0) -> None:
        os.write(self._events, f"{gpu} {kind} {data}\n".encode())

    def environment(self, library: Path) -> dict[str, str]:
        """For a process whose pynvml is to find this library by itself."""
        return {**os.environ, "FAKE_NVML": str(self.folder), "LD_LIBRARY_PATH": str(library.parent)}

    def close(self) -> None:
        os.close(self._events)

    def _save(self) -> None:
        lines = "".join(f"{key} {value}\n" for key, value in self._values.items())
        new = self.folder / "scenario.new"
        new.write_text(lines, encoding="ascii")
        os.replace(new, self.folder / "scenario")


def load_copy(library: Path, folder: Path) -> ctypes.CDLL:
    """Loads the library under a name of its own, so that no state is left from an earlier test."""
    copy = folder / f"{library.stem}-{folder.name}.so"
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy))
