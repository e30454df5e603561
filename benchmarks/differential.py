"""Looks for what differs: plain torch beside ``unicron_elastic.Run``, over models, loops, ranks and faults, at random.

    python benchmarks/differential.py --minutes 60 --seed 1 --report docs/differential.md
    python benchmarks/differential.py --seed 1 --case 17          # one of them again
    python benchmarks/differential.py --json '{"loop": "epochs"}' # one of your own

Exits with 1 if there are findings, and prints for each the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from differential.case import Case
from differential.draw import draw
from differential.known import known_faults
from differential.report import Result, write_report
from differential.trial import Trials


def main() -> int:
    """All cases that are asked for."""
    asked = _parse()
    results: list[Result] = []
    end = time.monotonic() + asked.minutes * 60 if asked.minutes else None
    started = time.time()
    with Trials(keep=asked.keep) as trials:
        for name, case in _cases(asked):
            results.append(trials.result(name, case, repeat=asked.repeat))
            print(results[-1].line(), flush=True)
            for problem in results[-1].problems:
                print(f"      {problem}", flush=True)
            if asked.report:  # each time, for whoever ends it
                write_report(asked.report, results, asked, time.time() - started)
            if end is not None and time.monotonic() > end:
                break
    bad = [each for each in results if each.problems]
    print(f"{len(results)} cases, {len(bad)} with findings, in {time.time() - started:.0f} s")
    for each in bad:
        print(f"{each.command}\n    {each.case.to_json()}\n    " + "\n    ".join(each.problems))
    return 1 if bad else 0


def _cases(asked: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    if asked.json:
        yield f"--json '{asked.json}'", Case.from_json(asked.json)
        return
    if asked.known:
        yield from ((f"--json '{each}'", Case.from_json(each)) for each in known_faults())
        return
    number = asked.first if asked.case is None else asked.case
    while asked.case is None or number == asked.case:
        yield f"--seed {asked.seed} --case {number}", draw(asked.seed, number, with_nodes=not asked.one_host)
        number += 1
        if asked.cases and number >= asked.first + asked.cases:
            return


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--json", help="only this one, as it is printed with a finding")
    parser.add_argument("--known", action="store_true", help="those in which a commit of the past has been found wrong")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=0, help="how many; without it and --minutes: ten")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no case after that")
    parser.add_argument("--one-host", action="store_true", help="no cases with nodes, which need an etcd")
    parser.add_argument("--repeat", type=int, default=1, help="how often a case with a finding is tried again")
    parser.add_argument("--keep", type=Path, help="a folder for all that cases with findings have left")
    parser.add_argument("--report", type=Path, help="a page about it, in Markdown")
    asked = parser.parse_args()
    if not asked.minutes and not asked.cases:
        asked.cases = 10
    return asked


if __name__ == "__main__":
    sys.exit(main())
