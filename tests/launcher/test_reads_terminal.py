"""Whether a process waits for what a person types is seen from outside."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from unicron_elastic.launcher.agent.process.activity import state
from unicron_elastic.launcher.agent.process.kernel_lines import reads_terminal

DEADLINE_S = 20.0


def _waits(code: str, *, at_terminal: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program that says when it begins to wait; it, and what would be typed into."""
    if at_terminal:
        typed, stdin = pty.openpty()
    else:
        stdin, typed = os.pipe()
    program = f"import os, select, sys\nos.write(2, b'r')\n{code}"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=stdin, stdout=stdin, stderr=subprocess.PIPE)
    os.close(stdin)
    assert process.stderr is not None
    assert process.stderr.read(1) == b"r"
    return process, typed


@pytest.mark.parametrize(
    ("code", "at_terminal", "expected"),
    [
        ("input()", True, True),
        ("import readline; input()", True, True),
        ("import pdb; pdb.set_trace(); x = 1", True, True),
        ("sys.stdin.readline()", True, True),
        ("os.read(0, 1)", True, True),
        ("poll = select.poll(); poll.register(0, select.POLLIN); poll.poll()", True, True),
        ("os.read(0, 1)", False, False),
        ("select.select([0], [], [])", False, False),
        ("import threading; threading.Event().wait()", True, False),
    ],
)
def test_a_read_from_a_terminal_is_seen(code: str, at_terminal: bool, expected: bool) -> None:
    process, typed = _waits(code, at_terminal=at_terminal)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while reads_terminal(process.pid) is not expected or state(process.pid) != "S":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        os.close(typed)
        assert process.stderr is not None
        process.stderr.close()
