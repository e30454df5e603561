"""One replica under torchft: what the benchmark of recovery starts once for each rank.

Each replica is one process with its own store and manager, gloo between replicas, and DDP in torchft's own wrapper. The
replicas that take part share out the micro-batches of the step anew each time, so that the global batch stays the
same; a step that is not committed is computed again, because its number does not advance.
"""

from __future__ import annotations

import argparse
import contextlib
from datetime import timedelta
from typing import Any

from recovery_common import EventLog, make_model, parse_arguments


def train(arguments: argparse.Namespace, log: EventLog) -> None:
    """Train until the process is ended or ``--steps`` are done."""
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, batches = make_model(arguments)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=arguments.timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=arguments.min_replicas,
        timeout=timedelta(seconds=arguments.timeout_s),
        quorum_timeout=timedelta(seconds=arguments.quorum_timeout_s),
        connect_timeout=timedelta(seconds=arguments.quorum_timeout_s),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"replica_{arguments.slot}",
        hostname="localhost",
        heartbeat_interval=timedelta(milliseconds=arguments.heartbeat_ms),
        init_sync=False,  # every replica makes the same weights
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    count = arguments.micro_batches
    while manager.current_step() < arguments.steps:
        optimizer.zero_grad()  # asks for the quorum
        world, place = manager.num_participants(), manager.participating_rank()
        done = manager.current_step()
        step, generation = done + 1, int(manager._quorum_id)
        # A replica that is being healed has no place: its gradients count for nothing, but the reduction needs it.
        mine = range(place, count, world) if place is not None else range(1)
        for index in mine:
            last = index == mine[-1]
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = batches.loss(parallel, step, index) * (world / count)  # torchft takes the mean over replicas
                loss.backward()
            if place is not None:
                log.micro_batch(step, index, generation, world)
        optimizer.step()
        if manager.current_step() > done:
            log.step(manager.current_step(), generation, world)


def main() -> None:
    """Train as one replica."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slot", type=int, required=True, help="which replica this is")
    parser.add_argument("--lighthouse", required=True, metavar="URL")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of collectives")
    parser.add_argument("--quorum-timeout-s", type=float, default=60.0)
    parser.add_argument("--heartbeat-ms", type=int, default=100)
    arguments = parse_arguments(parser)
    train(arguments, EventLog(arguments.folder, arguments.slot))


if __name__ == "__main__":
    main()
