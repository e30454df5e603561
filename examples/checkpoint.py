"""A checkpoint file, as scripts write them by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, step: int, **state: Any) -> None:
    """Write the state of each, after ``step`` steps or epochs; a crash on the way leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save({"step": step, **{name: _state_of(each) for name, each in state.items()}}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path, **state: Any) -> int:
    """Load the state of each, if there is a file, and return how many steps or epochs it has behind it."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, each in state.items():
        (each.update if isinstance(each, dict) else each.load_state_dict)(saved[name])
    return int(saved["step"])


def _state_of(each: Any) -> Any:
    return each if isinstance(each, dict) else each.state_dict()
