"""The training script of examples/two_jobs, which raises when it is sent SIGUSR1, wherever it is in a step."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "two_jobs"))

from train import main


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise ValueError("a batch has no samples")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _raise)
    main()
