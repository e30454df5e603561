"""WAF, weighted achieved FLOP/s, from what the training processes write down: exact, whatever happens to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "integral", "made_at", "picture", "series"]


@dataclass(frozen=True)
class Job:
    """A job whose processes write ``TIME STEP`` lines into files of ``log``; FLOPs are of one whole step."""

    name: str
    weight: float
    step_flops: float
    log: Path


def made_at(job: Job) -> list[float]:
    """When each step was made, in unix seconds: by the first rank that made it."""
    found: dict[int, float] = {}
    for path in job.log.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 2:  # the last line of who was killed may be half a line
                moment, step = float(words[0]), int(words[1])
                found[step] = min(moment, found.get(step, moment))
    return sorted(found.values())


def integral(jobs: Sequence[Job], begin: float, end: float) -> float:
    """Weighted FLOPs of all steps made from ``begin`` to ``end``."""
    return sum(job.weight * job.step_flops * sum(begin <= at < end for at in made_at(job)) for job in jobs)


def series(jobs: Sequence[Job], begin: float, end: float, width_s: float = 2.0) -> dict[str, list[float]]:
    """Weighted FLOP/s of each job, for every second from ``begin`` on, over the ``width_s`` before it."""
    found = {}
    for job in jobs:
        moments = made_at(job)
        worth = job.weight * job.step_flops / width_s
        found[job.name] = [
            worth * sum(begin + second - width_s <= at < begin + second for at in moments)
            for second in range(1, int(end - begin) + 1)
        ]
    return found


def picture(rates: Mapping[str, Sequence[float]], events: Sequence[tuple[float, str]], path: Path) -> None:
    """Write the jobs' WAF, one on top of the other, over time as an SVG file, with what happened when."""
    width, height, left, top = 900, 320, 70, 90
    seconds = max((len(each) for each in rates.values()), default=1)
    total = [sum(each[second] for each in rates.values() if second < len(each)) for second in range(seconds)]
    most = max(total, default=1.0) or 1.0
    x = [left + width * second / max(1, seconds - 1) for second in range(seconds)]
    base = [0.0] * seconds
    parts = []
    for (name, values), colour in zip(rates.items(), ("#4477aa", "#ee8866", "#44aa88", "#aa4488"), strict=False):
        upper = [low + (values[second] if second < len(values) else 0.0) for second, low in enumerate(base)]
        outline = [(at, top + height * (1 - value / most)) for at, value in zip(x, upper, strict=True)]
        outline += [(at, top + height * (1 - value / most)) for at, value in reversed(list(zip(x, base, strict=True)))]
        points = " ".join(f"{at:.1f},{value:.1f}" for at, value in outline)
        parts.append(f'<polygon points="{points}" fill="{colour}" opacity="0.85"><title>{name}</title></polygon>')
        parts.append(
            f'<text x="{left + 10 + 120 * (len(parts) // 2)}" y="{top + height + 50}" fill="{colour}">{name}</text>'
        )
        base = upper
    for number, (second, words) in enumerate(events):
        at = left + width * second / max(1, seconds - 1)
        parts.append(
            f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + height}" stroke="#333" stroke-dasharray="4"/>'
        )
        parts.append(f'<text x="{at:.1f}" y="{top - 10 - 16 * (number % 4)}" font-size="12">{words}</text>')
    parts.append(f'<text x="4" y="{top + 12}" font-size="12">{most / 1e9:.2f}</text>')
    parts.append(f'<text x="4" y="{top + height}" font-size="12">0 GFLOP/s</text>')
    parts.append(f'<text x="{left + width - 40}" y="{top + height + 18}" font-size="12">{seconds} s</text>')
    size = f'width="{left + width + 40}" height="{top + height + 70}"'
    body = "\n".join(parts)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n')
