"""A node that joins a job in place while the only one with the state is lost: nobody begins with anything else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def test_a_newcomer_on_a_new_node_does_not_begin_anew_when_the_state_is_lost(launcher: Any, etcd: EmbeddedEtcd) -> None:
    def start(node: str) -> Any:
        return launcher.start(
            "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30", "--max-restarts=9",
            "--local-addr=127.0.0.1", "--unicron-on-hang=off",
            IN_PLACE, "--steps=400", "--step-s=0.02", "--say-steps", "--strike=1:-1:meet:pass",
            env={"UNICRON_NODE_NAME": node}, fast=False,
        )  # fmt: skip

    old = start("a")
    (pid,) = set(old.until_line(r"^STEP 3 pid (\d+)"))
    os.kill(int(pid), signal.SIGSTOP)  # it does not come to meet the newcomer
    new = start("b")
    new.until((launcher.folder / "struck-1--1-meet").exists, "the newcomer in the meeting")
    os.kill(int(pid), signal.SIGKILL)
    new.until(lambda: "NoStateLeft" in new.err, "the end of the newcomer, which has no state")
    for run in (old, new):
        run.until_line(r"^STEP 5 ")  # all have begun again, together
        run.process.terminate()
    for run in (old, new):
        run.wait()
