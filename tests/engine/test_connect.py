"""Process groups are made of one world after another, and the making can be given up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from unicron_elastic.engine.transport.connect import connect_group

DEADLINE_S = 10.0

# Rank 0 has met in a world before, in which it waited for a peer until the next world came; rank 1 is new.
MEMBER = """
import sys, time
import torch, torch.distributed as dist
from unicron_elastic.engine.transport.connect import connect_group
from unicron_elastic.engine.transport.superseded import Superseded

rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, -1)
if rank == 0:
    until = time.monotonic() + 0.1
    try:
        first = dist.PrefixStore("1", store)
        is_left = lambda: time.monotonic() > until
        connect_group("gloo", first, rank=rank, size=2, timeout_s=60.0, is_left=is_left)
    except Superseded:
        print("superseded", end=" ")
second = dist.PrefixStore("2", store)
kept = connect_group("gloo", second, rank=rank, size=2, timeout_s=60.0, is_left=lambda: False)
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), flush=True)
"""


def test_who_has_given_up_one_world_connects_with_newcomers_in_the_next(warm_launchers: Any, tmp_path: Path) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    store = str(tmp_path / "store")
    members = [warm_launchers.begin(said[rank], str(script), str(rank), store) for rank in range(2)]
    try:
        codes = [member.wait(6 * DEADLINE_S) for member in members]
    finally:
        for member in members:
            member.kill()
    told = [each.read_text().splitlines() for each in said]
    assert codes == [0, 0], told
    assert [lines[-1] for lines in told] == ["superseded 2.0", "2.0"], told


def test_an_exception_is_told_once_and_by_the_rank_of_now_however_many_worlds_there_were(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: print(error, file=sys.stderr))
    for _ in range(3):
        connect_group("gloo", HashStore(), rank=0, size=1, timeout_s=9.0, is_left=lambda: False)
        dist.destroy_process_group()
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert capsys.readouterr().err == "[rank0]: boom\n"
