"""Megatron-Core's GPT, trained with ``attach`` or as Megatron-Core itself trains, with its own checkpoints.

What the benchmark of Megatron-Core launches under unicron-run (``--attach``) and under torchrun. A rank kills itself
where the benchmark wishes; the wish is a file, which is looked for at the beginning of each step.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from megatron_common import Plain, arguments_of_worker, make, rank
from recovery_common import EventLog


class Strike:
    """``<number> <rank> <step> <point>`` in the job's folder: which rank is to die where; each number once."""

    def __init__(self, folder: Path, log: EventLog) -> None:
        self._path = folder / "strike"
        self._log = log
        self._known = self._newest()[0]  # what was wished before this process began does not concern it
        self._at = ""
        self._seen = 0

    def begin(self, step: int) -> None:
        """Step ``step`` begins, the first being 1."""
        number, victim, when, point = self._newest()
        self._seen = 0
        self._at = point if number > self._known and (victim, when) == (rank(), step) else ""
        self._step = step

    def nth(self, number: int, point: str) -> None:
        """Die when this point of the step is reached the time of that number, if that is the wish."""
        if self._at == point:
            self._seen += 1
            if self._seen == number:
                self._log.moment("strike", self._step)
                os.kill(os.getpid(), signal.SIGKILL)

    def _newest(self) -> tuple[int, int, int, str]:
        try:
            words = self._path.read_text().split()
        except FileNotFoundError:
            return 0, -1, -1, ""
        return int(words[0]), int(words[1]), int(words[2]), words[3]

    def arm(self, chunk: Any) -> None:
        """Put the points in place: the middle of a backward pass, and the beginning of a reduction half of the way."""

        def watch(_module: Any, _inputs: Any, outputs: Any) -> None:
            if outputs[0].requires_grad:
                outputs[0].register_hook(lambda _gradient: self.nth(2, "passes"))

        layers = chunk.module.decoder.layers
        layers[len(layers) // 2].mlp.register_forward_hook(watch)
        half = 1 + len(chunk.bucket_groups) // 2
        kind = type(chunk.bucket_groups[0])  # not these objects: a distributed optimizer's are made anew
        start = kind.start_grad_sync

        def started(*arguments: Any, **options: Any) -> None:
            self.nth(half, "reduction")
            start(*arguments, **options)

        kind.start_grad_sync = started


def tell_parts(log: EventLog) -> None:
    """Have the parts of a recovery told in the log."""
    from unicron_elastic.megatron.members import Members
    from unicron_elastic.megatron.run import MegatronRun
    from unicron_elastic.training.group.meeting import Meeting
    from unicron_elastic.training.group.regrouping import Regrouping
    from unicron_elastic.worker.worlds import Link

    def told(owner: Any, name: str, kind: str, *, before: bool = False) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if before:
                log.moment(kind)
            result = function(*arguments, **options)
            if not before:
                log.moment(kind)
            return result

        setattr(owner, name, call)

    told(Link, "_hear_world", "heard", before=True)
    told(Meeting, "exchange", "met")
    told(Members, "connect", "connected")
    told(Regrouping, "meet", "agreed")
    told(MegatronRun, "_compute", "computed")
    told(MegatronRun, "scale", "reduced", before=True)


def train(arguments: argparse.Namespace, log: EventLog) -> None:
    """Train until the process is ended or ``--steps`` are done."""
    model, optimizer = make(arguments)
    import megatron_checkpoint
    import torch.distributed as dist
    from megatron_gpt import forward_step, micro_batch, read_corpus

    import unicron_elastic.megatron

    device = next(model[0].parameters()).device
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    text = read_corpus()

    def draw(step: int, index: int) -> Any:
        log.micro_batch(step + 1, index, generation, dist.get_world_size())
        return micro_batch(text, arguments, device, step, index)

    strike = Strike(arguments.folder, log)
    strike.arm(model[0])
    forward_backward: Any
    if arguments.attach:
        forward_backward = unicron_elastic.megatron.attach(
            model, optimizer, steps=arguments.steps, micro_batches=arguments.micro_batches, micro_batch=draw
        )
    else:
        done = megatron_checkpoint.load(arguments.folder, model, optimizer) if arguments.checkpoint_every else 0
        log.moment("loaded", done)
        forward_backward = Plain(arguments, draw, done)
    while not forward_backward.is_over:
        strike.begin(forward_backward.step + 1)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            model=model,
            seq_length=arguments.sequence,
            micro_batch_size=arguments.micro_batch_size,
        )
        optimizer.step()
        if not arguments.attach:
            forward_backward.step += 1
        log.step(forward_backward.step, generation, dist.get_world_size())
        if not arguments.attach and _is_due(arguments, forward_backward.step):
            megatron_checkpoint.save(arguments.folder, model, optimizer, forward_backward.step)
            log.moment("saved", forward_backward.step)


def _is_due(arguments: argparse.Namespace, step: int) -> bool:
    return arguments.checkpoint_every > 0 and step % arguments.checkpoint_every == 0


def main() -> None:
    """Train as one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--attach", action="store_true", help="unicron-elastic's; else Megatron-Core's checkpoints")
    parser.add_argument("--parts", action="store_true", help="tell the parts of a recovery")
    arguments = arguments_of_worker(parser)
    log = EventLog(arguments.folder, rank())
    if arguments.parts:
        tell_parts(log)
    train(arguments, log)
    import torch.distributed as dist

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
