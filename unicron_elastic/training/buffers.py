"""The buffers of a model: all of them go to a newcomer, also those that ``state_dict`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.state.exact import check_same

__all__ = ["given", "take"]


def given(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The buffers by name; None for those that are in ``state``, the model's state_dict, and so in what is given."""
    return {
        name: None if name in state else buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name in state or _can_be_sent(buffer)
    }


def take(model: nn.Module, buffers: Mapping[str, Tensor | None], state: Mapping[str, Any]) -> None:
    """Has ``model`` have what another's ``given`` gave, of which ``state`` is the state_dict.

    A buffer of another shape or type is replaced, as is what is tied to it. Raises ValueError for a name that does not
    fit this model.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    replaced: dict[int, Tensor] = {}
    for name, value in buffers.items():
        received = state[name] if value is None else value
        buffer = own.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (received.shape, received.dtype):
            buffer.data.copy_(received)
            continue
        if id(buffer) not in replaced or buffer is None:
            replaced[id(buffer)] = received.to(_device_of(model) if buffer is None else buffer.device, copy=True)
        _put(model, name, replaced[id(buffer)], is_persistent=value is None)
    for name in own.keys() - buffers.keys():
        if _can_be_sent(own[name]):
            _put(model, name, None, is_persistent=name in state)
    received = {name: value for name, value in buffers.items() if value is not None}
    check_same(dict(model.named_buffers(remove_duplicate=False)), received, "model")


def _put(model: nn.Module, name: str, value: Tensor | None, *, is_persistent: bool) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"the buffer {name} was received, and the model has no place for it: {error}") from None
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module.register_buffer(leaf, value, persistent=is_persistent)


def _can_be_sent(buffer: Tensor) -> bool:
    """Whether it is plain numbers; others, such as sparse ones, stay as the script makes them."""
    return type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_quantized and not buffer.is_meta


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
