"""How the process of ``unicron-run`` ends, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 60.0

# A thread sums memory as one does that copies a neighbour's snapshot; another one is waited for.
SCRIPT = """
import atexit, sys, threading, time
from unicron_elastic.launcher import main
from unicron_elastic.state.checksum import Checksum

has_begun = threading.Event()

def copy():
    memory = memoryview(bytearray(50_000_000))
    while True:
        Checksum().add(memory)
        has_begun.set()

def finish():
    time.sleep(0.2)
    print("finished")

def run(argv):
    threading.Thread(target=copy, daemon=True).start()
    has_begun.wait()
    threading.Thread(target=finish).start()
    atexit.register(print, "at exit")
    sys.stdout.write("ran\\n")
    return 7

main._run_command = run
main.console_script()
"""


def test_threads_that_copy_do_not_abort_it(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "command.py"]
    for _ in range(3):
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (ended.returncode, ended.stderr) == (7, "")
        assert ended.stdout.splitlines() == ["ran", "finished", "at exit"]
