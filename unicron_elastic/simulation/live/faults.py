"""A fault with all that chance says of it, and what a node's machine asks of the cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from unicron_elastic.faults import Severity, Status
from unicron_elastic.recovery.node import SUSPECT_S
from unicron_elastic.simulation.history.events import KINDS, Method
from unicron_elastic.simulation.model.accounting import IncidentEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault, and what was drawn with it.

    ``cure``: the severity whose action ends it. ``local_rank``: whom it strikes. ``step_part``: which part of the step
    was done, 0 to 1. ``repair_s``: as in the history.
    """

    status: Status
    entry: IncidentEntry
    cure: Severity
    local_rank: int
    step_part: float
    repair_s: float | None = None
    status_severity: Severity

    @property
    def method(self) -> Method:
        """Return the method by which it is noticed."""
        return KINDS[self.status].method

    @property
    def away_s(self) -> float | None:
        """For how long its node is away if it has to go; None: it does not come back, as far as the history says.

        A node that was only suspected comes back after its quarantine.
        """
        is_broken = KINDS[self.status].severity is Severity.SEV1
        return self.repair_s if self.repair_s is not None or is_broken else SUSPECT_S

    def worse(self) -> Strike:
        """The same once more, when it is known that the node is at fault."""
        return replace(self, status_severity=Severity.SEV1)


class Surroundings(Protocol):
    """What a node's machine needs of the cluster."""

    def why_stay(self) -> str:
        """Why the job cannot go on without this node, as a sentence; "": it can."""

    def isolate(self, strike: Strike) -> None:
        """The node leaves the job and the cluster."""
