"""Makes connections so that the making can be given up: gloo itself waits for peers that have died.

Who has told its address and dies is waited for by those that listen for it, for many times the time-out; neither
the store nor a connection is there to be broken. So a thread of its own makes the connections, and is left to
itself when they are not wanted any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import DistNetworkError

from unicron_elastic.compat.groups import gloo_made_by
from unicron_elastic.engine.transport.waiter import Patience

LOOK_S = 0.01
GRACE_S = 0.1  # for connections that are nearly made

_makers: list[Callable[[Callable[[], Any]], Any]] = []  # of those who make process groups now


class Superseded(Exception):
    """A newer world has come."""


@contextlib.contextmanager
def given_up_when(
    is_superseded: Callable[[], bool], *, number: int | None = 0, patience: Patience | None = None
) -> Iterator[None]:
    """While this lasts, torch makes gloo's part of a process group so; where it is given up, Superseded is raised.

    ``number``: from which the groups are counted; None: as torch counts. Raises DistNetworkError if the ``patience``
    with other ranks is over.
    """

    def make(construct: Callable[[], Any]) -> Any:
        return made_unless_superseded(construct, is_superseded, patience)

    _makers.append(make)
    try:
        with gloo_made_by(make, number=number):
            yield
    finally:
        _makers.remove(make)


def made_as_torch_makes(construct: Callable[[], Any]) -> Any:
    """Return what ``construct`` makes, so that it can be given up where torch's own groups are made so now."""
    return _makers[-1](construct) if _makers else construct()


def made_unless_superseded(
    construct: Callable[[], Any], is_superseded: Callable[[], bool], patience: Patience | None = None
) -> Any:
    """Return what ``construct`` makes, or leave it to itself and raise Superseded.

    Raises what it raises, and DistNetworkError if the ``patience`` with other ranks is over.
    """
    made: list[Any] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def run() -> None:
        try:
            made.append(construct())
        except BaseException as error:
            errors.append(error)
        has_ended.set()

    threading.Thread(target=run, name="unicron-connect", daemon=True).start()
    if patience is not None:
        patience.begin()
    while not has_ended.wait(LOOK_S):
        if is_superseded() and not has_ended.wait(GRACE_S):
            raise Superseded
        if patience is not None and patience.is_over():
            raise DistNetworkError("members of a new world did not come to connect, and are not known to be at work")
    if errors:
        raise errors[0]
    return made[0]
