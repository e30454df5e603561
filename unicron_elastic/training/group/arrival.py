"""How a process comes to those who train: as one of the first, or later, with their state.

Who comes later runs its script from the beginning. Calls of ``run.steps()`` that the others have behind them it passes
by; it comes to the others in the call that they are in, which is told by its total. The protocol decides that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from unicron_elastic.engine.protocol.replica_event import Answered, Copied, NotCopied
from unicron_elastic.state.pull.client import Pulled
from unicron_elastic.training.group.handover import Handover, NotTakenError
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.group.servant import NotGivenError, about_fetched, fetch_state
from unicron_elastic.worker.instructions import Invitation

ASK_AGAIN_S = 0.1  # after a newcomer found no source of the state, or was too early
MISFITS_MAX = 3  # states that did not fit, until that is believed
ASK_LATER_S = (1.0, 60.0)  # after the others could not give it, at first and at most: they may be able to some day


class Arrival:
    """`Arrival` asks for one process to be a member, and copies the state for it, which ``registered`` takes over."""

    def __init__(
        self,
        membership: Membership,
        registered: Handover,
        fetch: Callable[[Handover, Invitation], Pulled | None] | None = None,
    ) -> None:
        self._membership = membership
        self._fetch = fetch or fetch_state
        self._registered = registered
        self._invitation: Invitation | None = None  # the latest
        self._fetched: Pulled | None = None  # its source waits
        self._pause_s = ASK_AGAIN_S
        self._refused: str | None = None  # why

    @property
    def was_newcomer(self) -> bool:
        """Whether others trained already when this process came."""
        return self._invitation is not None

    def ask(self, *, is_again: bool) -> Answered:
        """Ask the agent. Raises TimeoutError if it does not answer."""
        if is_again:
            time.sleep(self._pause_s)
        invitation = self._membership.enter()
        if invitation is None:
            return Answered(is_member=True)
        self._invitation = invitation
        return Answered(has_source=bool(invitation.sources), where=_told(invitation))

    def copy(self) -> Copied | NotCopied:
        """Copy the state from those who are named in the invitation. Raises NotTakenError if it does not fit.

        It may have been read in a moment in which the others' script had changed it for a while: it is copied anew.
        """
        assert self._invitation is not None
        try:
            self._fetched = self._fetch_fitting(self._invitation)
        except NotGivenError as error:
            self.is_refused(str(error))
            return NotCopied(is_refused=True)
        if self._fetched is None:
            return NotCopied()
        return Copied(self._registered.taken_until, self._registered.taken_step)

    def _fetch_fitting(self, invitation: Invitation) -> Pulled | None:
        """Fetch the state anew while it does not fit; say of the first one why it does not, if it never does."""
        misfit: NotTakenError | None = None
        for _ in range(MISFITS_MAX):
            try:
                fetched = self._fetch(self._registered, invitation)
            except NotTakenError as error:
                misfit = misfit or error
            else:
                if fetched is None and misfit is not None:
                    break
                return fetched
        assert misfit is not None
        raise misfit

    def tell_copied(self) -> bool:
        """Tell the agent of the state that was copied; false if there is none."""
        if self._fetched is not None:
            self._membership.tell(about_fetched(self._fetched))
        return self._fetched is not None

    def release(self) -> None:
        """Let the source of the copied state go on."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched.release()

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


def _told(invitation: Invitation) -> tuple[int, int] | None:
    """Where the source of the state is; None if that is not known."""
    found = [(each["until"], each["step"]) for each in invitation.sources if each.get("until")]
    return found[0] if found else None
