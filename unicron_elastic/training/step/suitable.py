"""Says of a model that ``run.steps()`` cannot train what it is, and what is right instead.

What a run trains is whole on each rank, and the run reduces its gradients. Classes are known by their names, as most of
those who wrap a model are packages that need not be there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from unicron_elastic.compat.watching.optimizers import tells_of_steps

_WRAPPERS = ("DistributedDataParallel", "DataParallel")
_FULLY_SHARDED = "FSDPModule"
_SHARDERS = ("FullyShardedDataParallel", _FULLY_SHARDED, "DeepSpeedEngine")
_WHOLE = "run.steps() trains models that are whole on every rank, or sharded over unicron_elastic.replica_mesh()"
_TIER_1 = "keep your own loop and have run.restore() and run.snapshot() for it (tier 1 in docs/going-on.md)"


def is_over(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Return whether it is sharded over ``mesh``: by ``fully_shard``, which makes the mean of its gradients."""
    own: DeviceMesh | None = getattr(parameter, "device_mesh", None)
    return own in (mesh, mesh["shard"])


def _check_shard(name: str, parameter: nn.Parameter, mesh: Any) -> None:
    """Raises TypeError for what is not sharded over the replica: its processes would not agree on its gradient."""
    if (own := getattr(parameter, "device_mesh", None)) is None and parameter.requires_grad:
        raise TypeError(
            f"{name} is whole on each process of a replica, and nobody sums its gradient over them: have "
            "fully_shard(model, mesh=mesh) take all parameters that are trained"
        )
    if own is not None and not is_over(parameter, mesh):
        raise TypeError(
            f"{name} is sharded over {own}, and this replica is {mesh}: give fully_shard() the mesh that "
            "unicron_elastic.replica_mesh() returned, as replicas of a mesh over all ranks cannot be lost one by one"
        )


def check_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises TypeError for a parameter that the processes of a replica would train apart."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "ds_id"):
            _check_shard(name, parameter, mesh)


def check_suitable(model: nn.Module, optimizers: Iterable[Any] = (), mesh: Any = None) -> None:
    """Raises TypeError for a model, or an optimizer of it, that is wrapped, sharded, or has no numbers yet.

    ``mesh``: that of this process's replica, over which the model is to be sharded by ``fully_shard``.
    """
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        what = f"the model's {name}" if name else "the model"
        for kind in kinds:
            if kind in _WRAPPERS:
                raise TypeError(
                    f"{what} must not be wrapped in {kind} for run.steps(), which reduces its gradients: give Run the "
                    "model that is inside (model.module)"
                )
            if kind in _SHARDERS and not (kind == _FULLY_SHARDED and mesh is not None):
                raise TypeError(f"{what} is divided among ranks by {kind}, and {_WHOLE}: {_TIER_1}")
    if mesh is not None:
        check_shards(model, mesh)
    for name, parameter in model.named_parameters():
        if (mesh is None and hasattr(parameter, "device_mesh")) or hasattr(parameter, "ds_id"):
            by = "a DTensor" if hasattr(parameter, "device_mesh") else "ZeRO"
            raise TypeError(f"{name} is divided among ranks, as {by}, and {_WHOLE}: {_TIER_1}")
        if isinstance(parameter, UninitializedParameter):
            raise TypeError(f"{name} has no shape yet: make one forward pass before run.steps()")
        if parameter.is_meta:
            raise TypeError(f"{name} is on the meta device and has no numbers: make it before run.steps()")
    for optimizer in optimizers:
        if not tells_of_steps(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} is a torch.optim.Optimizer that has not called super().__init__(): "
                f"torch tells nobody of its steps, and run.steps() has to know of each. Call it, or {_TIER_1}"
            )
        if type(optimizer).__module__.partition(".")[0] == "deepspeed":
            raise TypeError(f"{type(optimizer).__name__} is DeepSpeed's and reduces gradients itself: {_TIER_1}")
