"""Where a worker says it is: the collectives it has begun and ended in each of its process groups, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unicron_elastic.detection.arrivals import Arrivals
from unicron_elastic.detection.sample import GroupPosition, waits
from unicron_elastic.worker.notices import LatestCollectives, Position, SectionLimits

LIMITS_MAX = 256
ARRIVALS_MAX = 2000  # as many as torch records
FLOPS_MAX = 1e26  # of a step: no cluster computes that in a day
OPS_MAX = 100  # kinds of collectives
OP_CHARACTERS = 40
NAME_CHARACTERS = 100  # of a group
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


def arrivals_of(said: LatestCollectives) -> Arrivals:
    """Return when a worker began its latest collectives; what is said of operations that are not named is left out."""
    at_us, offsets_us = said.at_us[:1], said.at_us[1:ARRIVALS_MAX]
    at_s = tuple((at_us[0] + each) / 1e6 for each in (0, *offsets_us)) if at_us else ()
    names = [name[:OP_CHARACTERS] for name in said.ops[:OPS_MAX]]
    which = said.op[: len(at_s)] or (0,) * len(at_s)
    are_named = all(0 <= each < len(names) for each in which)
    return Arrivals(first=said.first, at_s=at_s, ops=tuple(names[each] for each in which) if are_named else ())


def limits_of(said: SectionLimits) -> dict[str, float]:
    """What a script allows its sections, in seconds, without those that have no limit."""
    told = list(said.sections_s.items())[:LIMITS_MAX]
    return {name: float(limit_s) for name, limit_s in told if limit_s is not None and limit_s > 0}


def groups_of(said: Position) -> tuple[GroupPosition, ...]:
    """Return how far a worker has come in each of its groups."""
    return tuple(
        GroupPosition(
            name=group.name[:NAME_CHARACTERS], begun=group.begun, ended=group.ended, op=group.op[:OP_CHARACTERS]
        )
        for group in said.groups
    )
