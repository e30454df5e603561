"""A pty with a terminal emulator at its far end: what people would see."""

import fcntl
import os
import sys
import termios

import pytest

pyte = pytest.importorskip("pyte")

MARK = b"\x1b]2;mark\x07"  # a window title: seen by the reader, not on the screen


class Terminal:
    """``stream`` is what the launcher and the script write to."""

    def __init__(self, rows=24, columns=80):
        self.master, slave = os.openpty()
        self.stream = open(slave, "w")  # noqa: SIM115
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self.emulator = pyte.ByteStream(self.screen)
        self._tell_size(rows, columns)

    def script_prints(self, text):
        os.write(self.stream.fileno(), text.encode())

    def update(self):
        """Shows everything written so far; returns those bytes."""
        os.write(self.stream.fileno(), MARK)
        data = b""
        while MARK not in data:  # it need not be last: another thread may write as well
            data += os.read(self.master, 1 << 16)
        self.emulator.feed(data)
        return data.replace(MARK, b"")

    def resize(self, rows, columns):
        """As xterm, VTE and tmux do: lines below the cursor go first, and the cursor stays on its line."""
        self.update()
        below = self.screen.lines - 1 - self.screen.cursor.y
        lost_above = max(0, self.screen.lines - rows - below)
        x, y = self.screen.cursor.x, self.screen.cursor.y
        self.screen.set_margins()
        self.screen.cursor_position()
        lost_below = max(0, self.screen.lines - rows) - lost_above
        if lost_below:
            self.screen.insert_lines(lost_below)  # pyte itself drops lines from the top only
        self.screen.resize(rows, columns)
        self.screen.cursor.x, self.screen.cursor.y = min(x, columns - 1), y - lost_above
        self._tell_size(rows, columns)

    def rows(self):
        self.update()
        return [line.rstrip() for line in self.screen.display]

    def text_above(self, panel_rows):
        """What scrolled out of the screen and what is on it, without the ``panel_rows`` at the bottom."""
        gone = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return gone + self.rows()[:-panel_rows]

    def cursor(self):
        self.update()
        return self.screen.cursor.y, self.screen.cursor.x

    def close(self):
        self.stream.close()
        os.close(self.master)

    def _tell_size(self, rows, columns):
        size = b"".join(number.to_bytes(2, sys.byteorder) for number in (rows, columns, 0, 0))
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)
