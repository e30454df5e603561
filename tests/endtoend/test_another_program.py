"""A script that puts another program into its process (exec) is told to be unseen, and nothing is made up of it."""

from __future__ import annotations

from typing import Any

import pytest

# Sets a variable that the dynamic linker reads at a program's start, as scripts do, and begins again.
AGAIN = """
import os, sys
if os.environ.get("LD_LIBRARY_PATH") != "/opt/none":
    os.environ["LD_LIBRARY_PATH"] = "/opt/none"
    os.execv(sys.executable, sys.orig_argv)
os.write(1, f"AGAIN {sys.argv[1:]}\\n".encode())
import time
time.sleep(0.2)
sys.exit(3)
"""


@pytest.mark.parametrize("warm", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_it_is_said_once_and_its_steps_are_unknown(launcher: Any, warm: str) -> None:
    script = launcher.script("again.py", AGAIN)
    options = ("--nproc-per-node=2", "--max-restarts=1", f"--unicron-warm={warm}")
    run = launcher.run(*options, script, "${local_rank}")
    assert run.process.returncode == 1
    assert set(run.out.splitlines()) >= {"AGAIN ['0']", "AGAIN ['1']"}
    assert run.err.count("has put another program into its process (exec)") == 1, run.err
    assert "exited with code 3." in run.err
    assert "step" not in run.err.replace("Steps, exceptions and hangs", "")
