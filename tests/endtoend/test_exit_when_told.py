"""What a benchmark leaves behind that is told to end: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 60.0
# As the one that measures what an agent costs, which stops it in turn.
MEASURES = """
import os, signal
from _exit_when_told import exit_when_told
from _launchers import UNICRON, Launch
exit_when_told()
with Launch(UNICRON, 1, [], 60.0, prefix=["sh", "-c", "kill -STOP $$"]) as launch:
    os.waitid(os.P_PID, launch.process.pid, os.WSTOPPED | os.WNOWAIT)
    print(launch.process.pid, launch.folder, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_stopped_goes_with_its_folder(number: signal.Signals) -> None:
    command = [sys.executable, "-c", MEASURES]
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid, folder = benchmark.stdout.readline().split()
        benchmark.send_signal(number)
        assert benchmark.wait(DEADLINE_S) == 128 + number
    assert not os.path.exists(folder)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
