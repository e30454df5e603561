"""What a rank gives where all get one object, and how it comes to them: that of the first rank, as bytes.

It is written as a state is that others copy, and no code of anybody's is run when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.state.packing import host_bytes, pack, unpack
from unicron_elastic.training.group.mean_share import FEW, AllMembers, InReplica, few, message
from unicron_elastic.training.shard.mates import Mates

OBJECT = "broadcast_object"  # as the run's call is called
_WORD = 8  # bytes


@dataclass(frozen=True, slots=True)
class ObjectShare:
    """`ObjectShare` is the object that one rank gives, as bytes in ``numbers``, (n,)."""

    numbers: Tensor

    call = OBJECT
    kind = "an object"

    @classmethod
    def of(cls, value: Any, device: torch.device, mates: Mates | None) -> ObjectShare:
        """The share of a rank that trains on ``device``: all of a replica give what its first process has.

        Raises TypeError for what cannot be sent.
        """
        try:
            packed = pack({"value": value}, device)
        except TypeError as error:
            raise TypeError(f"run.{OBJECT}(value) takes what can be registered: {error}") from None
        if mates is not None:
            text = host_bytes(packed).decode("latin-1") if mates.is_lead else ""
            data = bytearray(mates.share(text)[0].encode("latin-1"))
            packed = torch.frombuffer(data, dtype=torch.uint8).to(device, copy=True)
        return cls(packed)

    def message(self, label: str) -> Tensor:
        """What is told to all: what is asked, how many bytes there are, and these, if they are few."""
        count = self.numbers.numel()
        told = _words(count) if _is_small(count) else 0
        words = torch.zeros(1 + told, dtype=torch.int64, device=self.numbers.device)
        words[0] = count
        if told:
            words[1:].view(torch.uint8)[:count].copy_(self.numbers)
        return message(label, words)

    def result(self, messages: Sequence[Tensor], members: AllMembers) -> Tensor:
        """The bytes of the first rank, from what all have told."""
        told = messages[0]
        count = int(few(told, 1, torch.int64).item())
        if _is_small(count):
            return few(told, 1 + _words(count), torch.int64)[1:].view(torch.uint8)[:count].clone()
        data = self.numbers if members.rank == 0 else torch.empty(count, dtype=torch.uint8, device=told.device)
        members.broadcast(data, 0)
        return data

    def lacks(self, lost: frozenset[int]) -> frozenset[int]:
        """The first rank, if it was ``lost`` since the step ended: others need not have had what it had."""
        return lost & {0}

    def given_back(self, numbers: Tensor, mates: InReplica | None = None) -> Any:  # noqa: ARG002
        """The object, which all of a replica have alike."""
        return unpack(numbers)["value"]


def _words(count: int) -> int:
    return -(-count // _WORD)


def _is_small(count: int) -> bool:
    return _words(count) < FEW
