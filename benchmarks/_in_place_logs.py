"""What the workers of the matrix of tier 2 have logged, as values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Agreement", "ProcessLog", "Said", "parse", "read_logs"]


@dataclass(frozen=True, slots=True)
class Said:
    """What one member said of itself: the number of its step, its micro-batches in it, its reduced buckets."""

    state: int | None
    held: frozenset[int]
    done: frozenset[int]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all members of ``world`` said, by rank, the ``ordinal``-th time they met; ``buckets``: in all.

    ``has_begun``: the process that logged it had computed something of the step that all are in.
    """

    at_ns: int
    world: int
    ordinal: int
    buckets: int
    said: tuple[Said, ...]
    has_begun: bool


@dataclass
class ProcessLog:
    """Of one process. ``losses`` are the bits of each step's, as hexadecimal numbers; ``end`` are its parameters."""

    slot: int
    life: int
    pid: int
    struck: list[tuple[int, int]] = field(default_factory=list)  # (ns, step) of each fault that was done to it
    micro_batches: list[tuple[int, int]] = field(default_factory=list)  # (step, index) in the order of computation
    losses: dict[int, str] = field(default_factory=dict)
    stepped_ns: dict[int, int] = field(default_factory=dict)
    agreements: list[Agreement] = field(default_factory=list)
    end: bytes | None = None

    @property
    def parameters(self) -> array[float]:
        """At the end, as fp32 numbers; none if it did not come so far."""
        return array("f", self.end or b"")


def read_logs(folder: Path) -> list[ProcessLog]:
    """Of all processes of a job, by place and life."""
    logs = []
    for path in folder.glob("log.*"):
        slot, life, pid = map(int, path.name.split(".")[1:])
        logs.append(parse(slot, life, pid, path.read_text()))
    return sorted(logs, key=lambda log: (log.slot, log.life))


def parse(slot: int, life: int, pid: int, text: str) -> ProcessLog:
    """One process's log; a last line that is not whole is left out."""
    log = ProcessLog(slot, life, pid)
    for line in text.rpartition("\n")[0].splitlines():
        time_ns, what, *words = line.split(" ")
        match what:
            case "strike":
                log.struck.append((int(time_ns), int(words[0])))
            case "micro":
                log.micro_batches.append((int(words[0]), int(words[1])))
            case "step":
                log.losses[int(words[0])] = words[2]
                log.stepped_ns[int(words[0])] = int(time_ns)
            case "said":
                world = int(words[0])
                ordinal = sum(each.world == world for each in log.agreements)
                said = tuple(map(_said, words[2:]))
                has_begun = {each.state for each in said} == {step for step, _ in log.micro_batches[-1:]}
                log.agreements.append(Agreement(int(time_ns), world, ordinal, int(words[1]), said, has_begun))
            case "end":
                log.end = bytes.fromhex(words[0])
            case _:
                pass
    return log


def _said(word: str) -> Said:
    state, held, done = word.split(";")
    return Said(None if state == "None" else int(state), _numbers(held), _numbers(done))


def _numbers(text: str) -> frozenset[int]:
    return frozenset(map(int, text.split(","))) if text else frozenset()
