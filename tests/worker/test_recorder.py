"""Whose collectives torch's flight recorder counts, where its own numbers of groups differ between ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warm_launcher import WarmLaunchers

DEADLINE_S = 60.0

# Rank 2 is no member of the first of the two groups, so that the second is its number 1 and the number 2 of rank 1.
PEERS = """
import dataclasses, json, sys
import torch, torch.distributed as dist
import torch.distributed.nn
from unicron_elastic.worker.answer_questions import position
from unicron_elastic.worker.collectives import recorder
from unicron_elastic.worker.collectives.broken import watch_groups
watch_groups(lambda: None)
rank, folder = int(sys.argv[1]), sys.argv[2]

def told():
    first = position()
    if recorder.needs_to_learn():
        recorder.learn()
    return [[dataclasses.asdict(each) for each in told] for told in (first, position())]

dist.init_process_group("gloo", init_method=f"file://{folder}/first", rank=rank, world_size=3)
groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
for group, times in zip(groups, (3, 5)):
    for _ in range(times):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(torch.ones(1), group=group)
dist.barrier()
before = told()
names = [group.group_name for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=3)
dist.all_reduce(torch.ones(1))
again = told()
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"names": names, "before": before, "again": again}))
"""


def _by_name(told: list[dict[str, Any]]) -> dict[str, tuple[int, int | None]]:
    return {each["name"]: (each["begun"], each["ended"]) for each in told}


def test_each_rank_means_the_same_group(tmp_path: Path, warm_launchers: WarmLaunchers) -> None:
    script = tmp_path / "peers.py"
    script.write_text(PEERS)
    said = [tmp_path / f"said-{rank}" for rank in range(3)]
    peers = [warm_launchers.begin(said[rank], str(script), str(rank), str(tmp_path)) for rank in range(3)]
    assert [peer.wait(DEADLINE_S) for peer in peers] == [0, 0, 0]
    told = [json.loads(each.read_text().splitlines()[-1]) for each in said]
    first, second = told[1]["names"]
    assert [each["names"] for each in told] == [[first], [first, second], [second]]
    expected = {first: 3, second: 5}
    for each in told:
        unlearned, learned = map(_by_name, each["before"])
        for name in each["names"]:
            assert unlearned[name] == (expected[name], None)  # not known, rather than another group's
            assert learned[name][0] == expected[name]
            assert learned[name][1] is not None
        assert _by_name(each["again"][1])["0"][0] == 1  # not those of the group of the same name that is gone
