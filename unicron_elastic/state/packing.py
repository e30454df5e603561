"""A small state as one tensor of bytes, which any back end sends: the length of its layout, the layout, the tensors."""

from __future__ import annotations

import ctypes
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.state.layout import Layout, flatten, rebuild

_LENGTH_BYTES = 8


def pack(state: Any, device: torch.device) -> Tensor:
    """The state as bytes on ``device``, 1-D. Raises TypeError for what cannot be sent."""
    layout, tensors = flatten(state)
    text = layout.to_json().encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    return torch.cat([part.to(device) for part in (head, *(each.reshape(-1).view(torch.uint8) for each in tensors))])


def unpack(packed: Tensor) -> Any:
    """The state that was packed, in memory of its own on the same device. Raises ValueError for other bytes."""
    length = int.from_bytes(host_bytes(packed[:_LENGTH_BYTES]), "little")
    begin = _LENGTH_BYTES + length
    layout = Layout.parse(host_bytes(packed[_LENGTH_BYTES:begin]).decode())
    ends = list(accumulate((spec.bytes for spec in layout.specs), initial=begin))
    if ends[-1] != packed.numel():
        raise ValueError(f"a packed state of {packed.numel()} bytes, and its layout has {ends[-1]}")
    tensors = [
        packed[first:end].clone().view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, (first, end) in zip(layout.specs, pairwise(ends), strict=True)
    ]
    return rebuild(layout, tensors)


def host_bytes(memory: Tensor) -> bytes:
    """Return what is in a tensor of bytes, wherever it is, without NumPy: torch does not need it, so it may lack."""
    here = memory.detach().cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
