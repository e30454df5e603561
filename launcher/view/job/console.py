"""What one unicron-run shows while it works: a live panel, plain lines, or nothing."""

from __future__ import annotations

import os
import sys
from typing import Protocol, TextIO

from unicron_elastic.launcher.common.output import PANEL_MIN_ROWS, Output, is_foreground, stamped
from unicron_elastic.launcher.view.job.view import LocalJobView

MODES = ("auto", "panel", "plain", "off")


class Console(Protocol):
    """Where the agent speaks to people. No method blocks for long or raises, whatever became of the terminal."""

    @property
    def refresh_interval_s(self) -> float | None:
        """How often ``show`` is wanted; None: never."""

    @property
    def farewell(self) -> str:
        """What undoes ``show`` on the terminal when this process can no longer do it; empty: nothing."""

    def say(self, sentence: str) -> None:
        """Prints one sentence as a line of its own. Safe from any thread."""

    def show(self, view: LocalJobView) -> None:
        """Brings the live view up to date, where there is one."""

    def close(self) -> None:
        """Leaves the terminal as it was found. May be called again; ``say`` still works afterwards."""


class SilentConsole:
    """Says and shows nothing."""

    refresh_interval_s: float | None = None
    farewell = ""

    def say(self, sentence: str) -> None:
        """Does nothing."""

    def show(self, view: LocalJobView) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class PlainConsole:
    """Lines only: ``[unicron] 14:03:22 sentence``."""

    refresh_interval_s: float | None = None
    farewell = ""

    def __init__(self, stream: TextIO) -> None:
        self._output = Output(stream)

    def say(self, sentence: str) -> None:
        """Prints the sentence with the time of day."""
        self._output.write(stamped(sentence))

    def show(self, view: LocalJobView) -> None:
        """Does nothing: lines that come by the second would bury the script's own."""

    def close(self) -> None:
        """Lets go of the stream."""
        self._output.close()


def open_console(mode: str, stream: TextIO) -> Console:
    """The console for ``mode``: auto, panel, plain or off. Raises ValueError for another word.

    ``auto`` is a panel where both ``stream`` and stdout are a terminal that can show one, else plain: with stdout in
    a file or pipe, stderr is often read by a program too. ``panel`` asks about ``stream`` alone.
    """
    if mode not in MODES:
        raise ValueError(f"{mode!r} is no console mode; it takes {', '.join(MODES[:-1])} or {MODES[-1]}")
    if mode == "off":
        return SilentConsole()
    if mode != "plain" and _can_show_panel(stream) and (mode == "panel" or _is_terminal(sys.stdout)):
        from unicron_elastic.launcher.view.job.panel import (
            PanelConsole,  # rich costs 60 ms, which plain lines need not pay
        )

        return PanelConsole(stream)
    return PlainConsole(stream)


def _can_show_panel(stream: TextIO) -> bool:
    if not _is_terminal(stream) or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        return os.get_terminal_size(stream.fileno()).lines >= PANEL_MIN_ROWS and is_foreground(stream.fileno())
    except (OSError, ValueError):
        return False


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # ValueError: closed
        return False
