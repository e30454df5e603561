"""What the launcher has told this process by its environment."""

from __future__ import annotations

import os


def of_launcher(name: str, default: int) -> int:
    """Return the number that this variable is, or the ``default`` where it is not set."""
    return int(os.environ.get(name, default))


def shown_local_rank(rank: int, local_rank: int, *, is_one_node: bool) -> int:
    """Return what a Trainer is to take for the rank on its node: somebody is the first there if ranks are lost."""
    if is_one_node:
        return rank
    return local_rank if rank else 0


def rank_before_meeting() -> int:
    """Return the rank of this process; one behind all others if it takes a lost one's place, and has not met them."""
    return of_launcher("RANK", 0) + of_launcher("UNICRON_TAKES_PLACE", 0) * of_launcher("WORLD_SIZE", 1)
