"""What the launcher has told this process by its environment."""

from __future__ import annotations

import os


def of_launcher(name: str, default: int) -> int:
    """Return the number that this variable is, or the ``default`` where it is not set."""
    return int(os.environ.get(name, default))
