"""What ranks of the training scripts write at their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def final(folder: Path, rank: int) -> dict[str, Any]:
    """Return what this rank has come to."""
    found: dict[str, Any] = json.loads((folder / f"final-{rank}.json").read_text())
    return found
