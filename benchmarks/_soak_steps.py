"""What the training processes of a soak wrote: who made which step when, with which loss. Pure but for reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Back", "Drift", "Made", "compare", "last_moment", "last_step", "moments", "read_steps", "went_back"]

TAIL_BYTES = 400  # of a file: more than a line
APART = 2  # steps that may come in another order


@dataclass(frozen=True, slots=True)
class Made:
    """A step as one process wrote it. ``at``: Unix seconds; ``loss``: of the global batch, exact, as hexadecimal."""

    at: float
    step: int
    loss: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """Two runs compared, step by step.

    ``again``: lines of a step that another process, or the same job after a restart, wrote as well. ``different``: the
    first steps whose loss or digest is not that of the undisturbed run.
    """

    steps: int
    lines: int
    again: int
    digests: int
    unknown: int  # steps that the undisturbed run did not reach
    different: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Back:
    """A job that began again at an earlier step than the one it had come to: work that was lost."""

    at: float
    from_step: int
    to_step: int

    @property
    def steps(self) -> int:
        return self.from_step - self.to_step


def parse_step(line: str) -> Made | None:
    """None for a line that is not whole: whoever wrote it was killed."""
    words = line.split()
    if len(words) not in (3, 4) or not line.endswith("\n"):
        return None
    try:
        float.fromhex(words[2])
        return Made(float(words[0]), int(words[1]), words[2], words[3] if len(words) == 4 else "")
    except ValueError:
        return None


def read_steps(folder: Path) -> Iterator[Made]:
    """Of all processes whose files are there, in no order."""
    for path in sorted(folder.glob("*.steps")):
        with path.open(errors="replace") as lines:
            yield from (made for line in lines if (made := parse_step(line)) is not None)


def last_step(folder: Path) -> int:
    """The greatest that somebody has made of late, -1 if there is none; looks at the ends of files alone."""
    return max((made.step for made in _ends(folder)), default=-1)


def last_moment(folder: Path) -> float:
    """When somebody made a step last, in Unix seconds; 0.0 if nobody has."""
    return max((made.at for made in _ends(folder)), default=0.0)


def _ends(folder: Path) -> Iterator[Made]:
    newest = sorted(folder.glob("*.steps"), key=lambda path: path.stat().st_mtime)[-6:]  # there are fewer ranks
    for path in newest:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
        found = [made for line in lines[1:] or lines if (made := parse_step(line)) is not None]
        yield from found[-1:]


def moments(made: Iterable[Made]) -> list[float]:
    """When some process made some step, in order of time; a step that was lost and is made again counts again."""
    return sorted(each.at for each in made)


def went_back(made: Iterable[Made]) -> list[Back]:
    """Each time that a job went back, in order. Processes that train together are a step apart at most."""
    found, front = [], -1
    for each in sorted(made, key=lambda each: each.at):
        if each.step < front - APART:
            found.append(Back(each.at, front + 1, each.step))
            front = each.step
        front = max(front, each.step)
    return found


def compare(job: Iterable[Made], undisturbed: Iterable[Made]) -> Drift:
    """Every line of a job with the undisturbed run, bit for bit."""
    right = {made.step: made for made in undisturbed}
    steps: set[int] = set()
    different: set[int] = set()
    lines = digests = 0
    unknown: set[int] = set()
    for made in job:
        lines += 1
        steps.add(made.step)
        expected = right.get(made.step)
        if expected is None:
            unknown.add(made.step)
            continue
        digests += bool(made.digest)
        if (made.loss, made.digest) != (expected.loss, expected.digest):
            different.add(made.step)
    return Drift(len(steps), lines, lines - len(steps), digests, len(unknown), tuple(sorted(different)))
