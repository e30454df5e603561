"""What is inside of a process group that outlives its worlds: what carries its collectives in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Inside(Protocol):
    """An `Inside` has connections with the members of one world, and carries collectives over them.

    It has a method for each collective, by the names of ``compat.collectives.python_group.COLLECTIVES``.
    """

    @property
    def kind(self) -> str:
        """Return the name of its back end."""

    @property
    def looks_up(self) -> bool:
        """Return whether its waits have to be looked into, as what they wait for may never end."""

    def call_itself(self, name: str, ranks: Sequence[int]) -> None:
        """Have its collectives recorded under the name of a group, of these ranks of the whole job."""

    def sequence_number(self) -> int:
        """Return how many collectives were begun."""

    def break_off(self) -> None:
        """Break these connections, and none of other groups. Returns at once, from any thread."""

    def shutdown(self) -> None:
        """End it, when nothing is under way."""
