"""What broke is known, and what it had left to end with its functions has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from torch.distributed import DistNetworkError

from unicron_elastic.engine.protocol.replica_event import GroupBroke
from unicron_elastic.megatron.members import Members


def test_passes_that_broke_end_at_once_what_they_have_left_open() -> None:
    """Megatron-Core's schedules of pipelines enter ``no_sync()`` by hand, and do not leave it when they break."""
    members, ended = Members.__new__(Members), list[str]()
    members._membership = SimpleNamespace(is_fixed=False)  # type: ignore[assignment]

    @contextmanager
    def no_sync() -> Iterator[None]:
        try:
            yield
        finally:
            ended.append("no_sync")

    def passes() -> None:
        context = no_sync()
        context.__enter__()
        raise DistNetworkError("Connection closed by peer")

    assert isinstance(members.attempt(passes), GroupBroke)
    assert ended == ["no_sync"]
