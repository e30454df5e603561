"""``unicron_elastic.launcher`` called in a Python process that goes on afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLER = """
import gc, json, sys
from torch.distributed.elastic.rendezvous import RendezvousHandler
from unicron_elastic.launcher.api import LaunchConfig, elastic_launch
from unicron_elastic.launcher.agent.core.agent import Agent

def job():
    return 1

def launch(entrypoint, *args):
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          max_restarts=0, monitor_interval=0.05, start_method="fork", run_id="called")
    try:
        elastic_launch(config, entrypoint)(*args)
    except Exception as error:
        return type(error).__name__
    return "done"

def listening():
    # Sockets of this process in state LISTEN: what a store's server holds.
    import psutil
    return [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

gc.disable()
script = [sys.executable, "-c", f"raise SystemExit({sys.argv[2]})"]
ended = launch(script[0], *script[1:]) if sys.argv[1] == "script" else launch(job)
alive = [type(o).__name__ for o in gc.get_objects() if isinstance(o, (Agent, RendezvousHandler))]
print(json.dumps({"ended": ended, "alive": alive, "listening": listening()}))
"""


# Not a function that fails: torch itself keeps the frames of that failure, and with them its own agent, too.
@pytest.mark.parametrize(("kind", "status"), [("script", 0), ("script", 3), ("function", 0)])
def test_nothing_of_the_run_is_held_after_it(tmp_path: Path, kind: str, status: int) -> None:
    # What is held until a garbage collection keeps the store's port, and its thread kills a fork of the caller.
    caller = tmp_path / "caller.py"
    caller.write_text(CALLER)
    environ = {**os.environ, "UNICRON_PRELOAD": "json", "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(caller), kind, str(status)],
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    expected = "done" if status == 0 else "ChildFailedError"
    found = json.loads(process.stdout.splitlines()[-1])
    assert found == {"ended": expected, "alive": [], "listening": []}, process.stderr
