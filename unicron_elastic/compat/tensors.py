"""Operations on many tensors at once, and what torch's layers have in common. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "NormBase",
    "add_each",
    "changes_by_operations",
    "changes_of",
    "copy_each",
    "divide_each",
    "expanded_axes",
    "has_unreduced",
    "hooks_of",
    "is_plain",
    "local_of",
    "reshard",
    "shard_like",
    "share_of",
    "split_of",
    "strided_shard",
    "unscaled_by",
    "walked",
    "zero_each",
]

# Of all layers that keep running statistics.
NormBase: Any = getattr(nn.modules.batchnorm, "_NormBase", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


def add_each(tensors: Sequence[Tensor], what: Sequence[Tensor] | float) -> None:
    """Add to each of the tensors, in place, the one of ``what`` at its place, or the number."""
    torch._foreach_add_(tensors, what)


def copy_each(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of ``sources`` to the tensor at its place, also to those that torch refuses to write to together."""
    if not tensors:
        return
    try:
        torch._foreach_copy_(tensors, sources)
    except RuntimeError:  # one is expanded, or conjugated or negated when it is read
        for tensor, source in zip(tensors, sources, strict=True):
            _copy_once(tensor, source)


def _copy_once(tensor: Tensor, source: Tensor) -> None:
    """Copy to each number of an expanded tensor once, as torch demands: ``source`` has the same there as well."""
    for axis in expanded_axes(tensor):
        tensor, source = tensor.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    tensor.copy_(source)


def expanded_axes(tensor: Tensor) -> list[int]:
    """Return the axes along which all its numbers are one in memory, as ``expand()`` makes them."""
    return [axis for axis, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[axis] > 1]


def divide_each(tensors: Sequence[Tensor], by: float) -> None:
    """Divide tensors in place, as few calls as torch can."""
    torch._foreach_div_(tensors, by)


def zero_each(tensors: Sequence[Tensor]) -> None:
    """Set all elements of all tensors to zero."""
    torch._foreach_zero_(tensors)


def changes_of(tensor: Tensor) -> int:
    """How often the memory of the tensor was changed in place, also through its views; not through ``.data``.

    Not known of one that was made in ``torch.inference_mode``: 0. Of a DTensor it is that of this rank's part.
    """
    own = local_of(tensor)
    changes: int = 0 if own.is_inference() else own._version
    return changes


def changes_by_operations(tensor: Tensor) -> int:
    """How often operations on a DTensor changed it in place, which ``changes_of`` does not count."""
    changes: int = tensor._version
    return changes


def local_of(tensor: Tensor) -> Tensor:
    """Return the tensor, or this rank's part of a DTensor, which counts its changes: without a view of autograd's."""
    if type(tensor) is Tensor:
        return tensor
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def shard_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return what has ``local`` as this rank's part, divided as ``tensor`` is; itself for a tensor that is whole."""
    if local_of(tensor) is tensor:
        return local
    from torch.distributed.tensor import DTensor

    of: Any = tensor
    shape, stride = of.shape, of.stride()
    return DTensor.from_local(local, of.device_mesh, of.placements, run_check=False, shape=shape, stride=stride)


def share_of(tensor: Tensor) -> int:
    """Return how many numbers this rank has of a tensor; of a DTensor, the same on all ranks, about how many."""
    of: Any = tensor
    return int(tensor.numel() if local_of(tensor) is tensor else -(-tensor.numel() // of.device_mesh.size()))


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 keeps after a forward pass, so that the model has its shards again."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()


def hooks_of(owner: nn.Module | Tensor) -> list[Any]:
    """Return what is called around a module's passes, or with a tensor's gradient; nothing that torch hides now."""
    kinds = ["_backward_hooks", "_post_accumulate_grad_hooks"]
    if isinstance(owner, nn.Module):
        kinds = ["_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"]
    return [each for kind in kinds for each in (getattr(owner, kind, None) or {}).values()]


def is_plain(tensor: Tensor) -> bool:
    """Return whether it is numbers in memory of its own: neither sparse, quantized, nested, nor without memory."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def has_unreduced(model: nn.Module) -> bool:
    """Return whether FSDP holds gradients of the model that it has not reduced yet: no parameter's ``.grad`` has them.

    That of FSDP1 is of another shape than its parameter after ``no_sync()``. With FSDP2
    ``set_requires_gradient_sync(False)`` has them stay whole, and ``set_requires_all_reduce(False)`` unlike over the
    replicas, until a later backward pass.
    """
    if any(each.grad is not None and each.grad.shape != each.shape for each in model.parameters()):
        return True
    for module in model.modules():
        if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if any(group is not None and _holds_unreduced(group) for group in groups):
            return True
    return False


def _holds_unreduced(group: Any) -> bool:
    if getattr(group, "_partial_reduce_output", None) is not None:
        return True
    return any(
        getattr(each, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
        for each in getattr(group, "fsdp_params", ())
    )


def unscaled_by(scaler: Any) -> set[int]:
    """The ids of the optimizers whose gradients a GradScaler has unscaled since its last ``update()``."""
    of = getattr(scaler, "_per_optimizer_states", {})
    return {each for each, state in of.items() if state.get("found_inf_per_device")}


def walked(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """What ``model.modules()`` and ``model.parameters()`` give, in their order, in a third of the time."""
    modules: dict[nn.Module, None] = {}
    parameters: dict[int, nn.Parameter] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is None or module in modules:
            continue
        modules[module] = None
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter  # in its first place
        if module._modules:
            ahead.extend(reversed(module._modules.values()))
    return list(modules), list(parameters.values())


def split_of(placement: Any) -> int | None:
    """Return of a dimension that is sharded by another mesh dimension first by how many; None of another placement.

    So FSDP2 places what tensor parallelism has sharded along the same dimension.
    """
    is_strided = type(placement).__name__ == "_StridedShard"
    return int(placement.split_factor) if is_strided else None


def strided_shard(dim: int, split: int) -> Any:
    """Return the placement along ``dim`` of which `split_of` is ``split``."""
    from torch.distributed.tensor import placement_types

    return placement_types._StridedShard(dim, split_factor=split)
