"""What a collective of a group that outlives its worlds gives: its wait ends when a newer world has come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.waiter import AbandonedError, keep_for_ever

if TYPE_CHECKING:
    from unicron_elastic.engine.group.placement import Placement

_NONE = timedelta()  # from C++: no time-out


class GroupWork(Work):  # type: ignore[misc]
    """A `GroupWork` is one collective, begun in one world; a wait for it ends at the latest when that world does."""

    def __init__(
        self, work: Work, placement: Placement, on_broken: Callable[[], object], *, minds_time_out: bool
    ) -> None:
        super().__init__()
        self._on_broken = on_broken
        self._work = work
        self._placement = placement
        self._minds_time_out = minds_time_out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it. Raises what the collective raises, or AbandonedError; then its tensors may change for ever."""
        if timeout is not None and timeout != _NONE:
            return bool(self._work.wait(timeout))
        waiter = self._placement.waiter
        try:
            if self._minds_time_out:
                waiter.wait(self._work)
            else:
                waiter.wait_one_to_one(self._work)
        except AbandonedError:
            keep_for_ever(self._placement.inside)
            self._on_broken()
            raise
        except RuntimeError as error:
            if not is_of_script(error):
                self._on_broken()
            raise
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return what it ended with."""
        return self._work.exception()

    def synchronize(self) -> None:
        """Have what follows on the device come after it."""
        self._work.synchronize()

    def result(self) -> Any:
        """Return its tensors."""
        return self._work.result()

    def get_future(self) -> Any:
        """Return the back end's future: DDP's reducer waits for it in C++. It ends when the connections break."""
        future = self._work.get_future()
        if self._placement.inside.looks_up:
            self._placement.futures.add(future)
        return future

    def source_rank(self) -> int:
        """Return who has sent it."""
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())
