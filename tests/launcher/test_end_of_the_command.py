"""How the process of ``unicron-run`` ends, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unicron_elastic.launcher import main

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


def test_in_a_folder_that_is_gone_it_ends_as_torchrun_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main._run_command([str(tmp_path / "train.py")]) == 2
    assert capfd.readouterr().err == (
        "unicron-run: the folder in which it was started is gone; start it in one that is there\n"
    )
