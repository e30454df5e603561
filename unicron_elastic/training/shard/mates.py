"""The processes of one replica, connected for as long as it lives: what they tell each other to stay one.

A replica that has lost a process is lost: the agent ends the others, so that whoever waits for a lost one waits for
that, and raises nothing which a script would have to handle.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from unicron_elastic.training.step.suitable import is_over
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.worker.process.process_stat import read_stat

END_S = 60.0  # within which the agent ends those whose replica is lost
WHOLE_S = 3.0  # after which a replica that has lost nobody is none that is lost
_LOOK_S = 0.05
_ROOM, _HEAD = 248, 8  # bytes of a message, most of which fit, and of its length


class Mates:
    """`Mates` are the processes of one replica, which trains over ``mesh``; this one has the ``seat``."""

    def __init__(self, mesh: DeviceMesh, group: ProcessGroup, backend: str, replicas: int = 1) -> None:
        """They train over ``backend`` and tell each other things in ``group``; ``replicas``: how many to begin with."""
        self.mesh = mesh
        self.backend = backend
        self._replicas = replicas
        self.are_summed = False  # whether a run sums the gradients of all replicas
        self._group = group
        self.seat = int(dist.get_rank())
        self.seats = int(mesh.size())
        self.shard = int(mesh.get_local_rank("shard"))  # of a micro-batch, the part that this process computes
        self.tensor = self.seats // int(mesh["shard"].size())  # how many compute that part together
        self.lives = tuple(self.share(life_of(str(os.getpid()))))

    @property
    def is_lead(self) -> bool:
        """Return whether this process speaks for its replica."""
        return self.seat == 0

    def check_summed(self, optimizer: Optimizer, *_: object) -> None:
        """Raises WrongUseError if it is about to step by the gradients of this replica alone, and there are others.

        One whose learning rates are all zero only makes its state, as torch.distributed.checkpoint has it do.
        """
        if self.are_summed or self._replicas == 1 or all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        if any(is_over(each, self.mesh) for each in parameters):
            raise WrongUseError(
                "the optimizer steps by the gradients of one replica, and the others would train apart: over the mesh "
                "of replica_mesh() nobody but run.steps() sums up the gradients of all replicas"
            )

    def share(self, told: str) -> list[str]:
        """Return what each tells at this point, by seat. Raises what a collective raises, if nobody ends this one."""
        data = told.encode()
        first = self._gathered(len(data).to_bytes(_HEAD, "big") + data[:_ROOM].ljust(_ROOM, b"\0"))
        sizes = [int.from_bytes(each[:_HEAD], "big") for each in first]
        texts = [each[_HEAD:] for each in first]
        if (rest := max(sizes) - _ROOM) > 0:
            more = self._gathered(data[_ROOM:].ljust(rest, b"\0"))
            texts = [one + other for one, other in zip(texts, more, strict=True)]
        return [text[:size].decode() for text, size in zip(texts, sizes, strict=True)]

    def _gathered(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        given = [torch.empty_like(mine) for _ in range(self.seats)]
        dist.all_gather(given, mine, group=self._group)
        return [bytes(each.tolist()) for each in given]

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of what each has."""
        return self.sum(tensor) / self.seats

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of what each has."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total


def await_end(of_all: Sequence[str], *, end_s: float = END_S, whole_s: float = WHOLE_S) -> None:
    """Wait for the agent, which ends the processes of a replica that is lost; not for ever.

    While all of its processes live, as ``life_of`` names them, something else has failed, as a collective that the back
    end has not: then the script is to hear of it.
    """
    now = whole_since = time.monotonic()
    end = now + end_s
    while now < end:
        if not all(map(lives, of_all)):
            whole_since = now
        elif now - whole_since > whole_s:
            return
        time.sleep(_LOOK_S)
        now = time.monotonic()
    sys.stderr.write(
        f"unicron: connections of this replica are broken, and the agent has not ended it within {end_s:g} s.\n"
    )


def life_of(pid: str) -> str:
    """Return what tells a process from all others of its host that ever had its number; "" if it has ended."""
    stat = read_stat(f"/proc/{pid}/stat")
    return "" if stat is None or stat.has_ended else f"{pid}.{stat.started_at}"


def lives(name: str) -> bool:
    """Return whether the process lives that ``life_of`` has named so."""
    return life_of(name.partition(".")[0]) == name


_present: list[Mates] = []


def make_present(mates: Mates) -> None:
    """Note who they are: a process is in one replica."""
    _present[:] = [mates]


def present_mates() -> Mates | None:
    """Return the mates of this process; None if its replica is made of it alone."""
    return _present[0] if _present else None
