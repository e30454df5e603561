"""Shows an overview on a terminal or in a log, once or again and again."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unicron_elastic.launcher.common.tables import wrapped
from unicron_elastic.launcher.config.answers import UNREADABLE, local_time, say, show
from unicron_elastic.launcher.view.cluster.changes import changes
from unicron_elastic.launcher.view.cluster.overview import LEVELS, Overview
from unicron_elastic.launcher.view.cluster.text import status_lines


def exit_code(overview: Overview) -> int:
    """0 if all is well, 1 if something is degraded, 2 if something is critical."""
    return LEVELS.index(overview.verdict.level)


def terminal() -> Console | None:
    """Where colours and the size mean something; None: the answer is plain lines."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb") or encoding != "utf8":
        return None
    return Console(highlight=False, markup=False, emoji=False)


def show_once(overview: Overview) -> None:
    """Show a screenful on a terminal; all of it elsewhere."""
    console = terminal()
    if console is None:
        show("\n".join(_plain(overview)))
        return
    for line in status_lines(overview, local_time, console.size.width, console.size.height - 1):
        console.print(line, no_wrap=True, overflow="crop")


class Log:
    """The whole once, then what changes: nothing that a terminal would have to understand."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._seen: Overview | None = None
        self._trouble = ""

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def see(self, overview: Overview) -> int:
        """Tells what is new; the exit code."""
        before, self._seen = self._seen, overview
        news = [] if before is None else changes(before, overview)
        if self._trouble:
            self._trouble = ""
            news.insert(0, "The cluster can be read again.")
        if self._as_json and (before is None or news):
            self._write([json.dumps({**overview.to_json(), "changes": news}, separators=(",", ":"))])
        elif before is None:
            self._write(_plain(overview))
        elif not self._as_json:
            self._write(f"{local_time(overview.at_unix_s):%Y-%m-%d %H:%M:%S}  {each}" for each in news)
        return exit_code(overview)

    def cannot_see(self, why: str) -> int:
        """Says so once; the exit code."""
        if not self._trouble:
            self._trouble = why
            say(why)
        return UNREADABLE

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            show(line)
        sys.stdout.flush()


class Screen:
    """The whole terminal while it lasts; what was on it comes back."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._console = console
        self._seen: Overview | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Screen:
        for number in (signal.SIGTERM, signal.SIGHUP):  # else they would leave the terminal as it is
            self._handlers[number] = signal.signal(number, signal.default_int_handler)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def see(self, overview: Overview) -> int:
        """Draws it; the exit code."""
        self._seen = overview
        self._draw(overview, [])
        return exit_code(overview)

    def cannot_see(self, why: str) -> int:
        """Draws why above what was seen last; the exit code."""
        if self._seen is not None:
            width = self._console.size.width
            self._draw(self._seen, [Text(line, "bold red") for line in wrapped(f"OUT OF DATE. {why}", width, "")])
        return UNREADABLE

    def _draw(self, overview: Overview, above: list[Text]) -> None:
        size = self._console.size
        lines = status_lines(overview, local_time, size.width, size.height - len(above))
        self._live.update(Text("\n", overflow="crop", no_wrap=True).join([*above, *lines]), refresh=True)


def _plain(overview: Overview) -> list[str]:
    """Show what a pipe gets: all of it, in lines as long as they are."""
    return [line.plain.rstrip() for line in status_lines(overview, local_time, None, None)]
