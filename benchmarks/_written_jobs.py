"""Jobs whose workers write down what they do (``workers/written_log.py``): one is run, and what it says is measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _launchers import Launcher
from _report import Spread

DEADLINE_S = 300.0
POLL_S = 0.1
WARM_UP = 5  # steps that do not count


Lines = list[dict[str, Any]]


def written(
    launcher: Launcher,
    ranks: int,
    worker: Path,
    arguments: Iterable[str],
    until: Callable[[Path, Lines], bool] | None = None,
) -> Lines:
    """Return what all processes of a job have written down, in order; a job that fails ends the benchmark.

    With ``until`` it is told to end once that is true of what they have written, in that folder. What the job says is
    there in ``said``.
    """
    with tempfile.TemporaryDirectory(prefix="unicron-written-") as folder:
        command = [str(launcher.path), "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        command += [str(worker), *arguments, f"--written={folder}"]
        environ = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1"}
        said = Path(folder) / "said"
        with said.open("w") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=out) as launch:
            is_told = _wait(launch, until and (lambda: until(Path(folder), _lines(folder))))
        if launch.returncode and not is_told:
            tail = said.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{' '.join(command)} ended with {launch.returncode}:\n{tail}")
        return _lines(folder)


def _wait(launch: subprocess.Popen[bytes], is_enough: Callable[[], bool] | None) -> bool:
    """Wait for the end; whether it was told to end."""
    deadline, is_told = time.monotonic() + DEADLINE_S, False
    try:
        while launch.poll() is None:
            if time.monotonic() > deadline:
                sys.exit(f"{' '.join(map(str, launch.args))} did not end in {DEADLINE_S:g} s")  # type: ignore[arg-type]
            if not is_told and is_enough is not None and is_enough():
                is_told = True
                launch.terminate()
            time.sleep(POLL_S)
    finally:
        launch.kill()
    return is_told


def _lines(folder: str) -> Lines:
    found: Lines = []
    for path in Path(folder).glob("*.jsonl"):
        rank = int(path.name.partition("-")[0])
        whole = path.read_text().rpartition("\n")[0]  # the last one may be being written
        found += ({**json.loads(line), "rank": rank} for line in whole.splitlines())
    return sorted(found, key=lambda each: each["at"])


def undisturbed_ms(lines: Lines, first: int = WARM_UP, end: int | None = None) -> float:
    """Return what a step takes, of those from ``first`` to before ``end`` that were made before a rank was killed."""
    killed_at = next((each["at"] for each in lines if each["what"] == "killed"), float("inf"))
    steps = [each for each in lines if each["what"] == "step" and each["at"] < killed_at and each["step"] >= first]
    return 1e3 * statistics.median(each["took_s"] for each in steps if end is None or each["step"] < end)


def have_reached(lines: Lines, ranks: int) -> bool:
    """Return whether all ranks have made the step in which one was killed, or a later one, since then."""
    return len({each["rank"] for each in _reached(lines)}) == ranks


def losses_ms(lines: Lines) -> tuple[float, float]:
    """Return how long after the kill rank 0, and who takes the killed one's place, had made the step or a later one."""
    killed = next(each for each in lines if each["what"] == "killed")
    reached = _reached(lines)
    others, again = (min(each["at"] for each in reached if each["rank"] == rank) for rank in (0, killed["rank"]))
    return 1e3 * (others - killed["at"]), 1e3 * (again - killed["at"])


def _reached(lines: Lines) -> Lines:
    """Return the steps that were made after the kill, from the one on in which it was."""
    if (killed := next((each for each in lines if each["what"] == "killed"), None)) is None:
        return []
    steps = [each for each in lines if each["what"] == "step" and each["step"] >= killed["step"]]
    return [each for each in steps if each["at"] > killed["at"]]


def shown(values: list[float], digits: int = 0) -> str:
    """Return median and spread, as in the tables."""
    spread = Spread.of(values)
    assert spread is not None
    return f"{spread.median:.{digits}f} [{spread.minimum:.{digits}f} - {spread.maximum:.{digits}f}]"
