"""Where a worker says it is: the collectives it has begun and ended in each of its process groups, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unicron_elastic.detection.arrivals import Arrivals
from unicron_elastic.detection.sample import GroupPosition, waits
from unicron_elastic.worker.notices import SectionLimits

LIMITS_MAX = 256
ARRIVALS_MAX = 2000  # as many as torch records
FLOPS_MAX = 1e26  # of a step: no cluster computes that in a day
OPS_MAX = 100  # kinds of collectives
OP_CHARACTERS = 40
ANSWER_DEADLINE_S = 0.02  # an answer takes 0.1 ms and a turn on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What a worker answered last, and since when it owes an answer (monotonic seconds; None: it owes none)."""

    groups: tuple[GroupPosition, ...] = ()  # the whole job's first
    uses_gpu: bool = False
    is_at_prompt: bool = False  # of a debugger or a console
    questions: int = 0
    asked_at: float | None = None

    def asked(self, at: float) -> Whereabouts:
        """After one more question."""
        return replace(self, questions=self.questions + 1, asked_at=at)

    def answered(
        self, groups: tuple[GroupPosition, ...], *, uses_gpu: bool = False, is_at_prompt: bool = False
    ) -> Whereabouts:
        """After the answer."""
        return replace(self, groups=groups, uses_gpu=uses_gpu, is_at_prompt=is_at_prompt, asked_at=None)

    def forgotten(self) -> Whereabouts:
        """Without what was answered a while ago; an answer that is owed stays owed."""
        return replace(self, groups=(), is_at_prompt=False)

    def is_silent(self, at: float) -> bool:
        """Whether an answer should have come by now."""
        return self.asked_at is not None and at - self.asked_at > ANSWER_DEADLINE_S

    def begun(self, at: float) -> int | None:
        """Collectives begun in the group of the whole job; None if that is not known."""
        return None if self.is_silent(at) or not self.groups else self.groups[0].begun

    def is_waiting(self, at: float) -> bool | None:
        """Whether in some group the latest collective has not ended; None if that is not known."""
        return None if self.begun(at) is None else waits(self.groups)


def parse_arrivals(message: Mapping[str, Any]) -> Arrivals:
    """When a worker began its latest collectives, of which there are none if it records nothing.

    Raises ValueError for what no worker of ours says.
    """
    told = message["arrivals"]
    if told is None:
        return Arrivals(first=0, at_s=())
    try:
        first, (at_us, *offsets_us) = int(told["first"]), told["at_us"]
        at_s = tuple((at_us + each) / 1e6 for each in (0, *offsets_us[: ARRIVALS_MAX - 1]))
        names = [str(name)[:OP_CHARACTERS] for name in told.get("ops", ())[:OPS_MAX]]
        which = told.get("op", [0] * len(at_s) if names else [])[: len(at_s)]
        return Arrivals(first=first, at_s=at_s, ops=tuple(names[each] for each in which))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not an answer about arrivals: {error!r}") from None


def limits_of(said: SectionLimits) -> dict[str, float]:
    """What a script allows its sections, in seconds, without those that have no limit."""
    told = list(said.sections_s.items())[:LIMITS_MAX]
    return {name: float(limit_s) for name, limit_s in told if limit_s is not None and limit_s > 0}


def parse_groups(message: Mapping[str, Any]) -> tuple[GroupPosition, ...]:
    """The groups of an answer. Raises ValueError for what no worker of ours says."""
    try:
        return tuple(
            GroupPosition(
                name=str(group["name"])[:100],
                begun=int(group["begun"]),
                ended=None if group["ended"] is None else int(group["ended"]),
                op=str(group.get("op", ""))[:OP_CHARACTERS],
            )
            for group in message["groups"]
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not an answer about process groups: {error!r}") from None
