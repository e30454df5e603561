"""Trains a small model through ``unicron_elastic.Run`` and breaks ranks at chosen points.

    train_in_place.py --steps 6 --micro-batches 8 --strike RANK:STEP:POINT:HOW ...

Each strike happens once, to whichever process has that rank in the launcher's environment. At the end each rank writes
the digest of its parameters and losses to ``PROBE/final-RANK.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unicron_elastic
from unicron_elastic.engine.transport import interruptible_store, transport
from unicron_elastic.training import engine
from unicron_elastic.training.group import assembly, membership, servant
from unicron_elastic.training.step import gradients, tree_gradients

FOLDER = Path(os.environ["PROBE"])
RANK = int(os.environ.get("RANK", "0"))
DEADLINE_S = 30.0


def time_is_up(*_: Any) -> None:
    """As the handler of a script that limits its own time."""
    raise RuntimeError("time is up")


def set_alarm() -> None:
    """For when this rank waits for the others."""
    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, 0.5)


def outlive() -> None:
    """Waits until the processes of the ranks before this one have ended."""
    pids = [int((FOLDER / f"pid-{rank}").read_text()) for rank in range(RANK)]
    await_moment(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the others")


def await_moment(has_come: Callable[[], bool], what: str) -> None:
    """Waits for something that others do."""
    end = time.monotonic() + DEADLINE_S
    while not has_come():
        assert time.monotonic() < end, f"{what} has not come"
        time.sleep(0.005)


HOWS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(1),
    "leave": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(3600.0),
    "pause": lambda: time.sleep(2.0),
    "pass": lambda: None,  # only the file says that it was here
    "alarm": set_alarm,
    "outlive": outlive,
}


class Strikes:
    """What is to go wrong here. ``step`` is the one that the script is in; -1 before the first."""

    def __init__(self, texts: list[str]) -> None:
        self.step = -1
        self._left = [text.split(":") for text in texts]
        for rank, *_ in self._left:
            assert rank.isdigit(), rank

    def at(self, point: str) -> None:
        """Strikes if this is the point, and nobody has struck here before."""
        for rank, step, where, how in self._left:
            if (int(rank), int(step), where) == (RANK, self.step, point):
                self._strike(f"{rank}-{step}-{where}", how)

    def _strike(self, name: str, how: str) -> None:
        try:
            (FOLDER / f"struck-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        if how == "raise":
            raise OSError(f"struck at {name.rpartition('-')[2]}")
        if how == "fail":  # as gloo complains
            raise RuntimeError("Connection closed by peer [127.0.0.1]:44696")
        if how.startswith("await="):
            await_moment((FOLDER / how[6:]).exists, how)
        else:
            HOWS[how]()


def wrapped(owner: Any, name: str, before: Callable[..., object] | None, after: Callable[..., object] | None) -> None:
    """Has ``before`` and ``after`` called around a function of the product."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = function(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, call)


def arm(strikes: Strikes) -> None:
    """Puts the points that are inside of the product in place."""

    def bucket(of: Any, number: int, *_: Any, **__: Any) -> None:
        if number == 1:
            strikes.at("reduce")
        if number == len(of.buckets) - 2:  # reproducible sums: all have computed theirs, and nobody has all of the sum
            strikes.at("exchanged")

    wrapped(gradients.Gradients, "reduce", None, bucket)
    wrapped(tree_gradients.TreeGradients, "reduce", None, bucket)
    wrapped(transport.Transport, "retire", None, lambda *_: strikes.at("reduced"))  # behind the last sum
    wrapped(assembly.Assembly, "say", lambda *_, **__: strikes.at("meet"), None)
    wrapped(engine.Engine, "part", lambda _: strikes.at("part"), lambda _: strikes.at("parted"))
    wrapped(
        transport.Transport,
        "connect",
        lambda *_, **__: strikes.at("connect"),
        lambda *_, **__: strikes.at("connected"),
    )
    wrapped(interruptible_store.InterruptibleStore, "set", None, lambda *_: strikes.at("published"))
    wrapped(membership.AgentMembership, "is_ready", None, lambda *_: strikes.at("ready"))
    wrapped(servant.Servant, "serve", lambda *_: strikes.at("serve"), None)
    wrapped(
        torch.distributed, "all_reduce", None, lambda tensor, **_: strikes.at("even" if tensor.numel() == 1 else "")
    )
    wrapped(servant, "pull", lambda *_, **__: strikes.at("fetch"), lambda *_, **__: strikes.at("fetched"))


class Net(nn.Module):
    """With dropout, tied weights, a frozen parameter and one that is used in no step.

    If it ``is_rare`` also with complex numbers, sparse gradients, and a type of which gloo knows nothing.
    """

    def __init__(self, width: int, *, is_rare: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(width, 1)
        self.table = nn.Embedding(4, 8, sparse=True) if is_rare else None
        self.wave = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64)) if is_rare else None
        if is_rare:
            self.register_buffer("places", torch.tensor([3, 0, 3, 1], dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is not None and self.wave is not None:
            x = ((x + self.table(self.places.long())).to(self.wave.dtype) @ self.wave).real
        x = nn.functional.dropout(torch.relu(self.first(x)), 0.2, self.training)
        result: torch.Tensor = self.last(self.frozen(torch.tanh(self.tied(self.second(x)))))
        return result


def freeze(model: Net, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """What a script does once, before the first step or in one: whoever begins later has not done it."""
    if step == -1:
        model.first.requires_grad_(False)
    elif step == 1:
        model.second.requires_grad_(False)
    elif step == 2:
        model.first.requires_grad_(True)
        assert optimizer is not None
        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.02})
    elif step == 3:
        model.second.requires_grad_(True)
        model.eval()


def check(step: int, run: unicron_elastic.Run, model: Net) -> None:
    """When the gradients of a step are there."""
    assert step == run.step, f"step {step} is step {run.step}"
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, f"{name} is frozen and has a gradient"


def made(asked: argparse.Namespace) -> tuple[Net, int]:
    """The model, and which part of a micro-batch falls to this process."""
    mesh = None
    if asked.shard:
        backend = "late" if asked.late else "gloo"
        mesh = unicron_elastic.replica_mesh(shard=asked.shard, tensor=asked.tensor, backend=backend)
    torch.manual_seed(RANK // asked.tensor)  # the first world begins with what rank 0 has
    model = Net(16, is_rare=asked.rare)
    if asked.freezing:
        freeze(model, -1)
    if mesh is None:
        return model, 0
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if asked.tensor > 1:
        whole = Replicate()
        plan = {"first": ColwiseParallel(output_layouts=whole), "last": RowwiseParallel(input_layouts=whole)}
        parallelize_module(model, mesh["tensor"], plan)
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, mesh.get_local_rank("shard")


def batch(step: int, index: int, seat: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(4, 8) and (4, 1), of the step and index alone, and of which part of the micro-batch it is."""
    generator = torch.Generator().manual_seed(1000 * step + index + 1_000_000 * seat)
    x = torch.randn(4, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--strike", action="append", default=[])
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a micro-batch takes at least")
    parser.add_argument("--plain", action="store_true", help="not reproducible")
    parser.add_argument("--bucket-bytes", type=int, default=600)
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--wait-for-worlds", type=int, default=1, help="the last step waits for that many worlds")
    parser.add_argument("--join-patience-s", type=float, default=5.0)
    parser.add_argument("--slow-load-s", type=float, default=0.0)
    parser.add_argument("--freezing", action="store_true", help="freezes and unfreezes layers on the way")
    parser.add_argument("--rare", action="store_true", help="types and layouts that few models have")
    parser.add_argument("--late", choices=["stream", "strict"], help="over a back end whose results land late")
    parser.add_argument("--torn", action="store_true", help="what has not landed looks as if it were there")
    parser.add_argument("--shard", type=int, default=0, help="how many processes have the shards of one replica")
    parser.add_argument("--tensor", type=int, default=1, help="how many of them have parts of the same shard")
    parser.add_argument("--wait-at", type=int, default=-1, help="in which step worlds are waited for")
    parser.add_argument("--say-steps", action="store_true", help="prints when each step is done")
    return parser.parse_args()


class Slow:
    """Something that takes its time to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Slowly."""
        time.sleep(self.seconds)


def main() -> None:
    """Trains."""
    asked = options()
    with over_late(asked) if asked.late else contextlib.nullcontext():
        train(asked)


@contextlib.contextmanager
def over_late(asked: argparse.Namespace) -> Iterator[None]:
    """While this lasts, what touches a result that is on its way waits for it, unless that is to be strict."""
    from unicron_elastic.testing import late

    late.lateness.delay_s, late.lateness.is_torn = 0.01, asked.torn
    with late.StreamOrder() if asked.late == "stream" else contextlib.nullcontext():
        yield


def train(asked: argparse.Namespace) -> None:
    """The steps that are asked for."""
    strikes = Strikes(asked.strike)
    arm(strikes)
    for owner in (gradients.Gradients, tree_gradients.TreeGradients):
        owner.__init__.__kwdefaults__["bucket_bytes"] = asked.bucket_bytes
    torch.set_num_threads(1)
    model, seat = made(asked)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: strikes.at("optimizer"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if asked.scaler else None
    strikes.at("before")
    run = unicron_elastic.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        reproducible=not asked.plain,
        join_patience_s=asked.join_patience_s,
        backend="late" if asked.late else None,
        slow=Slow(asked.slow_load_s),
    )
    losses: dict[int, float] = {}
    strikes.at("made")
    for step in run.steps(total=asked.steps, micro_batches=asked.micro_batches):
        strikes.step = step.number
        strikes.at("begin")
        if asked.freezing:
            freeze(model, step.number, optimizer)
        for done, index in enumerate(step):
            if step.number == asked.wait_at % asked.steps:
                wait_for_world(run, asked.wait_for_worlds)
            with torch.autocast("cpu", torch.bfloat16, enabled=asked.scaler):
                x, y = batch(step.number, index, seat)
                loss = nn.functional.mse_loss(model(x), y)
            if asked.step_s:
                time.sleep(asked.step_s)
            strikes.at("forward")
            step.backward(loss)
            if done == 0:
                strikes.at("accumulate")
        strikes.at("settled")
        check(step.number, run, model)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if asked.tensor == 1:  # torch has no norm over parameters of different meshes
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        losses[step.number] = step.loss
        if asked.say_steps:
            os.write(1, f"STEP {step.number} pid {os.getpid()} at {time.monotonic():.6f}\n".encode())
        strikes.at("between")
    tell(run, model, losses)


def wait_for_world(run: unicron_elastic.Run, number: int) -> None:
    """Waits until the agent has told of that world; within a step, for between steps no state is copied.

    Or of one that is whole again: members that are lost at nearly the same moment may be left out by one world.
    """
    end = time.monotonic() + DEADLINE_S
    membership = run._engine._membership
    link = getattr(membership, "_own", membership)._link if number > 1 else None
    while link is not None and not has_come(link._world, number):
        assert time.monotonic() < end, f"world {number} has not come"
        time.sleep(0.005)


def has_come(newest: Any, number: int) -> bool:
    """Whether ``newest`` is that world, a later one, or one that has all its members again."""
    whole = int(os.environ["WORLD_SIZE"])
    return newest is not None and (newest.number >= number or (newest.number > 1 and len(newest.members) == whole))


def digest_of(model: nn.Module) -> str:
    """Of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(name.encode() + bytes(whole.detach().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def tell(run: unicron_elastic.Run, model: nn.Module, losses: dict[int, float]) -> None:
    """Writes what came out."""
    result = {"parameters": digest_of(model), "losses": losses, "world_size": run.world_size}
    (FOLDER / f"written-{RANK}").write_text(json.dumps(result))
    (FOLDER / f"written-{RANK}").rename(FOLDER / f"final-{RANK}.json")


if __name__ == "__main__":
    main()
