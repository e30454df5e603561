"""A signal that comes while the launcher starts one of its threads: ``Thread.start`` must not see its exception."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEADLINE_S

LAUNCHER = """
import os, signal, sys, threading
start = threading.Thread.start

def struck(thread):
    start(thread)
    if thread.name == os.environ["STRUCK"]:
        print("STRUCK", file=sys.stderr)
        try:
            signal.raise_signal(signal.SIGHUP)
        except Exception:  # what Thread.start makes a KeyError of
            print("RAISED", file=sys.stderr)
            raise

threading.Thread.start = struck
from unicron_elastic.launcher.main import console_script
sys.exit(console_script())
"""


@pytest.mark.parametrize("name", ["unicron-nvml", "unicron-health-host", "unicron-barrier"])
def test_the_signal_ends_the_job_once_the_thread_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "script.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "launcher.py", "--nproc-per-node=1", "--signals-to-handle=SIGTERM,SIGHUP", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "STRUCK": name, "UNICRON_PRELOAD": "json", "XDG_STATE_HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.stderr.count("STRUCK") == 1
    assert "RAISED" not in ended.stderr
    assert "got signal: 1" in ended.stderr
    assert ended.returncode == 1
