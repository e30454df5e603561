"""What the client gives to scripts and takes from them; the fields are NVIDIA's, since checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class RankMonitorClientError(Exception):
    """The client was used wrongly, or has not seen enough yet."""


@dataclass
class HeartbeatTimeouts:
    """Seconds without a heartbeat that mean a hang; None: no limit."""

    initial: float | None = None  # from the start of monitoring to the first heartbeat
    subsequent: float | None = None  # between two of them
    were_calculated: bool | None = None  # from what was measured; False: configured

    @property
    def are_valid(self) -> bool:
        """Whether both are limits."""
        return self.initial is not None and self.subsequent is not None

    def __str__(self) -> str:
        return (
            f"HeartbeatTimeouts(initial={_text(self.initial)}, subsequent={_text(self.subsequent)}, "
            f"were_calculated={self.were_calculated})"
        )


@dataclass
class SectionTimeouts:
    """Seconds in a section, or outside all of them, that mean a hang; None: no limit."""

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: set[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)  # a stored state holds a list, which JSON knows

    @property
    def were_calculated(self) -> bool:
        """Whether all of them were, from what was measured."""
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """Whether all of them are limits."""
        return None not in (*self.section.values(), self.out_of_section)

    def __str__(self) -> str:
        sections = ", ".join(f"{name}={_text(limit)}" for name, limit in self.section.items())
        return (
            f"SectionTimeouts(out_of_section={_text(self.out_of_section)}, sections=[{sections}], "
            f"calculated_sections={sorted(self.calculated_sections)}, "
            f"is_out_of_section_calculated={self.is_out_of_section_calculated})"
        )


class WorkloadAction(Enum):
    """What a script may ask its launcher to do at the next restart."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class WorkloadControlRequest:
    """An action, and why."""

    def __init__(self, action: WorkloadAction, description: str = "<not set>") -> None:
        self.action = action
        self.description = description

    def __str__(self) -> str:
        return f"WorkloadControlRequest(action={self.action}, description={self.description})"


def _text(seconds: float | None) -> str:
    return "None" if seconds is None else f"{seconds:.2f}"
