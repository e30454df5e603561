"""How a process in one seat of a replica belongs to its job: as that replica does.

What its agent says of worlds counts for it when all processes of the replica have heard it.
"""

from __future__ import annotations

from torch.distributed import Store

from unicron_elastic.base.world import World
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.shard.of_replicas import of_replicas
from unicron_elastic.worker.instructions import Invitation
from unicron_elastic.worker.notices import Notice

AGREE_S = 120.0  # within which the agent tells all processes of a replica of a world of which one has heard


class SeatMembership:
    """`SeatMembership` is that of a process (``own``), with worlds of replicas of ``seats`` processes each."""

    def __init__(self, own: Membership, seats: int) -> None:
        self._own = own
        self._seats = seats
        self._heard: tuple[World, int | None] | None = None  # the newest, and this process's rank there
        self._agreed: tuple[World, int | None] | None = None  # that of replicas, of which all here have heard

    @property
    def is_fixed(self) -> bool:
        """Known when it has entered."""
        return self._own.is_fixed

    def enter(self) -> Invitation | None:
        """Ask to be a member."""
        return self._own.enter()

    def is_ready(self, state: int) -> None:
        """Say that this newcomer waits for a world with it."""
        self._own.is_ready(state)

    @property
    def next_world_timeout_s(self) -> float:
        """Return how long at least to wait for the next world after one has broken."""
        return self._own.next_world_timeout_s

    # -- what all of the replica have heard ---------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """Return the number of the newest world of which this process has heard, which is what it may agree on."""
        self._heard = self._own.newer_than(0)
        return 0 if self._heard is None else self._heard[0].number

    def await_world(self, number: int) -> None:
        """Wait until this process, too, has heard of the world ``number``, or of a newer one. Raises TimeoutError."""
        if not self._own.wait_until_heard(number, AGREE_S):
            raise TimeoutError(f"other processes of this replica are told of world {number}, and this one is not")

    def agree(self) -> None:
        """Take it that ``newest`` was the same in all processes of the replica."""
        if self._heard is not None and (self._agreed is None or self._heard[0].number > self._agreed[0].number):
            world, rank = self._heard
            name = "" if rank is None else world.members[rank].name
            self._agreed = of_replicas(world, self._seats, name)

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        """Return the newest world of which all processes of the replica have heard, if that is after this one."""
        return self._agreed if self._agreed is not None and self._agreed[0].number > number else None

    # -- what this process has heard ----------------------------------------------------------------------------------

    def is_newer(self) -> bool:
        """Whether a world has come after the one that was adopted."""
        return self._own.is_newer()

    def is_left(self) -> bool:
        """Whether what goes on in the adopted world has ended."""
        return self._own.is_left()

    def adopt(self, number: int | None = None) -> tuple[World, int, Store]:
        """Adopt the newest world. Raises what a process's own membership raises."""
        world, rank, store = self._own.adopt(number)
        replicas, index = of_replicas(world, self._seats, world.members[rank].name)
        assert index is not None
        return replicas, index, store

    def wait_for_newer(self, timeout_s: float) -> bool:
        """Wait for a world after the one that was adopted; false if none came in time."""
        return self._own.wait_for_newer(timeout_s)

    def wait_for_agreed(self, timeout_s: float) -> bool:
        """The same for a world that the agents must make."""
        return self._own.wait_for_agreed(timeout_s)

    def wait_until_heard(self, number: int, timeout_s: float) -> bool:
        """Wait until this process has heard of the world ``number``, or of a newer one; whether it has, in time."""
        return self._own.wait_until_heard(number, timeout_s)

    def broke(self, error: Exception) -> None:
        """The collectives of the adopted world failed. Returns when there is a newer one, else raises ``error``."""
        self._own.broke(error)

    def tell_broken(self, error: Exception, *, outlives_joins: bool = True) -> None:
        """Let others in this seat know by breaking all connections to them, and the agent by its word."""
        self._own.tell_broken(error, outlives_joins=outlives_joins)

    def tell(self, said: Notice) -> None:
        """Says something to the agent."""
        self._own.tell(said)
