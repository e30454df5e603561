"""The place of a script at which it asked for a state: who goes on from that one is back when it comes there again.

A snapshot has the random numbers of the moment of the call. What a script draws between its restore() and that place
moves them on, as the one batch that it looks at before its loop does; there they can be put back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PACKAGE = "unicron_elastic"


class PlaceOfCall:
    """`PlaceOfCall` is where a script has called for its latest state, and for that which it goes on from."""

    def __init__(self) -> None:
        self._latest: list[str | int] = []
        self._taken: list[str | int] = []

    def note(self, step: int) -> bool:
        """Note who calls for the state of this step; return whether the state that was taken over was asked for so."""
        self._latest = [*_caller(), step]
        return self._latest == self._taken

    def state_dict(self) -> list[str | int]:
        """Return the place, and the step that was asked for there; nothing before the first call."""
        return self._latest

    def load_state_dict(self, state: Sequence[str | int]) -> None:
        """Takes it over; a state of which nothing is known was asked for nowhere."""
        self._taken = list(state)

    def forget_taken(self) -> None:
        """The script has gone on from there: it comes to the same place as ever."""
        self._taken = []


def _caller() -> list[str | int]:
    """Return the file's name, the line and the function of who has called this package.

    Of the path there is the name alone: one start of a script may name it as it was given, and another in full.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return [os.path.basename(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name]
