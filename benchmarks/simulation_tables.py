"""Prints the tables of docs/simulation.md from the JSON that `unicron simulate --json` wrote.

unicron simulate trace-b --seeds 20 --json trace-b.json --plots docs/figures --csv trace-b.csv
python benchmarks/simulation_tables.py trace-b.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PHASES = ("detection", "transition", "sub_healthy", "overhead")


def spread(value: dict[str, float | None], scale: float, digits: int) -> str:
    """The mean, and half of its interval."""
    mean, low, high = value["mean"], value["low"], value["high"]
    assert mean is not None
    half = "" if low is None or high is None else f" ± {(high - low) / 2 * scale:.{digits}f}"
    return f"{mean * scale:.{digits}f}{half}"


def rows(study: dict[str, Any]) -> list[str]:
    """A Markdown table of one study, the policy with the most WAF first."""
    baseline = study["baseline"]
    found = [
        f"| policy | of ideal, % | of {baseline} | effective, % | detection | transition | sub-healthy | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in sorted(study["policies"], key=lambda each: -each["summary"]["waf"]["mean"]):
        summary = each["summary"]
        ratio = "" if summary["of_baseline"] is None else spread(summary["of_baseline"], 1, 3)
        lost = " | ".join(f"{summary['lost_gpu_h'][phase]['mean']:,.0f}" for phase in PHASES)
        ideal, effective = (spread(summary[name], 100, 1) for name in ("of_ideal", "effective_ratio"))
        found.append(f"| {each['policy']} | {ideal} | {ratio} | {effective} | {lost} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path, metavar="JSON", help="what unicron simulate --json wrote")
    for path in parser.parse_args().studies:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text)
        for study in loaded if isinstance(loaded, list) else [loaded]:
            print(f"{study['scenario']}, {len(study['policies'][0]['seeds'])} seeds; {study['history']}\n")
            print("\n".join(rows(study)) + "\n")


if __name__ == "__main__":
    main()
