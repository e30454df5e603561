"""A process group in Python: all names by which torch calls one, brought to a few. Imports torch.

torch finds its methods in two ways: ``dist.*`` calls the object itself, and what is written in C++ (DDP's reducer,
functional collectives) asks it for methods of the same names. Their arguments are torch's. Versions name some of them
otherwise; here each collective has one name, that of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

__all__ = ["COLLECTIVES", "PythonGroup", "Together"]

# Each collective by its name here, and the names by which versions of torch call it besides.
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "allreduce_coalesced": (),
    "broadcast": (),
    "reduce": (),
    "allgather": (),
    "allgather_coalesced": (),
    "all_gather_single": ("_allgather_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "gather": (),
    "scatter": (),
    "reduce_scatter": (),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "alltoall": (),
    "all_to_all_single": ("alltoall_base",),
    "barrier": (),
    "send": (),
    "recv": (),
    "recv_anysource": (),
}


class PythonGroup(ProcessGroup):  # type: ignore[misc]
    """A `PythonGroup` carries each collective by ``carry``, and has a rank and a size that may change."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_rank, self._own_size = rank, size
        self._name = self._description = ""
        self._bracket: list[Work] | None = None

    def carry(self, name: str, *arguments: Any, **named: Any) -> Work:
        """Begin the collective ``name``, one of ``COLLECTIVES``."""
        raise NotImplementedError(name)

    @property
    def kind(self) -> str:
        """Return the name of what carries its collectives."""
        raise NotImplementedError

    @property
    def begun(self) -> int:
        """Return how many collectives were begun."""
        raise NotImplementedError

    def become(self, rank: int, size: int) -> None:
        """Have this rank and size from now on."""
        self._own_rank, self._own_size = rank, size

    def rank(self) -> int:
        """Return the rank of this process."""
        return self._own_rank

    def size(self) -> int:
        """Return how many members there are."""
        return self._own_size

    getRank, getSize = rank, size

    def name(self) -> str:
        """Return the name of what carries its collectives, as torch asks a back end for it."""
        return self.kind

    def getBackendName(self) -> str:
        """Return a name that no back end of torch's has: DDP looks into those that it knows."""
        return "python"

    # -- its name -----------------------------------------------------------------------------------------------------

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        """Return the name that torch has given it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return what it is for."""
        return self._description

    # -- its back end, which is itself --------------------------------------------------------------------------------

    def _get_backend(self, _device: Any) -> PythonGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: it counts from its beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self.begun

    # -- brackets: what torch begins within one is waited for together ------------------------------------------------

    def _start_coalescing(self, _device: Any = None) -> None:
        self._bracket = []

    def _end_coalescing(self, _device: Any = None) -> Work:
        begun, self._bracket = self._bracket or [], None
        return Together(begun)


class Together(Work):  # type: ignore[misc]
    """`Together` are several collectives that are waited for as one."""

    def __init__(self, parts: list[Work]) -> None:
        super().__init__()
        self._parts = parts

    def wait(self, *timeout: Any) -> bool:
        """Wait for each. Raises what they raise."""
        return all(each.wait(*timeout) for each in self._parts)

    def is_completed(self) -> bool:
        """Return whether each has ended."""
        return all(each.is_completed() for each in self._parts)

    def is_success(self) -> bool:
        """Return whether each has ended well."""
        return all(each.is_success() for each in self._parts)

    def synchronize(self) -> None:
        """Have what follows on the device come after all."""
        for each in self._parts:
            each.synchronize()


def _carrying(name: str) -> Callable[..., Work]:
    def begin(self: PythonGroup, *arguments: Any, **named: Any) -> Work:
        work = self.carry(name, *arguments, **named)
        if self._bracket is not None:
            self._bracket.append(work)
        return work

    return begin


for _name, _others in COLLECTIVES.items():
    for _each in (_name, *_others):
        setattr(PythonGroup, _each, _carrying(_name))
