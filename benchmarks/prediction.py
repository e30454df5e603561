"""Does the simulator predict a live run? Its ledgers are simulated, and lost time is compared, fault by fault.

    python benchmarks/prediction.py                          # three runs: eight minutes
    python benchmarks/prediction.py --keep runs              # the same, and keep them
    python benchmarks/prediction.py --again runs             # compare kept ones anew: seconds

A live run is a cluster on this machine: etcd, four agents that stand for hosts, two jobs of examples/two_jobs that
train with simulated device time. After an undisturbed beginning come eight faults in an order that a seed says:
processes are killed, or raise; hosts are killed and started again ten seconds later. Then the run's incident ledgers
are a history, its beginning says how fast the jobs are, and the *other* runs how long things take on this machine:
nothing is fitted on the faults that are predicted. "Lost" is the WAF that is missing from one fault to the next,
counted from the steps that the training processes wrote down, in seconds of the undisturbed cluster; predicted over
the same seconds, in the mean over simulations with 50 seeds (how far a step was when its fault came is chance).
"By documented durations" is predicted by figures of the documentation alone. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from _exit_when_told import exit_when_told
from _prediction_live import Struck, live
from _prediction_model import DOCUMENTED, Calibration, Kept, Prediction, calibrate, faults_of, predict
from _report import describe_machine

from unicron_elastic.simulation.history.events import MeasuredFault

QUIET_S = 6.0  # before a fault, when all train: how much the rate there differs from that of the beginning is noise
WHAT = {"kill": "SIGKILL", "raise": "raises", "lose": "host lost"}


@dataclass(frozen=True)
class Compared:
    """One fault: what it cost by measurement and by prediction, in seconds of the undisturbed cluster."""

    kind: str
    measured_s: float
    predicted_s: float

    @property
    def error_s(self) -> float:
        return self.predicted_s - self.measured_s


def lines(runs: Sequence[Kept]) -> Iterator[str]:
    """All tables."""
    yield ", ".join(f"{what}: {value}" for what, value in describe_machine().items())
    found: list[list[Compared]] = []
    blind: list[list[Compared]] = []
    for place, kept in enumerate(runs):
        calibration = calibrate(run for number, run in enumerate(runs) if number != place)
        prediction = predict(kept, calibration)
        yield from ("", f"Seed {kept.record.seed}: {_told(calibration)}", "")
        found.append(compared(kept, prediction))
        blind.append(compared(kept, predict(kept, DOCUMENTED)))
        yield from _table(kept, prediction, found[-1])
    yield ""
    yield "| run | length, s | lost, measured, s | predicted, s | error | by documented durations | quiet / beginning |"
    yield "|---|---|---|---|---|---|---|"
    for kept, faults, others in zip(runs, found, blind, strict=True):
        quiet = _quiet(kept)
        noise = f"{median(quiet):.3f} [{min(quiet):.3f} - {max(quiet):.3f}]"
        length_s = kept.record.ended_at - kept.record.began_at
        yield f"| seed {kept.record.seed} | {length_s:.0f} | {_total(faults)} | {_error(others)} | {noise} |"
    every, all_others = ([fault for faults in each for fault in faults] for each in (found, blind))
    yield f"| all | | {_total(every)} | {_error(all_others)} | |"
    yield ""
    yield "| fault | number | lost, measured, s: median [least - greatest] | predicted, s | error of one, s |"
    yield "|---|---|---|---|---|"
    for kind, what in WHAT.items():
        of_kind = [fault for fault in every if fault.kind == kind]
        columns = [[getattr(fault, name) for fault in of_kind] for name in ("measured_s", "predicted_s", "error_s")]
        yield f"| {what} | {len(of_kind)} | {' | '.join(map(_spread, columns))} |"


def compared(kept: Kept, prediction: Prediction) -> list[Compared]:
    """Every fault of a run: all that is missing from it to the next."""
    full, began = kept.full_waf(), kept.record.began_at
    return [
        Compared(
            kind=struck.kind,
            measured_s=end - begin - kept.waf(begin, end) / full,
            predicted_s=prediction.lost_s(begin - began, end - began),
        )
        for struck, (begin, end) in zip(kept.record.struck, pairwise(kept.edges), strict=True)
    ]


def _total(faults: Sequence[Compared]) -> str:
    measured, predicted = sum(fault.measured_s for fault in faults), sum(fault.predicted_s for fault in faults)
    return f"{measured:.1f} | {predicted:.1f} | {_error(faults)}"


def _error(faults: Sequence[Compared]) -> str:
    error = sum(fault.error_s for fault in faults)
    return f"{error:+.1f} s, {error / sum(fault.measured_s for fault in faults):+.0%}"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f} - {max(values):.2f}]" if values else "-"


def _told(calibration: Calibration) -> str:
    durations = ", ".join(f"{name} {value:.3f}" for name, value in calibration.durations.items())
    notices = ", ".join(f"{method} {value * 1e3:.1f} ms" for method, value in calibration.notices_s.items())
    return (
        f"durations of {calibration.faults} faults of other runs: {durations}; noticed by {notices}; "
        f"a started host is there after {calibration.back_s:.2f} s"
    )


def _table(kept: Kept, prediction: Prediction, costs: Sequence[Compared]) -> Iterator[str]:
    """A line for each fault, measured / predicted."""
    yield "| at, s | fault | noticed, s | then until the ledger's first step, s | lost, s | error, s |"
    yield "|---|---|---|---|---|---|"
    began, faults = kept.record.began_at, faults_of(prediction.history, kept)
    for struck, fault, cost in zip(kept.record.struck, faults, costs, strict=True):
        noticed = then = "not in the ledger"
        if fault is not None and fault.measured is not None:
            noticed = _both(fault.measured.noticed_s, prediction.phase_s(fault.at_s, "detection"), 3)
            then = _both(_until_step(fault.measured), _simulated_step(struck, fault.at_s, prediction), 2)
        where = _where(struck, "" if fault is None else prediction.job(fault.at_s))
        cells = [f"{struck.at - began:.1f}", f"{WHAT[struck.kind]}, {where}", noticed, then]
        cells += [_both(cost.measured_s, cost.predicted_s, 2), f"{cost.error_s:+.2f}"]
        yield f"| {' | '.join(cells)} |"


def _where(struck: Struck, simulated: str) -> str:
    elsewhere = f" (simulated: {simulated or 'idle'})" if simulated != struck.job else ""
    return f"{struck.job} on {struck.host}{elsewhere}"


def _simulated_step(struck: Struck, at_s: float, prediction: Prediction) -> float | None:
    """As in the ledger: that of survivors for a lost host, else that of the process in the place of the struck one.

    Each host has one process here, so its launcher sees no other process of the job go on.
    """
    phases = [prediction.phase_s(at_s, name) for name in ("transition", "sub_healthy")]
    return phases[0] if struck.kind == "lose" else sum(phase or 0.0 for phase in phases)


def _until_step(measured: MeasuredFault) -> float | None:
    phases = (measured.stopped_s, measured.regrouped_s, measured.first_step_s)
    return None if measured.first_step_s is None else sum(phase or 0.0 for phase in phases)


def _both(measured: float | None, predicted: float | None, digits: int) -> str:
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in (measured, predicted))


def _quiet(kept: Kept) -> list[float]:
    """WAF of the seconds before each fault but the first, relative to that of the beginning."""
    full = kept.full_waf()
    return [kept.waf(at - QUIET_S, at) / QUIET_S / full for at in kept.edges[1:]]


def main() -> None:
    """Run, or read, and print."""
    exit_when_told()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1,3,4", help="of the live runs; two or more")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--again", type=Path, help="a folder in which runs were kept: nothing is run")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if len(seeds) < 2:
        parser.error("two seeds at least: what is predicted is not what durations are measured on")
    with tempfile.TemporaryDirectory(prefix="unicron-prediction-") as temporary:
        top = args.again or args.keep or Path(temporary)
        for seed in seeds if args.again is None else ():
            print(f"seed {seed}", file=sys.stderr, flush=True)
            live((top / f"seed-{seed}").resolve(), seed)
        for line in lines([Kept.read(top / f"seed-{seed}") for seed in seeds]):
            print(line)


if __name__ == "__main__":
    main()
