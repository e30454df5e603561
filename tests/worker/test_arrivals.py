"""When a worker began its collectives, by torch's own recorder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import WarmLaunchers

from unicron_elastic.worker.arrivals import LATEST, arrivals
from unicron_elastic.worker.message import heard
from unicron_elastic.worker.notices import NOTICES, LatestCollectives

DEADLINE_S = 60.0
# Two ranks; rank 1 is 20 ms late for each of the last five collectives.
PEERS = """
import json, os, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn
from unicron_elastic.worker.arrivals import arrivals
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
other = dist.new_group([0, 1])
for number in range(30):
    dist.all_reduce(torch.ones(4), group=other)
    if rank == 1 and number >= 25:
        time.sleep(0.02)
    dist.all_reduce(torch.ones(4))
print(json.dumps(arrivals().message()))
dist.destroy_process_group()
print(json.dumps(arrivals().message()))
"""


def test_who_is_late_is_seen_in_the_times(tmp_path: Path, warm_launchers: WarmLaunchers) -> None:
    script = tmp_path / "peers.py"
    script.write_text(PEERS)
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    peers = [warm_launchers.begin(said[rank], str(script), str(rank), str(tmp_path / "store")) for rank in range(2)]
    assert [peer.wait(DEADLINE_S) for peer in peers] == [0, 0]
    outputs = [[line for line in each.read_text().splitlines() if line.startswith("{")] for each in said]
    (first, second), after = (
        [heard(json.loads(each), NOTICES) for each in lines] for lines in zip(*outputs, strict=True)
    )
    assert after == [LatestCollectives()] * 2
    assert isinstance(first, LatestCollectives)
    assert isinstance(second, LatestCollectives)
    count = len(first.at_us)
    assert first.first == second.first
    assert "all_reduce" in [first.ops[each] for each in first.op or (0,)]
    assert count == len(second.at_us) >= 30
    at = [[told.at_us[0] + us for us in (0, *told.at_us[1:])] for told in (first, second)]
    late = [theirs - ours for ours, theirs in zip(*at, strict=True)]
    assert sorted(late[-5:])[2] > 15_000
    assert sorted(late[:-5])[count // 2] < 10_000


def test_a_worker_without_torch_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d", raising=False)
    assert arrivals() == LatestCollectives()


def test_only_the_latest_without_a_gap_are_told() -> None:
    from unicron_elastic.worker import arrivals as module

    def entry(number: int, *, group: str = "0", is_p2p: bool = False, pg_id: int = 1) -> dict[str, Any]:
        return {
            "pg_id": pg_id,
            "process_group": [group, "default_pg"],
            "is_p2p": is_p2p,
            "collective_seq_id": number,
            "time_created_ns": number * 1000,
            "profiling_name": "gloo:all_reduce",
        }

    entries = [entry(2, pg_id=0), entry(1), entry(3), entry(4), entry(4), entry(9, group="1"), entry(5, is_p2p=True)]
    assert module._latest_run(module._begun(entries, "0")) == [(3, 3, "all_reduce"), (4, 4, "all_reduce")]
    many = module._latest_run([(number, number, "") for number in range(LATEST + 7)])
    assert (len(many), many[0], many[-1]) == (LATEST, (7, 7, ""), (LATEST + 6, LATEST + 6, ""))
    assert module._latest_run([]) == []
