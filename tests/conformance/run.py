"""Runs PyTorch's own tests of its launcher and elastic agent, against torch and against this project.

The test files come from a PyTorch checkout. They are copied to a temporary folder, and for this project only what they
import, and what they mock by name, is rewritten. A test that passes against torch and not against this project is a
regression, and the exit status says whether there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILES = (
    "launcher/test_run.py",
    "launcher/api_test.py",
    "launcher/launch_test.py",
    "elastic/agent/server/test/api_test.py",
    "elastic/agent/server/test/local_elastic_agent_test.py",
    "elastic/agent/server/test/shutdown_timeout_test.py",
)

QUICK = ("launcher/test_run.py", "launcher/api_test.py", "elastic/agent/server/test/shutdown_timeout_test.py")

# What changes whichever side is tested: without an etcd program, c10d is the rendezvous of the tests that are not about
# etcd and only happen to use it (plugin.py sees to their endpoint).
COMMON = (('rdzv_backend: str = "etcd"', 'rdzv_backend: str = "c10d"'),)

# The swap: imports, and the paths by which tests mock what is imported. The other paths they mock lead to torch modules
# that this project calls, too, so a mock there is met by both.
SWAP = (
    ("import torch.distributed.run as launch", "import unicron_elastic.launcher.main as launch"),
    ("from torch.distributed.launcher.api import", "from unicron_elastic.launcher.api import"),
    ('"torch.distributed.launcher.api.LocalElasticAgent', '"unicron_elastic.launcher.api.LocalElasticAgent'),
    (
        '"torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent',
        '"unicron_elastic.launcher.agent.core.agent.Agent',
    ),
    (
        '"torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler"',
        '"unicron_elastic.launcher.api.rendezvous_handler"',
    ),
)
# Single names: a file that imports the one on the left from torch gets the one on the right under the same name.
NAMES = (
    (
        ("torch.distributed.elastic.agent.server.local_elastic_agent", "LocalElasticAgent"),
        ("unicron_elastic.launcher.agent.core.agent", "Agent"),
    ),
)

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
SIDES = ("torch", "unicron")
PLUGIN = Path(__file__).with_name("plugin.py")
STALL_FACTOR = 2  # how many per-test limits without any report before pytest itself is taken for stuck
EXIT_S = 5.0  # what pytest gets to exit after its last test


@dataclass
class Outcome:
    """What became of one test."""

    outcome: str
    seconds: float
    reason: str = ""


Results = dict[str, Outcome]


def rewrite(text: str, side: str) -> str:
    """The test file as it is run against `side`."""
    for old, new in COMMON:
        text = text.replace(old, new)
    return swap(text) if side == "unicron" else text


def swap(text: str) -> str:
    """The test file with this project's modules in place of torch's."""
    for old, new in SWAP:
        text = text.replace(old, new)
    for (module, name), (our_module, our_name) in NAMES:
        statement = re.compile(rf"^from {re.escape(module)} import (\([^)]*\)|.*)$", re.MULTILINE)
        for match in reversed(list(statement.finditer(text))):
            if re.search(rf"\b{name}\b", match[1]):
                rebound = f"\nfrom {our_module} import {our_name} as {name}"
                text = text[: match.end()] + rebound + text[match.end() :]
    return text


def is_swapped(source: Path) -> bool:
    """Whether the swap changes the file at all: if not, it tests nothing of this project."""
    text = source.read_text()
    return swap(text) != text


class Suite:
    """A temporary copy of the test files, as they are run against one side."""

    def __init__(self, tests: Path, side: str, folder: Path, is_verbose: bool) -> None:
        self._folder = folder
        self._is_verbose = is_verbose
        for source in tests.iterdir():
            if source.name in ("launcher", "elastic"):
                shutil.copytree(source, folder / source.name)
        shutil.copy(PLUGIN, folder / "conftest.py")
        for path in [*folder.glob("launcher/**/*.py"), *folder.glob("elastic/agent/**/*.py")]:
            path.write_text(rewrite(path.read_text(), side))

    def run(self, file: str, expression: str, limit_s: float) -> Results:
        """Runs one file; a test that takes pytest down with it has failed, and the others are run without it."""
        results: Results = {}
        while (stuck := self._run_once(file, expression, limit_s, results)) is not None:
            results[stuck] = Outcome(FAILED, 0.0, "pytest died or got stuck here")
            if stuck == file:  # outside of any test: the file cannot even be imported
                break
        return results

    def _run_once(self, file: str, expression: str, limit_s: float, results: Results) -> str | None:
        """One run of pytest over what has no result yet. Returns where it got stuck: a test, the file, or nowhere."""
        journal = self._folder / "journal"
        journal.write_text("")
        command = [sys.executable, "-m", "pytest", file, "-q", "--tb=short", "-k", expression, "-p", "no:cacheprovider"]
        command += [f"--rootdir={self._folder}", f"--timeout={limit_s}", "--timeout-method=signal"]
        command += [f"--deselect={test}" for test in results]
        scratch = self._folder / "tmp"  # torchrun leaves its log folders behind
        scratch.mkdir(exist_ok=True)
        env = {**os.environ, "CONFORMANCE_JOURNAL": str(journal), "TMPDIR": str(scratch)}
        output = None if self._is_verbose else subprocess.DEVNULL
        pytest = subprocess.Popen(
            command, cwd=self._folder, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            self._wait(pytest, journal, limit_s * STALL_FACTOR)
        finally:
            kill_group(pytest)
        stuck: str | None = file
        for entry in entries(journal):
            stuck = entry["at"]
            if "outcome" in entry:
                results[entry["test"]] = Outcome(entry["outcome"], entry["seconds"], entry["reason"])
        return stuck

    def _wait(self, pytest: subprocess.Popen[bytes], journal: Path, stall_s: float) -> None:
        """Waits for pytest's end, or until it has reported nothing for too long; a process that hangs at its exit is
        not waited for."""
        size, changed = 0, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(EXIT_S)
                return
            now = time.monotonic()
            if journal.stat().st_size != size:
                size, changed = journal.stat().st_size, now
            ended = any(entry["at"] is None for entry in entries(journal))
            if ended or now - changed > stall_s:
                return


def entries(journal: Path) -> Iterator[dict[str, Any]]:
    """What plugin.py wrote, when a test started, ended, and at the end of all: each line says where pytest is."""
    for line in journal.read_text().splitlines():
        yield json.loads(line)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and the processes its tests left in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counts(results: Results) -> str:
    """Results as one cell of the table."""
    tally = Counter(outcome.outcome for outcome in results.values())
    return f"{tally[PASSED]:>6} {tally[FAILED]:>6} {tally[SKIPPED]:>7}"


def table(sides: dict[str, dict[str, Results]], files: Iterable[str]) -> str:
    """File x passed, failed, skipped, for each side that was run."""
    heading = "".join(f" | {side:<8}passed failed skipped" for side in sides)
    lines = [f"{'file':<56}{heading}"]
    for file in files:
        cells = [counts(run[file]) if file in run else "not swapped".rjust(21) for run in sides.values()]
        lines.append(f"{file:<56}" + "".join(f" | {'':<8}{cell}" for cell in cells))
    return "\n".join(lines)


def regressions(sides: dict[str, dict[str, Results]]) -> list[str]:
    """The tests that pass against torch and not against this project."""
    if len(sides) < len(SIDES):
        return []
    theirs, ours = (sides[side] for side in SIDES)
    return [
        test
        for file in ours
        for test, outcome in theirs[file].items()
        if outcome.outcome == PASSED and (test not in ours[file] or ours[file][test].outcome != PASSED)
    ]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tests", type=Path, metavar="PYTORCH_TEST_DIR", help="test/distributed of a PyTorch checkout")
    parser.add_argument("--against", choices=[*SIDES, "both"], default="both", help="which launcher (default: both)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every test's outcome and time there")
    parser.add_argument("-k", default="not etcd", metavar="EXPR", help="which tests, as in pytest (default: not etcd)")
    parser.add_argument("--quick", action="store_true", help="only the files that take a minute or two")
    parser.add_argument("--timeout", type=float, default=100.0, metavar="S", help="limit for one test (default: 100)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what pytest prints")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the suite, prints the table, and returns 1 if there was a regression, 2 if there was nothing to run."""
    args = parse_args(argv)
    files = [file for file in (QUICK if args.quick else FILES) if (args.tests / file).is_file()]
    if not files:
        print(f"{args.tests} has none of {', '.join(FILES)}", file=sys.stderr)
        return 2
    sides: dict[str, dict[str, Results]] = {}
    for side in SIDES if args.against == "both" else (args.against,):
        sides[side] = {}
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            suite = Suite(args.tests, side, Path(folder), args.verbose)
            for file in files:
                if side == "torch" or is_swapped(args.tests / file):
                    sides[side][file] = suite.run(file, args.k, args.timeout)
                    print(f"{side}: {file}: {len(sides[side][file])} tests", file=sys.stderr, flush=True)

    print(table(sides, files))
    for side, run in sides.items():
        for results in run.values():
            for test, outcome in results.items():
                if outcome.outcome == FAILED:
                    print(f"{side} failed {test} ({outcome.seconds:.0f} s): {outcome.reason}")
    worse = regressions(sides)
    for test in worse:
        print(f"REGRESSION {test}")
    if args.json:
        document = {
            side: {file: {test: asdict(outcome) for test, outcome in results.items()} for file, results in run.items()}
            for side, run in sides.items()
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if not any(results for run in sides.values() for results in run.values()):
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
