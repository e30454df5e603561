"""A soak's samples, faults, steps and ledgers as one report in Markdown, and its verdict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from _soak_chaos import WHAT, Struck
from _soak_cluster import JOBS
from _soak_incidents import Told, open_incidents, outcomes, unexplained
from _soak_steps import Drift, Made, compare, moments, read_steps, went_back
from _soak_trends import BOUNDS, Series, Trend, climb, second_half, slopes, trend

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import find_ledgers, read_ledger

__all__ = ["Kept", "lasting_leases", "lines"]

MIB = 2**20
KEPT_STEPS = 60  # a neighbour has a snapshot of each 50th step, and some steps pass until it has copied it
LEAST_HALF_S = 900.0  # of a run: etcd's own history is ten minutes long
FIELDS = ("pid", "started", "host", "role", "rss_kib", "pss_kib", "descriptors", "threads", "cpu_s")
ROLES = ("etcd", "coordinator", "agent", "launcher", "keeper", "warm", "worker")
OF_PROCESS: Mapping[str, tuple[str, str, float]] = {
    "RSS, MiB": ("rss_kib", "memory, MiB", 1 / 1024),
    "PSS, MiB": ("pss_kib", "memory, MiB", 1 / 1024),
    "descriptors": ("descriptors", "descriptors", 1.0),
    "threads": ("threads", "threads", 1.0),
}
COUNTED = ("descriptors", "threads")


@dataclass(frozen=True)
class Kept:
    """A run as its folder has it."""

    settings: dict[str, Any]
    samples: list[dict[str, Any]]
    struck: list[Struck]
    problems: list[str]
    incidents: list[Incident]
    steps: dict[str, list[Made]]  # of each job
    folder: Path

    @classmethod
    def read(cls, folder: Path, minutes: float = inf) -> Kept:
        """The first ``minutes`` of it. Raises OSError."""
        settings = _records(folder / "settings.json")[0]
        end = settings["began_at"] + 60 * minutes
        monotonic_end = settings["monotonic_s"] + 60 * minutes
        ledgers = [each for path in find_ledgers(folder / "hosts") for each in read_ledger(path)[0]]
        return cls(
            settings=settings,
            samples=[each for each in _records(folder / "samples.jsonl") if each["at"] <= end],
            struck=[Struck(**each) for each in _records(folder / "events.jsonl") if each["at"] <= end],
            problems=[each["problem"] for each in _records(folder / "problems.jsonl") if each["at"] <= end],
            incidents=[each for each in ledgers if (each.noticed_at or 0.0) <= monotonic_end],
            steps={spec.name: [each for each in read_steps(folder / spec.name) if each.at <= end] for spec in JOBS},
            folder=folder,
        )

    @property
    def alive(self) -> list[dict[str, Any]]:
        """Samples while jobs ran."""
        return [sample for sample in self.samples if sample["phase"] != "after"]

    @property
    def monotonic_at(self) -> float:
        return float(self.settings["began_at"] - self.settings["monotonic_s"])

    @property
    def last_at(self) -> float:
        return float(self.alive[-1]["at"])


def lines(folder: Path, minutes: float = inf) -> Iterator[str]:
    """The report of the first ``minutes``; the verdict comes last."""
    kept = Kept.read(folder, minutes)
    wrong = list(kept.problems)
    machine = ", ".join(f"{what}: {value}" for what, value in kept.settings["machine"].items())
    hours = (kept.last_at - kept.alive[0]["at"]) / 3600
    yield f"{hours:.2f} hours, {len(kept.struck)} faults, seed {kept.settings['seed']}, {machine}"
    yield from ("", _load(kept), "")
    yield from _faults(kept)
    yield from ("", *_lost_work(kept, wrong))
    yield from ("", *_incidents(kept, wrong), "")
    yield from _drift(kept, wrong)
    yield ""
    yield from _of_processes(kept, wrong)
    yield ""
    yield from _of_cluster(kept, wrong)
    yield from ("", *_afterwards(kept), "")
    yield f"Verdict: {'nothing was found' if not wrong else f'{len(wrong)} findings'}"
    yield from (f"- {each}" for each in wrong)


# -- faults ------------------------------------------------------------------------------------------------------------


def _faults(kept: Kept) -> Iterator[str]:
    made = {name: moments(steps) for name, steps in kept.steps.items()}
    told = outcomes(kept.struck, kept.incidents, made, kept.monotonic_at, kept.last_at)
    yield "| fault | number | told by a ledger | noticed after, s | longest standstill of its job, s | as |"
    yield "|---|---|---|---|---|---|"
    for kind, what in WHAT.items():
        of_kind = [each for each in told if each.struck.kind == kind]
        if not of_kind:
            continue
        of_jobs = [each for each in of_kind if each.struck.job]
        noticed = [each.noticed_s for each in of_kind if each.noticed_s is not None]
        stood = [each.stood_s for each in of_jobs if each.stood_s is not None]
        statuses = Counter(status for each in of_kind for status in each.statuses)
        words = ", ".join(f"{status} {number}" for status, number in statuses.most_common(3))
        yield f"| {what} | {len(of_kind)} | {len(noticed)} | {_spread(noticed)} | {_spread(stood)} | {words} |"
    worst = {name: max((b - a for a, b in pairwise(at)), default=0.0) for name, at in made.items()}
    yield ""
    yield "Longest time without a step: " + ", ".join(f"{name} {most:.1f} s" for name, most in worst.items()) + "."
    yield from _unnoticed(told)


def _unnoticed(told: Sequence[Told]) -> Iterator[str]:
    """Faults of workers that no ledger tells of, and that had time for it: the worker may have been on its way out."""
    silent = [
        each for each in told if each.struck.kind in ("kill", "raise", "all", "hang", "stand") and not each.statuses
    ]
    if silent:
        yield f"{len(silent)} faults of workers are in no ledger before the next fault of the same job or host:"
        for each in silent:
            yield f"- {each.struck.kind} on {each.struck.host} ({each.struck.job}) at {each.struck.at:.1f}"


def _lost_work(kept: Kept, wrong: list[str]) -> Iterator[str]:
    """How often all went back to something that was kept, and whether that was the newest there should have been."""
    yield "| job | steps, with those made again | went back | steps lost each time | made again |"
    yield "|---|---|---|---|---|"
    for name, made in kept.steps.items():
        back, steps = went_back(made), len({each.step for each in made})
        lost = sum(each.steps for each in back)
        each_time = _spread([float(each.steps) for each in back])
        yield f"| {name} | {steps + lost} | {len(back)} | {each_time} | {lost / max(1, steps + lost):.1%} |"
        for each in back:
            if each.steps > KEPT_STEPS:
                when = f"{(each.at - kept.settings['began_at']) / 60:.1f} min"
                wrong.append(f"{name} went back from step {each.from_step} to {each.to_step} at {when}")


def _incidents(kept: Kept, wrong: list[str]) -> Iterator[str]:
    stays, cut_short = open_incidents(kept.incidents, kept.struck, kept.monotonic_at, kept.last_at - 30.0)
    superseded = sum(each.superseded_by is not None for each in kept.incidents)
    left = sum(each.left is not None for each in kept.incidents)
    closed = sum(each.first_step_at is not None for each in kept.incidents)
    yield (
        f"{len(kept.incidents)} incidents in all ledgers: {closed} closed by a step, {superseded} superseded by the "
        f"next, {left} by their node's departure, {cut_short} cut short because their host or "
        f"agent was ended, {len(stays)} open."
    )
    without = unexplained(kept.incidents, kept.struck, kept.monotonic_at)
    yield (
        f"{len(without)} incidents that no fault explains."
        if without
        else "Each incident has a fault that explains it."
    )
    yield from (f"- {each.run_id} on {each.host}, {each.time}: {each.reason} {each.decision}" for each in without)
    for each in stays:
        wrong.append(
            f"open: {each.run_id} on {each.host} number {each.number} of {each.time}: {each.reason} {each.decision}"
        )


def _drift(kept: Kept, wrong: list[str]) -> Iterator[str]:
    head = (
        "steps | written by processes | of these again or by others | digests | beyond the undisturbed run | different"
    )
    yield f"| job | {head} |"
    yield "|---|---|---|---|---|---|---|"
    for name, made in kept.steps.items():
        found: Drift = compare(made, read_steps(kept.folder / f"{name}-undisturbed"))
        cells = [found.steps, found.lines, found.again, found.digests, found.unknown, len(found.different)]
        yield f"| {name} | {' | '.join(map(str, cells))} |"
        if found.different:
            wrong.append(f"{name}: {len(found.different)} steps differ, the first is {found.different[0]}")


# -- trends ------------------------------------------------------------------------------------------------------------


def lives(samples: Sequence[Mapping[str, Any]], role: str, field: str, factor: float) -> list[Series]:
    """A quantity of each process of a role, over its life."""
    place = FIELDS.index(field)
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for sample in samples:
        for each in sample["processes"]:
            if each[3] == role:
                times, values = found.setdefault((each[0], each[1]), ([], []))
                times.append(sample["at"])
                values.append(each[place] * factor)
    return [Series(tuple(times), tuple(values)) for times, values in found.values()]


def _of_processes(kept: Kept, wrong: list[str]) -> Iterator[str]:
    head = "processes | longest life, min | usual | the oldest: at first, at last | growth an hour | bound"
    yield f"| process | quantity | {head} |"
    yield "|---|---|---|---|---|---|---|---|"
    for role in ROLES:
        for name, (field, bound, factor) in OF_PROCESS.items():
            found = lives(kept.alive, role, field, factor)
            if not found:
                continue
            result = trend(found, BOUNDS[bound])
            longest = max(each.span_s for each in found) / 60
            yield f"| {role} | {name} | {len(found)} | {longest:.0f} | {_cells(result)} |"
            if result.is_leak:
                wrong.append(f"{role}: {name} grows by {result.growth:.2f} an hour")
            elif name in COUNTED and (climbed := climb(found) or 0.0) > result.bound:
                wrong.append(f"{role}: {name} of the oldest one grow by {climbed:.2f} an hour")


def _of_cluster(kept: Kept, wrong: list[str]) -> Iterator[str]:
    quantities: dict[str, tuple[Callable[[dict[str, Any]], float], str]] = {
        "processes": (lambda sample: len(sample["processes"]), "number"),
        "zombies": (lambda sample: sum(each[3] == "zombie" for each in sample["processes"]), "number"),
        "etcd: keys": (lambda sample: sum(sample["etcd"]["keys"].values()), "number"),
        "etcd: leases, without lost nodes": (lasting_leases, "number"),
        "etcd: watchers": (lambda sample: sample["etcd"]["watchers"], "number"),
        "etcd: database in use, MiB": (lambda sample: sample["etcd"]["in_use"] / MIB, "database, MiB"),
        "etcd: database, MiB": (lambda sample: sample["etcd"]["database"] / MIB, "database, MiB"),
        "/dev/shm: files": (lambda sample: sum(each[0] for each in sample["shared_memory"].values()), "number"),
        "/dev/shm: bytes": (lambda sample: sum(each[1] for each in sample["shared_memory"].values()), "bytes"),
        "temporary files": (lambda sample: sum(each[0] for each in sample["temporary"].values()), "number"),
    }
    yield "| quantity | usual | at first, at last | growth an hour, second half | bound |"
    yield "|---|---|---|---|---|"
    for name, (of, bound) in quantities.items():
        result = whole(Series(*map(tuple, zip(*((each["at"], of(each)) for each in kept.alive), strict=True))), bound)
        yield f"| {name} | {_cells(result)} |"
        if result.is_leak:
            wrong.append(f"{name} grows by {result.growth:.2f} an hour")


def whole(series: Series, bound: str) -> Trend:
    """Of a quantity that lives as long as the run: by its second half."""
    half = second_half(series)
    usual = median(half.values)
    pairs = slopes(half) if half.span_s >= LEAST_HALF_S else []
    first, last = median(series.values[:5]), median(series.values[-5:])
    growth = median(pairs) if pairs else None
    return Trend(1, series.span_s / 3600, usual, first, last, growth, BOUNDS[bound].of(usual))


def lasting_leases(sample: dict[str, Any]) -> float:
    """Without those of the words on lost nodes, one each: they follow the faults of the last ten minutes.

    One of these that never ended would be seen among the keys.
    """
    told = sample["etcd"]
    granted = told["leases_granted"] - told.get("leases_expired", 0.0) - told.get("leases_revoked", 0.0)
    return float(granted - told["keys"].get("jobs/N/lost/N", 0))


def _cells(result: Trend) -> str:
    growth = "-" if result.growth is None else f"{result.growth:+.2f}{' **leak**' if result.is_leak else ''}"
    return f"{result.usual:.1f} | {result.first:.1f}, {result.last:.1f} | {growth} | {result.bound:.1f}"


# -- the rest ----------------------------------------------------------------------------------------------------------


def _load(kept: Kept) -> str:
    """Of all processes of the soak, as far as samples saw them."""
    last: dict[tuple[int, int], float] = {}
    by_role: Counter[str] = Counter()
    for sample in kept.alive:
        for each in sample["processes"]:
            key = (each[0], each[1])
            if each[3] == "zombie":
                continue  # what it used is not read
            by_role[each[3]] += each[8] - last.get(key, 0.0) if key in last or sample is not kept.alive[0] else 0.0
            last[key] = each[8]
    first, end = kept.alive[0], kept.alive[-1]
    by_role["the soak itself"] = end["own_cpu_s"] - first["own_cpu_s"]
    by_role["undisturbed runs"] = end["undisturbed_cpu_s"] - first["undisturbed_cpu_s"]
    span_s = max(1.0, end["at"] - first["at"])
    parts = ", ".join(f"{role} {100 * used / span_s:.1f}" for role, used in by_role.most_common())
    loads = [sample["load"] for sample in kept.alive]
    return (
        f"Load: {100 * sum(by_role.values()) / span_s:.0f} % of one core ({parts}); of the machine, with all others "
        f"that worked on it: {median(loads):.1f} [{min(loads):.1f} - {max(loads):.1f}]."
    )


def _afterwards(kept: Kept) -> Iterator[str]:
    after = [sample for sample in kept.samples if sample["phase"] == "after"]
    if after:
        last = after[-1]
        roles = Counter(each[3] for each in last["processes"])
        yield "After the jobs were cancelled: " + ", ".join(f"{role} {count}" for role, count in sorted(roles.items()))
        yield "Keys: " + ", ".join(f"{kind} {count}" for kind, count in sorted(last["etcd"]["keys"].items()))
        yield "Temporary files: " + ", ".join(f"{host} {each[0]}" for host, each in last["temporary"].items())


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f} - {max(values):.2f}]" if values else "-"


def _records(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; none if it is not there."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # half a line, which is being written
    return found
