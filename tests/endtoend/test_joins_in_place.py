"""Who joins comes in at a moment that all share: nothing that others do between their steps breaks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finals import final

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

Start = Callable[..., Any]
# When the worker of a late node asks for its part.
AFTER_THEIR_END = ("2:-1:made:outlive",)
WHILE_THEY_EVALUATE = (
    "2:-1:made:await=struck-0-7-evaluate",  # else it may come in time for the last step
    "2:-1:ready:pass",
    *(f"{rank}:7:evaluate:await=struck-2--1-ready" for rank in (0, 1)),
)
EPOCHS = str(Path(__file__).with_name("train_in_epochs.py"))


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def start(launcher: Any, etcd: EmbeddedEtcd) -> Start:
    """Starts a node: its name, how many ranks it has, and the script's arguments."""

    def started(node: str, ranks: int, *arguments: str, nodes: str = "2:3") -> Any:
        return launcher.start(
            f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=unicron",
            f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30",
            "--max-restarts=9", "--local-addr=127.0.0.1", f"--unicron-ledger=ledger-{node}",
            EPOCHS, "--say-steps", *arguments, env={"UNICRON_NODE_NAME": node}, fast=False,
        )  # fmt: skip

    return started


def test_a_node_that_joins_breaks_no_collective_between_steps(launcher: Any, start: Start) -> None:
    arguments = ("--epochs=1", "--per-epoch=8", "--own", "--await-world=0:3:2")
    old = start("a", 2, *arguments, nodes="1:2")
    old.until_line(r"^STEP 2 ")
    new = start("b", 1, *arguments, nodes="1:2")
    assert [run.wait() for run in (old, new)] == [0, 0], old.err + new.err
    finals = [final(launcher.folder, rank) for rank in range(3)]
    assert len({final["parameters"] for final in finals}) == 1
    assert finals[0]["sizes"]["3"] == 2  # it was waited for there, and nobody had come yet
    assert finals[0]["sizes"]["7"] == 3
    assert not (launcher.folder / "ledger-a").exists(), old.err


@pytest.mark.parametrize("strikes", [AFTER_THEIR_END, WHILE_THEY_EVALUATE], ids=["after their end", "before"])
def test_a_node_that_comes_when_the_training_is_over_ends_with_it(
    launcher: Any, start: Start, strikes: tuple[str, ...]
) -> None:
    arguments = ["--epochs=1", "--per-epoch=8", "--step-s=0.02"]
    arguments += [f"--strike={strike}" for strike in ("0:7:accumulate:await=pid-2", *strikes)]
    old = [start(node, 1, *arguments) for node in ("a", "b")]
    old[0].until_line(r"^STEP 2 ")
    new = start("c", 1, *arguments)
    assert [run.wait(30.0) for run in (*old, new)] == [0, 0, 0]
    assert final(launcher.folder, 0)["parameters"] == final(launcher.folder, 1)["parameters"]
    assert not (launcher.folder / "final-2.json").exists()
    assert "The training is over" in new.err
    assert all(len(run.until_line(r"^STEP 7 ")) == 1 for run in old)
    assert "STEP" not in new.out
    assert not list(launcher.folder.glob("ledger-*"))
