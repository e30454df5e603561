"""Nodes whose workers have ended well wait for the others, as under torchrun, but not for those that are lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

SCRIPT = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"PID {os.getpid()}\\n".encode())
while dist.get_rank() == 1:
    time.sleep(1)
"""


def test_a_node_that_has_ended_well_does_not_wait_for_one_that_is_lost(launcher: Any) -> None:
    launcher.script("half.py", SCRIPT)
    with EmbeddedEtcd() as etcd:
        options = [
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=5", "--local-addr=127.0.0.1", "half.py",
        ]  # fmt: skip
        nodes = [launcher.start(*options, env={"UNICRON_NODE_NAME": name}) for name in "ab"]
        pids = [int(node.until_line(r"^PID (\d+)")[0]) for node in nodes]
        has_ended = [lambda pid=pid: not Path(f"/proc/{pid}").exists() for pid in pids]
        nodes[0].until(lambda: any(ended() for ended in has_ended), "the end of one worker")
        first, second = nodes if has_ended[0]() else reversed(nodes)
        assert first.process.poll() is None
        second.process.send_signal(signal.SIGKILL)
        assert first.wait() == 0
        # Before the two are connected, it is the lease that tells.
        why = "(its process has ended|the lease in the cluster's store is gone)"
        assert re.search(rf"is lost: {why}\. This node has ended well and waits for nobody\.$", first.err, re.MULTILINE)
