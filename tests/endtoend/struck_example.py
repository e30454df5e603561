"""Runs an example as it is, notes what each optimizer step comes to, and kills ranks at chosen points.

    struck_example.py --strike RANK:POINT:COUNT:RESTARTS --wait STEP:WORLD ... train_gpt.py ARGUMENTS

A strike is for the process that was started with that rank after so many restarts, at the COUNT-th time that it comes
there: in its optimizer step, when it begins to evaluate, or when its scheduler steps. It is SIGKILL. Who waits does so
in a step of ``run.steps()``, until the agent has told of that world, so that replacements have come.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from train_in_place import FOLDER, RANK, await_moment, digest_of

from unicron_elastic.training.optimizer_step import Step

RESTARTS = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def is_whole(link: Any, world: int) -> bool:
    """Whether both ranks are in that world, or a later one."""
    return link._world.number >= world and len(link._world.members) == 2


def main() -> None:
    """Have the example run with all that in place."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strike", action="append", default=[])
    parser.add_argument("--wait", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    came: Counter[str] = Counter()

    def at(point: str) -> None:
        came[point] += 1
        strike = f"{RANK}:{point}:{came[point]}:{RESTARTS}"
        if strike in asked.strike:
            (FOLDER / f"struck-{strike}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def note(optimizer: Optimizer, *_: Any) -> None:
        parameters = nn.ParameterList([each for group in optimizer.param_groups for each in group["params"]])
        step = [optimizer.param_groups[0]["lr"], digest_of(parameters)]
        with (FOLDER / f"steps-{RANK}-{os.getpid()}").open("a") as file:
            file.write(json.dumps(step) + "\n")

    def before(kind: type[Any], name: str, do: Callable[..., None]) -> None:
        plain = getattr(kind, name)

        def call(self: Any, *arguments: Any, **more: Any) -> Any:
            do(self)
            return plain(self, *arguments, **more)

        setattr(kind, name, call)

    def wait(step: Any) -> None:
        for number, world in (map(int, each.split(":")) for each in asked.wait):
            if step.number == number:
                await_moment(partial(is_whole, step._engine._membership._link, world), f"world {world} of two ranks")

    register_optimizer_step_pre_hook(lambda *_: at("step"))
    register_optimizer_step_post_hook(note)
    before(nn.Module, "eval", lambda _: at("evaluate"))
    before(lr_scheduler.LRScheduler, "step", lambda _: at("schedule"))
    before(Step, "backward", wait)
    script = asked.command[0]
    sys.argv = asked.command
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
