"""A live panel in the bottom rows of a terminal to which the worker processes write as well.

The workers' output is not piped through us, so the panel must not own the screen as rich.live does. Instead the
terminal is told to scroll only the rows above the panel (DECSTBM, as apt does for its progress bar). Each refresh is
one write that begins by saving the cursor and ends by restoring it: the kernel does not let another process's write
into the middle of ours, so no script ever finds the cursor in the panel.
"""

from __future__ import annotations

import atexit
import io
import os
import threading
from collections import Counter
from typing import TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.output import PANEL_MIN_ROWS, PATIENCE_S, Output, is_foreground, stamped
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView

REFRESH_INTERVAL_S = 0.5
MIN_COLUMNS = 20
MAX_STATE_LINES = 3
SLOW_FACTOR = 1.1  # times the median; the Unicron paper takes less for normal fluctuation

_SAVE, _RESTORE = "\x1b7", "\x1b8"  # DECSC, DECRC: the cursor and its colours
_SCROLL_ALL = f"{_SAVE}\x1b[r{_RESTORE}"  # DECSTBM moves the cursor to the top left
_ERASE_BELOW = "\x1b[0m\x1b[J"

# Undoes a panel without knowing its place, for whoever outlives a PanelConsole that could not close itself.
RESTORE_SEQUENCE = _SCROLL_ALL + _ERASE_BELOW


def panel_lines(view: LocalJobView, width: int) -> list[Text]:
    """The panel as lines of at most ``width`` cells; pure, and the same for the same view."""
    lines = [_title(view, width), _job_line(view), _progress_line(view), *_state_lines(view.workers), _incident(view)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _title(view: LocalJobView, width: int) -> Text:
    title = Text.assemble("── ", ("unicron", "bold"), f" {one_line(view.job)} ── run {one_line(view.run_id)} ")
    return title.append("─" * (width - title.cell_len), "dim")


def _job_line(view: LocalJobView) -> Text:
    line = Text(f"generation {view.generation}  ")
    line.append(f"restarts {view.restarts_used} of {view.max_restarts}", "yellow" if view.restarts_used else "")
    nodes = f"{view.nodes} node{'s' if view.nodes != 1 else ''}"
    return line.append(f"  {nodes}  world size {view.world_size}  up {_duration(view.uptime_s)}")


def _progress_line(view: LocalJobView) -> Text:
    if view.step is None:
        return Text("no step yet", "dim")
    line = Text.assemble((f"step {view.step:,}", "bold"))
    if view.steps_per_s is None or view.step_time_s is None:
        return line
    fast = view.steps_per_s >= 1
    line.append(f"  {view.steps_per_s:.4g} steps/s" if fast else f"  {view.step_time_s:.4g} s a step")
    slowest = max(view.workers, key=lambda worker: worker.step_time_s or 0.0)
    factor = (slowest.step_time_s or 0.0) / view.step_time_s
    if factor > SLOW_FACTOR:
        line.append(f"  slowest: rank {slowest.rank}, {factor:.1f}x the median", "yellow")
    return line


def _state_lines(workers: tuple[WorkerView, ...]) -> list[Text]:
    """One line for each state, most frequent first; the rare ones together where there are too many."""
    counts = sorted(Counter(worker.state for worker in workers).items(), key=lambda item: (-item[1], item[0]))
    if not counts:
        return [Text("no workers", "dim")]
    own = counts if len(counts) <= MAX_STATE_LINES else counts[: MAX_STATE_LINES - 1]
    lines = [_state_line(state, [worker for worker in workers if worker.state == state]) for state, _ in own]
    rest = counts[len(own) :]
    if rest:
        lines.append(Text(", ".join(f"{count} {one_line(state)}" for state, count in rest), "yellow"))
    return lines


def _state_line(state: str, workers: list[WorkerView]) -> Text:
    count = f"{len(workers)} worker{'s' if len(workers) != 1 else ''} {one_line(state)}"
    ranks = _ranges(sorted(worker.rank for worker in workers))
    noun = "rank" if len(workers) == 1 else "ranks"
    return Text.assemble((count, "green" if state == "running" else "yellow"), f"  {noun} {ranks}")


def _incident(view: LocalJobView) -> Text:
    if view.last_incident is None:
        return Text("no incident", "dim")
    return Text.assemble(("last incident: ", "bold"), one_line(view.last_incident))


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


class PanelConsole:
    """Keeps the bottom rows of a terminal for a panel; everything else scrolls above it."""

    refresh_interval_s: float | None = REFRESH_INTERVAL_S
    farewell = RESTORE_SEQUENCE

    def __init__(self, stream: TextIO, patience_s: float = PATIENCE_S) -> None:
        self._output = Output(stream, patience_s)
        self._lock = threading.RLock()
        self._height = 0  # rows kept for the panel; 0: it is not there
        self._size: os.terminal_size | None = None  # of the terminal when the panel was drawn
        self._drawn: list[str] = []
        no_color = bool(os.environ.get("NO_COLOR"))
        self._rich = RichConsole(
            file=io.StringIO(), force_terminal=True, color_system="standard", no_color=no_color, highlight=False
        )
        atexit.register(self.close)

    def say(self, sentence: str) -> None:
        """Prints the sentence, with the time of day, as a line in the scrolling part."""
        with self._lock:
            size = self._terminal_size()
            # A row of spaces brings the cursor to the next line only if a script left it in the middle of one: from
            # the first column they end in the last, where terminals wait for one more character before they wrap.
            fresh_line = " " * size.columns + "\r\x1b[K" if size is not None else ""
            self._output.write(fresh_line + stamped(sentence).replace("\n", "\r\n"))

    def show(self, view: LocalJobView) -> None:
        """Draws the panel if it, or the size of the terminal, has changed since the last time."""
        with self._lock:
            size = self._terminal_size()
            if size is None or size.lines < PANEL_MIN_ROWS or size.columns < MIN_COLUMNS or not self._is_ours():
                self._withdraw(size)
                return
            # One column stays free: a full line would be broken in two by a terminal that is made narrower.
            lines = [self._ansi(line) for line in panel_lines(view, size.columns - 1)]
            if lines == self._drawn and size == self._size:
                return
            height = max(len(lines), self._height)  # never shrinks, so that the script's output does not jump
            is_in_place = (height, size) == (self._height, self._size)
            change = "" if is_in_place else self._unreserve(size) + _reserve(height, size)
            if self._output.offer(change + _paint(lines, height, size)):
                self._drawn, self._height, self._size = lines, height, size

    def close(self) -> None:
        """Takes the panel away and gives all rows back to the script."""
        with self._lock:
            atexit.unregister(self.close)
            self._withdraw(self._terminal_size())
            self._output.close()

    def _withdraw(self, size: os.terminal_size | None) -> None:
        if self._height:
            self._output.write(self._unreserve(size))
            self._height, self._size, self._drawn = 0, None, []

    def _unreserve(self, size: os.terminal_size | None) -> str:
        """Erases the panel and lets all rows scroll. After a resize its place is only known to be below the cursor."""
        if not self._height:
            return ""
        if size != self._size or size is None:
            return _SCROLL_ALL + _ERASE_BELOW
        return f"{_SAVE}\x1b[r\x1b[{size.lines - self._height + 1};1H{_ERASE_BELOW}{_RESTORE}"

    def _terminal_size(self) -> os.terminal_size | None:
        try:
            return os.get_terminal_size(self._output.fd) if self._output.fd is not None else None
        except OSError:
            return None

    def _is_ours(self) -> bool:
        return self._output.fd is not None and is_foreground(self._output.fd)

    def _ansi(self, line: Text) -> str:
        with self._rich.capture() as capture:
            self._rich.print(line, end="", soft_wrap=True)
        return capture.get()


def _reserve(height: int, size: os.terminal_size) -> str:
    """Frees the bottom rows, scrolling only if the cursor stands in them, and lets the rest scroll alone."""
    free = "\x1bD" * height + f"\x1b[{height}A"  # IND and CUU: down and up again in the same column
    return f"{free}{_SAVE}\x1b[1;{size.lines - height}r{_RESTORE}"


def _paint(lines: list[str], height: int, size: os.terminal_size) -> str:
    """Draws the panel. The region is set again as well: a script that resets the terminal takes it away."""
    top = size.lines - height + 1
    rows = lines + [""] * (height - len(lines))
    drawn = "".join(f"\x1b[{top + number};1H\x1b[0m\x1b[2K{row}" for number, row in enumerate(rows))
    return f"{_SAVE}\x1b[1;{top - 1}r{drawn}{_RESTORE}"
