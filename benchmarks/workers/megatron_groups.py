"""Process groups made anew in the same processes, many times: torch's world and all of Megatron-Core's.

It is what ``attach`` does in each new world (``unicron_elastic.megatron.groups``), with a model and an optimizer that
hold groups, and without a fault: members meet in the job's store, leave the groups and enter new ones. Each new set of
groups is used once. Rank 0 prints a line of JSON for each time.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

from megatron_common import arguments_of_worker, make, rank

TIMEOUT_S = 60.0


def main() -> None:
    """Make them anew ``--steps`` times."""
    arguments = arguments_of_worker(argparse.ArgumentParser())
    model, optimizer = make(arguments)
    import torch
    import torch.distributed as dist

    from unicron_elastic.base.world import Member, World
    from unicron_elastic.megatron.groups import Groups
    from unicron_elastic.training.group.meeting import Meeting, connect_store

    size = dist.get_world_size()
    groups = Groups([*model, optimizer], "gloo", TIMEOUT_S)
    members = tuple(Member(name=str(each), node="here", local_rank=each) for each in range(size))
    # A store that lives as long as the job; torchrun's is that of the first world's groups.
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank() == 0 else None
    port = torch.tensor([0 if server is None else server.port])
    dist.broadcast(port, 0)
    address = f"localhost:{int(port)}"
    store = connect_store(address)
    for number in range(2, arguments.steps + 2):
        world = World(number=number, members=members, store=address)
        meeting = Meeting(store, world, rank(), lambda: False)
        meeting.exchange("")  # all are here
        moments = [time.monotonic_ns()]
        meeting.exchange("")
        moments.append(time.monotonic_ns())
        groups.leave()
        groups.enter(meeting, rank(), size)
        moments.append(time.monotonic_ns())
        _use()
        groups.drop_former()
        for thread in threading.enumerate():
            if thread.name == "unicron-drop":
                thread.join()
        moments.append(time.monotonic_ns())
        begin = torch.tensor(moments[:-1])
        end = torch.tensor([*moments[1:], *_held()])
        dist.all_reduce(begin, op=dist.ReduceOp.MIN)
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        if rank() == 0:
            _tell(arguments, number, begin.tolist(), end.tolist())
    dist.destroy_process_group()


def _use() -> None:
    """A sum in each kind of group: they are connected, and the right ranks are in them."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    for group in (
        dist.group.WORLD,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    ):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        if one.item() != dist.get_world_size(group):
            raise RuntimeError(f"{one.item()} ranks are in a group of {dist.get_world_size(group)}")


def _held() -> list[int]:
    """Threads and open files of this process."""
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


def _tell(arguments: argparse.Namespace, number: int, begin: list[int], end: list[int]) -> None:
    took = [(after - before) / 1e6 for before, after in zip(begin, end[: len(begin)], strict=True)]
    line: dict[str, Any] = dict(zip(("met_ms", "rebuilt_ms", "used_ms"), took, strict=True))
    line |= {"number": number - 1, "threads": end[-2], "files": end[-1]}
    with (arguments.folder / "groups").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
