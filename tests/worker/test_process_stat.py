"""What the kernel says of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unicron_elastic.worker.process.process_stat import parse_stat, read_stat

FIELDS = f"42 42 0 -1 4194304 {' '.join('0' * 4)} 70 7 0 0 20 0 3 0 777"


def test_a_name_may_hold_anything() -> None:
    stat = parse_stat(f"42 (py) T (x) S 1 {FIELDS} 0 0 0\n")
    assert stat == ("py) T (x", "S", 1, 4194304, 77, 3, 777, None)


@pytest.mark.parametrize("text", ["", "42", "42 (x)", "42 (x) T", "42 (x) T 1 2 3", f"42 (x) T - {FIELDS}"])
def test_what_is_no_such_line_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text(text)
    assert read_stat(str(path)) is None
    with pytest.raises(ValueError):
        parse_stat(text)


def test_this_process_runs_and_has_the_parent_that_it_has() -> None:
    own, thread = read_stat("/proc/self/stat"), read_stat("/proc/thread-self/stat")
    assert own is not None
    assert thread is not None
    assert (own.parent, own.threads, own.has_ended) == (os.getppid(), len(os.listdir("/proc/self/task")), False)
    assert thread.state == "R"
    assert read_stat("/proc/0/stat") is None


def test_one_that_nobody_has_collected_has_ended_with_what_it_said() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = read_stat(f"/proc/{child.pid}/stat")
        assert stat is not None
        assert (stat.state, stat.has_ended, stat.exit_status) == ("Z", True, 3 << 8)
