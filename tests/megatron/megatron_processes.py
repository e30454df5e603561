"""Starts scripts that train with Megatron-Core, in processes of their own: the stand-in changes parts of torch.cuda."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"
DEADLINE_S = 100.0
ABORT_S = 5.0

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)


def run(*arguments: str | Path, ranks: int = 1, launcher: str = "torchrun") -> str:
    """Run a script to its end, in one process without a launcher or on several ranks; return what it printed."""
    command: list[str | Path] = [sys.executable]
    if ranks > 1:
        command = [Path(sysconfig.get_path("scripts")) / launcher, "--standalone", f"--nproc-per-node={ranks}"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_", "TORCHEL"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        [*command, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # for their stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_S)
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"still running after {DEADLINE_S:g} s\n{out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    return out
