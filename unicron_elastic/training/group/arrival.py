"""How a process comes to those who train: as one of the first, or later, with their state.

Who comes later runs its script from the beginning. Calls of ``run.steps()`` that the others have behind them it passes
by; it comes to the others in the call that they are in, which is told by its total.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol

from unicron_elastic.engine.protocol.said import MismatchError
from unicron_elastic.state.pull.client import Pulled
from unicron_elastic.training.group.handover import Handover
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.group.servant import NotGivenError, about_fetched, fetch_state
from unicron_elastic.worker.instructions import Invitation

ASK_AGAIN_S = 0.1  # after a newcomer found no source of the state, or was too early
ASK_LATER_S = (1.0, 60.0)  # after the others could not give it, at first and at most: they may be able to some day
FETCHES_MAX = 2  # of one process; for each that is too slow the others wait in vain, and then while it copies from them


class Newcomer(Protocol):
    """The engine of one, as far as it is needed here."""

    @property
    def state(self) -> int:
        """How many optimizer steps its parameters have behind them."""

    def has_taken(self) -> None:
        """Note that it has the state of a member."""

    def forget(self) -> None:
        """That state is of no use to it."""

    def come_in(self) -> tuple[int, int] | None:
        """Meets the others; None if it is with them, else where they are: the total and the step that they are in."""


class Arrival:
    """Of one process. ``is_newcomer``: others train already, and it has not met them yet."""

    def __init__(self, membership: Membership, registered: Handover) -> None:
        """``registered`` takes the state over."""
        self._membership = membership
        self._registered = registered
        self._others_until = 0  # as far as it is known
        self._fetches = 0
        self._kept: Pulled | None = None  # of a call that is still to come; its source waits
        self._pause_s = ASK_AGAIN_S
        self._refused: str | None = None  # why
        self.is_newcomer = False
        self.was_newcomer = False
        self.passes = False  # it is in no call of run.steps() that the others are in

    def come(self, newcomer: Newcomer, until: int) -> bool:
        """Comes to the others in the call with the total ``until``; false if they have that behind them.

        Gets the state while the others train; without a source, or one that holds, in the group while they wait. Raises
        MismatchError if they make no such call, and TimeoutError if the agent does not answer.
        """
        self.passes = until < self._others_until
        while not self.passes:
            where = self._enter(newcomer, until)
            if where is None:
                self.is_newcomer = False
                return True
            newcomer.forget()
            self._compare(until, *where)
            if not self.passes:
                time.sleep(self._pause_s)
        return False

    def is_refused(self, why: str) -> None:
        """Note that the others cannot give their state; says so once, as they train on and this process waits."""
        least_s, most_s = ASK_LATER_S
        self._pause_s = min(max(2 * self._pause_s, least_s), most_s)
        if why != self._refused:
            self._refused = why
            sys.stderr.write(
                f"unicron: this rank is not given the others' state, who train on without it: {why}. It asks again now "
                "and then.\n"
            )

    def _enter(self, newcomer: Newcomer, until: int) -> tuple[int, int] | None:
        """Comes with the state, or without if it could not be copied; None if it is with the others now.

        If it was copied in a later call than this one, its source is kept in that step, and with it all others, until
        this process has passed by the calls before: they would be in another call each time that it has a copy.
        """
        fetched, self._kept = self._kept, None
        if fetched is not None:
            self._registered.load()
        else:
            invitation = self._membership.enter()
            if invitation is None:
                return None
            self.is_newcomer = self.was_newcomer = True
            where = _told(invitation)
            if where is not None and where[0] != until:
                return where
            if not invitation.sources or self._fetches >= FETCHES_MAX:
                return self._join(newcomer, None)
            try:
                fetched = fetch_state(self._registered, invitation)
            except NotGivenError as error:
                self.is_refused(str(error))
                return (0, 0)
            self._fetches += 1
            if fetched is None:
                return (0, 0)  # nobody knows where they are: it asks again
        taken_until, step = self._registered.taken_until, newcomer.state
        if taken_until > until:
            self._kept = fetched
        elif taken_until < until:
            fetched.release()
        else:
            return self._join(newcomer, fetched)
        return taken_until, step

    def _join(self, newcomer: Newcomer, fetched: Pulled | None) -> tuple[int, int] | None:
        """Meets the others, with what was ``fetched``; None if it is with them now, else where they are."""
        if fetched is not None:
            newcomer.has_taken()
            self._membership.tell(about_fetched(fetched))
        self._membership.is_ready(newcomer.state)
        if fetched is not None:
            fetched.release()  # before any reduction with this rank, which would find the state held
        return newcomer.come_in()

    def _compare(self, until: int, others_until: int, others_step: int) -> None:
        """Whether this call is past; one that is still to come is waited for."""
        self._others_until = max(self._others_until, others_until)
        self.passes = until < others_until
        if self.passes and until > others_step:
            raise MismatchError(
                f"this rank calls run.steps() with a total of {until}, and the others train from step {others_step} "
                f"until {others_until}: all ranks must call it with the same totals, also one that comes later and "
                "counts from the beginning"
            )


def _told(invitation: Invitation) -> tuple[int, int] | None:
    """Where the source of the state is; None if that is not known."""
    found = [(each["until"], each["step"]) for each in invitation.sources if each.get("until")]
    return found[0] if found else None
