"""For workers of benchmarks: what each process does is written down, one line each, on the clock of all processes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

RANK = int(os.environ["RANK"])


class Log:
    """A `Log` of what this process does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{RANK}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._folder = folder

    def note(self, what: str, step: int, **more: float) -> None:
        """Write it down."""
        self._file.write(json.dumps({"at": time.time(), "what": what, "step": step, **more}) + "\n")

    def is_first(self, what: str) -> bool:
        """Whether nobody has asked that before."""
        with suppress(FileExistsError):
            (self._folder / what).touch(exist_ok=False)
            return True
        return False

    def end(self, step: int) -> None:
        """End this process as by a fault of the machine."""
        self.note("killed", step)
        os.kill(os.getpid(), signal.SIGKILL)
