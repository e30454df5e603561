"""The same training as a run of unicron-elastic (tier 2): what the benchmark of recovery launches under unicron-run.

There are no checkpoints: survivors keep their state, and a replacement gets it from one of them.
"""

from __future__ import annotations

import argparse
import os

from recovery_common import EventLog, make_model, parse_arguments


def train(arguments: argparse.Namespace, log: EventLog) -> None:
    """Train until the process is ended or ``--steps`` are done."""
    import torch

    import unicron_elastic

    model, batches = make_model(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generation = 0  # how often this process has been in a new world

    def regrouped() -> None:
        nonlocal generation
        generation += 1

    run = unicron_elastic.Run(
        model=model, optimizer=optimizer, on_regroup=regrouped, reproducible=arguments.reproducible
    )
    for step in run.steps(total=arguments.steps, micro_batches=arguments.micro_batches):
        number = step.number + 1  # the other workers call the first step 1
        for index in step:
            step.backward(batches.loss(model, number, index))
            log.micro_batch(number, index, generation, run.world_size)
        optimizer.step()
        log.step(number, generation, run.world_size)


def main() -> None:
    """Train as one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reproducible", action="store_true", help="bitwise the same, whoever computes what")
    arguments = parse_arguments(parser)
    train(arguments, EventLog(arguments.folder, int(os.environ["RANK"])))


if __name__ == "__main__":
    main()
