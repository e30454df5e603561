"""The processes of a replica that compute one part of a micro-batch together, each with a part of some layers.

What is not divided among them each has whole, and as each makes the same steps with it, it stays the same. Nobody
sends it: a script that seeds them unlike, or gives them unlike data, has them train apart.
"""

from __future__ import annotations

from torch import nn

from unicron_elastic.compat.tensors import local_of
from unicron_elastic.state.digest import digests
from unicron_elastic.training.shard.mates import Mates
from unicron_elastic.training.step.wrong_use import WrongUseError


def check_alike(model: nn.Module, mates: Mates) -> None:
    """Raises WrongUseError, in all processes of the replica, if one has other numbers than it should have."""
    if mates.tensor == 1:
        return
    undivided = mates.mesh["shard"]
    shared = {name: each for name, each in model.named_parameters() if getattr(each, "device_mesh", None) == undivided}
    told = mates.share(" ".join(map(str, digests([local_of(each) for each in shared.values()]))))
    if (odd := first_unlike([each.split() for each in told], mates.tensor)) is None:
        return
    place, seat = odd
    raise WrongUseError(
        f"{list(shared)[place]} is not divided by tensor parallelism, and not the same in places "
        f"{seat // mates.tensor * mates.tensor} and {seat} of this replica, which compute one part of a micro-batch: "
        'seed them alike, and give both the part of mesh.get_local_rank("shard")'
    )


def first_unlike(told: list[list[str]], tensor: int) -> tuple[int, int] | None:
    """Return of which place in a list, and from whom, the first number is that differs among ``tensor`` neighbours."""
    for seat, own in enumerate(told):
        for place, (one, other) in enumerate(zip(told[seat // tensor * tensor], own, strict=True)):
            if one != other:
                return place, seat
    return None
