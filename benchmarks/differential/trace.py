"""At which step a rank first departs, and in what: learning rates from plain torch's, and all state from others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from differential.case import Case
from differential.launch import Launched, Log
from differential.reference import Came

__all__ = ["departures"]

RATE_TOLERANCE = 1e-6


def departures(case: Case, launched: Launched, plain: Came, alone: Came | None, *, is_one_run: bool) -> Iterator[str]:
    """One for each rank and for each that it is compared with."""
    for log in launched.logs:
        yield from _rates(log, plain)
        if case.reproducible and alone is not None and not alone.error:
            yield from _state(log, alone.spans, "a run in one process")
    ended = [log for log in launched.logs if log.of("end")]
    if is_one_run:
        for log in ended[1:]:
            yield from _state(log, {line["step"]: line["digests"] for line in ended[0].of("span")}, ended[0].place)
    for log in launched.logs:
        for line in log.of("meant"):
            if line["value"] != line["wanted"]:
                found, wanted = line["value"], line["wanted"]
                yield f"wrong report: run.mean of {line['name']} at {log.place}: {found} and not {wanted}"
                break


def _rates(log: Log, plain: Came) -> Iterator[str]:
    for line in log.of("span"):
        wanted, found = plain.rates.get(line["step"]), line["rates"]
        if wanted is not None and not all(
            abs(one - other) <= RATE_TOLERANCE * abs(other) for one, other in zip(found, wanted, strict=True)
        ):
            yield f"departs: {log.place} at step {line['step']} in learning rates: {found} and not {wanted}"
            return


def _state(log: Log, known: Mapping[int, Mapping[str, str]], whose: str) -> Iterator[str]:
    for line in log.of("span"):
        wanted = known.get(line["step"], line["digests"])
        names = sorted(name for name in {**wanted, **line["digests"]} if wanted.get(name) != line["digests"].get(name))
        if names:
            yield f"departs: {log.place} at step {line['step']} from {whose} in {', '.join(names)}"
            return
