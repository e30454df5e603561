"""A launcher that is a fork of a warm one is, to its workers and to who looks at it, one that was started anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

LOOK = """
import json, os, time
own = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TMPDIR", "TEST_RUN"}
environ = {name: value for name, value in os.environ.items() if name not in own and not name.startswith("UNICRON_")}
with open("seen", "w") as file:
    signals = [line for line in open("/proc/self/status") if line.startswith(("SigP", "SigB", "SigI", "SigC"))]
    json.dump([environ, os.getcwd(), signals], file)
print("seen", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


def seen_of(launcher: Any) -> list[Any]:
    """What a worker sees of its start, and what one sees of its launcher."""
    run = launcher.start("--nproc-per-node=1", launcher.script("look.py", LOOK))
    run.until_line("seen")
    agent = Path(f"/proc/{run.process.pid}")
    assert run.process.pid in run.carriers()
    run.until(lambda: "SigBlk:\t0000000000000000" in (agent / "status").read_text(), "no signal to be held")
    status = [line for line in (agent / "status").read_text().splitlines() if line.startswith(("Name", "SigI"))]
    streams = [(agent / "fd" / str(number)).readlink().name.partition("-")[0] for number in range(3)]
    seen = [status, streams, (agent / "cwd").readlink(), os.getpgid(run.process.pid), os.getsid(run.process.pid)]
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err
    (launcher.folder / "stop").unlink()
    return [*seen, *json.loads((launcher.folder / "seen").read_text())]


def test_a_warm_launcher_is_as_one_that_was_started_anew(launcher: Any) -> None:
    seen = seen_of(launcher)
    launcher.warm = None
    assert seen == seen_of(launcher)


@pytest.mark.parametrize("code", [0, 3])
def test_it_ends_as_its_job(launcher: Any, code: int) -> None:
    launcher.script("end.py", f"raise SystemExit({code})")
    assert launcher.run("--nproc-per-node=1", "end.py").process.returncode == (1 if code else 0)


def test_one_that_is_killed_is_known_by_its_signal(launcher: Any) -> None:
    launcher.script("sleep.py", "import time; print('here', flush=True); time.sleep(60)")
    run = launcher.start("--nproc-per-node=1", "sleep.py")
    run.until_line("here")
    run.process.kill()
    assert run.wait() == -9
