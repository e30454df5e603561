"""Runs the Megatron-Core example with a rank that kills itself while it writes a checkpoint; once.

    struck_checkpoints.py RANK:STEP:POINT MARK example arguments ...

MARK is a file that is there when it has happened.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_processes import EXAMPLE

from unicron_elastic.megatron import checkpoint
from unicron_elastic.state.storage import manifest as storage_manifest


def main() -> None:
    """Puts the points in place, and trains."""
    (rank, step, point), mark, arguments = sys.argv[1].split(":"), Path(sys.argv[2]), sys.argv[3:]
    here: list[Path] = []

    def strike(at: str) -> None:
        if at == point and os.environ["RANK"] == rank and here[-1].name.startswith(f"step-{step}"):
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def armed(owner: Any, name: str, before: str = "", after: str = "") -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            strike(before)
            result = function(*args, **kwargs)
            strike(after)
            return result

        setattr(owner, name, call)

    begin = checkpoint._Save.__init__

    def began(own: Any, path: Path, *args: Any) -> None:
        here.append(path)
        begin(own, path, *args)

    checkpoint._Save.__init__ = began  # type: ignore[method-assign]
    armed(checkpoint._Save, "prepare", after="prepared")
    armed(checkpoint, "given", after="given")
    armed(checkpoint._Save, "write", after="written")
    armed(storage_manifest, "finish", before="plans", after="manifest")
    armed(checkpoint._Save, "finish", after="finished")
    sys.argv[:] = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
