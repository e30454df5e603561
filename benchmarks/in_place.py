"""What tier 2 makes of every fault at every moment of a step, as a Markdown table.

    python benchmarks/in_place.py --quick                      # a selection; about three minutes
    python benchmarks/in_place.py --markdown table.md          # everything, once
    python benchmarks/in_place.py --quick --over late          # where results land late, and aborts are silent
    python benchmarks/in_place.py --kinds kill --phases reduce-last --ranks 3 --modes reproducible --repeat 20

Each case is one launch of a small deterministic job that is struck in mid-step. It has passed if the job ends well, its
losses and parameters are those of an undisturbed run, no survivor was started anew, and no more was computed again
than what was lost. docs/benchmark-in-place.md says all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from _exit_when_told import exit_when_told
from _in_place_cases import KINDS, MODES, OVER, PHASES, RANKS, SPECIAL, Case, cases, quick
from _in_place_job import run, say
from _in_place_report import Done, summary, table, to_json
from _in_place_verdict import Reference, judge, reference_of
from _recovery_job import adopt_orphans, sweep
from _report import describe_machine


class References:
    """The undisturbed runs, over gloo, each made when it is needed first."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._known: dict[tuple[str, int], Reference] = {}

    def of(self, mode: str, ranks: int) -> Reference:
        """Raises ValueError if it does not end well, or if a reproducible one depends on the number of ranks."""
        if (mode, ranks) in self._known:
            return self._known[mode, ranks]
        case = Case(kind="-", phase="-", ranks=ranks, mode=mode, repetition=0)
        outcome, folder = run(case, self._deadline_s)
        try:
            found = reference_of(outcome.logs, outcome.exit_codes)
        except ValueError as error:
            raise ValueError("\n".join([*outcome.last_lines, str(error)])) from None
        finally:
            shutil.rmtree(folder)
        if mode == "reproducible" and ranks > 1:
            alone = self.of(mode, 1)
            if (alone.losses, alone.log.end) != (found.losses, found.log.end):
                raise ValueError(f"reproducible mode is not bitwise the same on {ranks} ranks as on 1")
        self._known[mode, ranks] = found
        return found


def main() -> int:
    """Run all cases, print the table, and write files if they are wanted; 1 if a case failed."""
    args = parse_arguments()
    # Without these, a termination would skip the clean-up of the launch in progress.
    exit_when_told()
    adopt_orphans()
    sweep()
    machine = describe_machine()
    say(str(machine))
    references = References(args.deadline)
    done: list[Done] = []
    for case in _chosen(args):
        done.append(_run(case, references, args.deadline))
        say(_line(done[-1]))
        if args.json:
            data = {"machine": {**machine, "load_average_after": os.getloadavg()}, "cases": to_json(done)}
            args.json.write_text(json.dumps(data, indent=1, default=str) + "\n")
    text = f"{table(done)}\n\n{summary(done)}"
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(text)
    return 0 if all(each.passed for each in done) else 1


def _chosen(args: argparse.Namespace) -> Iterator[Case]:
    for over in args.over:
        some = quick() if args.quick else cases(args.kinds, args.phases, args.ranks, args.modes, args.repeat)
        yield from (replace(case, over=over) for case in some)


def _run(case: Case, references: References, deadline_s: float) -> Done:
    reference = references.of(case.mode, case.ranks)
    began = time.monotonic()
    outcome, folder = run(case, deadline_s)
    verdict = judge(case, outcome.logs, outcome.records, outcome.exit_codes, reference)
    done = Done(case, verdict, {"wall_s": round(time.monotonic() - began, 1)})
    if done.passed:
        shutil.rmtree(folder)
    else:
        done.notes |= {"kept": str(folder), "last_lines": outcome.last_lines}
    return done


def _line(done: Done) -> str:
    """About a case that was run; of one that failed also the last lines of its job."""
    verdict = done.verdict
    words = [*map(str, done.case.group), done.case.over, f"#{done.case.repetition}"]
    times = (verdict.survivors_step_ms, verdict.newcomer_steps_ms)
    words += ["-" if each is None else f"{each:.0f} ms" for each in times]
    words += [f"{verdict.recomputed} recomputed", f"{done.notes['wall_s']} s"]
    text = "  ".join(words)
    if done.passed:
        return text
    last = "\n".join(f"    {line}" for line in done.notes["last_lines"])
    return f"{text}  FAILED: {'; '.join(verdict.problems)}\n{last}\n    kept: {done.notes['kept']}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    every = [*PHASES, *SPECIAL]
    parser = argparse.ArgumentParser(description="Every fault at every moment of a step, under tier 2.")
    parser.add_argument(
        "--quick", action="store_true", help="a selection, about three minutes; of what follows only --over counts"
    )
    parser.add_argument("--over", nargs="+", choices=OVER, default=["gloo"], help="the back ends (default: gloo)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(default: all)")
    parser.add_argument("--phases", nargs="+", choices=every, default=every, help="(default: all)")
    parser.add_argument(
        "--ranks", nargs="+", type=int, choices=RANKS, help="(default: all for kills; other faults take turns)"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: both)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="of each case (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for a launch (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all records there")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error(f"--repeat must be 1 or more, not {args.repeat}")
    return args


if __name__ == "__main__":
    sys.exit(main())
