"""A node that leaves, where something of that cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unicron_elastic.launcher.agent.core import isolation
from unicron_elastic.recovery.commands import LeaveJob
from unicron_elastic.rendezvous.torch.local import LocalRendezvous

LEAVE = LeaveJob(cause=None, reason="GPU 3 has fallen off the bus. This node leaves the job.", quarantine_s=None)


class Handler(LocalRendezvous):
    """A rendezvous that cannot be left, and knows what it was asked."""

    def __init__(self) -> None:
        super().__init__(backend="etcd", run_id="job")
        self.left = 0

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "quarantine.json"
    monkeypatch.setenv("UNICRON_QUARANTINE", str(path))
    return path


def test_who_leaves_is_on_the_list_until_it_is_lifted(listed: Path) -> None:
    said: list[str] = []
    handler = Handler()
    isolation.leave(handler, "gpu-7", LEAVE, said.append)
    assert handler.left == 1
    (entry,) = json.loads(listed.read_text())["nodes"]
    assert (entry["node"], entry["reason"], entry["until"], entry["by"]) == ("gpu-7", LEAVE.reason, None, "unicron-run")
    assert said == ["This node is in quarantine now: `unicron quarantine lift gpu-7` ends that."]
    why = isolation.why_kept_out("gpu-7", said.append)
    assert why.startswith("node gpu-7 is in quarantine since")
    assert isolation.why_kept_out("gpu-8", said.append) == ""
    assert len(said) == 1


def test_a_list_that_is_no_list_keeps_nobody_out_and_is_not_lost(listed: Path) -> None:
    listed.write_text("{]")
    said: list[str] = []
    assert isolation.why_kept_out("gpu-7", said.append) == ""
    assert said[0].startswith("it is not known whether this node is in quarantine: ")
    assert str(listed) in said[0]
    isolation.leave(Handler(), "gpu-7", LEAVE, said.append)
    assert said[1].startswith("This node could not be put into quarantine: ")
    assert listed.read_text() == "{]"


def test_why_a_node_stays() -> None:
    assert isolation.why_stay(Handler(), 1) == "it is the only node of the job."
    assert isolation.why_stay(Handler(), 2) == "torch's etcd rendezvous cannot be left."
