"""Makes a back end known to torch whose process groups outlive worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from unicron_elastic.engine.group.inside import Inside
from unicron_elastic.engine.group.stable_group import StableGroup
from unicron_elastic.engine.transport.superseded import made_as_torch_makes

MakeInside = Callable[[Store, int, int, timedelta], Inside]


_known: dict[str, tuple[str, MakeInside]] = {}  # by the back end that is inside


def around(inside: str) -> tuple[str, MakeInside]:
    """Return the name of the back end whose groups have this one inside, and what makes that. Raises ValueError."""
    if inside not in _known:
        known = ", ".join(sorted(_known))
        raise ValueError(f"backend must be one of those whose groups outlive worlds ({known}), got {inside!r}")
    return _known[inside]


def register(name: str, make_inside: MakeInside, devices: Sequence[str] = ("cpu",), *, inside: str = "") -> None:
    """Let ``init_process_group(name)`` and ``new_group`` make groups whose first inside is made so; once is enough.

    ``inside`` is what that is called, if it is not ``name``.
    """

    def create(options: Any, _given: Any = None) -> StableGroup:
        """Make a group, from what torch says of it."""
        rank, size = int(options.group_rank), int(options.group_size)
        inside = made_as_torch_makes(lambda: make_inside(options.store, rank, size, options.timeout))
        group = StableGroup(rank, size)
        group.enter(inside, rank=rank, ranks=[int(each) for each in options.global_ranks_in_group] or range(size))
        return group

    _known[inside or name] = (name, make_inside)
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, create, extended_api=True, devices=list(devices))
