"""What works with which torch and Python, tried one after the other, as a Markdown table.

    python benchmarks/versions.py --python ~/v/t211/bin/python --python ~/v/t215/bin/python --markdown table.md
    python benchmarks/versions.py --python ~/v/t215/bin/python --only demo restart
    python benchmarks/versions.py --python ~/v/t215/bin/python --pytorch-tests 2.15=pytorch/test/distributed
    python benchmarks/versions.py --python ~/v/new/bin/python --python ~/v/before/bin/python --frameworks

Each interpreter is that of a virtualenv with a torch, this package with the extra ``cluster``, and for all but the
first two columns pytest, pytest-timeout, hypothesis and pyte. docs/versions.md says what the columns are. With
``--frameworks`` they are other ones, the slow tests included: each framework that is installed, by its version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from _exit_when_told import exit_when_told
from _report import describe_machine

ROOT = Path(__file__).parent.parent
KILL = "--unicron-chaos=kill:rank=1,step=150"
GONE_ON = re.compile(r"Incident \d+: first step (\d+) ms after the fault")
# What is tried by tests: column, and what pytest is given.
TESTS = {
    "expectations": ("tests/compat/test_expectations.py",),
    "as torchrun": (
        "tests/launcher/test_arguments.py",
        "tests/endtoend/test_same_start.py",
        "tests/endtoend/test_streams_and_arguments.py",
        "tests/endtoend/test_faults.py",
        "tests/endtoend/test_called_from_python.py",
    ),
    "in place": ("tests/training", "tests/endtoend/test_goes_on.py", "tests/endtoend/test_nodes_in_place.py"),
    "nodes over etcd": ("tests/endtoend/test_cluster.py",),
}

# What is tried of frameworks: package, and what pytest is given.
FRAMEWORKS = {
    "transformers": ("tests/transformers", "tests/endtoend/test_trainer_goes_on.py", "tests/endtoend/test_attached.py"),
    "accelerate": ("tests/accelerate", "tests/endtoend/test_accelerate_goes_on.py"),
    "lightning": ("tests/lightning", "tests/endtoend/test_lightning_goes_on.py"),
}


@dataclass
class Cell:
    """What became of one column for one interpreter."""

    text: str
    is_well: bool
    output: str = ""  # of what failed, its end


@dataclass
class Row:
    """All of one interpreter."""

    python: str
    torch: str
    interpreter: str
    cells: dict[str, Cell] = field(default_factory=dict)


class Environment:
    """A virtualenv, by its interpreter."""

    def __init__(self, python: Path, deadline_s: float) -> None:
        self.python = python  # not resolved: a virtualenv's is a link to another folder
        self._deadline_s = deadline_s

    def versions(self) -> tuple[str, str]:
        """Of Python and of torch."""
        code = "import platform, torch; print(platform.python_version(), torch.__version__)"
        found = self._run([self.python, "-W", "ignore", "-c", code]).stdout.split()
        return found[-2], found[-1]

    def version_of(self, package: str) -> str:
        """Of an installed package; "" if it is not."""
        code = f"from importlib import metadata; print(metadata.version('{package}'))"
        return self._run([self.python, "-c", code]).stdout.strip()

    def job(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of ``unicron-run --standalone --nproc-per-node=2 --max-restarts=3``."""
        command = [self.python.with_name("unicron-run"), "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
        done = self._run([*command, *arguments])
        return done.returncode, done.stdout + done.stderr

    def tests(self, paths: Sequence[str], report: Path) -> str:
        """Runs pytest; its output. The counts are in ``report``."""
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *paths]
        done = self._run(command)
        return done.stdout + done.stderr

    def conformance(self, tests: Path) -> tuple[int, str]:
        """Exit code and output of PyTorch's own tests, the quick ones."""
        done = self._run([self.python, ROOT / "tests" / "conformance" / "run.py", tests, "--quick"])
        return done.returncode, done.stdout + done.stderr

    def _run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """In a session of its own, which is ended at the deadline."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("UNICRON_", "PET_"))}
        env.pop("PYTHONPATH", None)
        words = [str(word) for word in command]
        try:
            return subprocess.run(
                ["timeout", "--kill-after=20", str(self._deadline_s), *words],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                errors="replace",
            )
        except OSError as error:
            return subprocess.CompletedProcess(words, 127, "", str(error))


def demo(environment: Environment) -> Cell:
    """README's: rank 1 is killed, and rank 0 goes on in the step in which it was."""
    code, output = environment.job(KILL, "examples/train_gpt_in_place.py", "--steps", "200")
    found = GONE_ON.search(output)
    is_well = code == 0 and found is not None and "joins the others: 2 ranks." in output and "Traceback" not in output
    return Cell(f"{found[1]} ms" if is_well and found else "failed", is_well, "" if is_well else output[-3000:])


def restart(environment: Environment) -> Cell:
    """A script that knows nothing of us: all restart, from their checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--checkpoint-dir", folder, "--steps", "200"]
        code, output = environment.job(KILL, "examples/train_gpt.py", *arguments)
    found = GONE_ON.search(output)
    is_well = code == 0 and found is not None and "Restart 1 of 3" in output and "done: step 200" in output
    return Cell(f"{found[1]} ms" if is_well and found else "failed", is_well, "" if is_well else output[-3000:])


def tested(environment: Environment, paths: Sequence[str]) -> Cell:
    """How many tests passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        output = environment.tests(paths, report)
        if not report.exists():
            return Cell("did not end", False, output[-3000:])
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    told = ((passed, "passed"), (failed, "failed"), (counts["skipped"], "skipped"))
    text = ", ".join(f"{count} {word}" for count, word in told if count)
    return Cell(text or "nothing ran", failed == 0 and passed > 0, output[-6000:] if failed else "")


def conformed(environment: Environment, tests: Mapping[str, Path]) -> Cell:
    """PyTorch's own tests of this torch: those that pass against torch have to pass here."""
    minor = ".".join(environment.versions()[1].split(".")[:2])
    if minor not in tests:
        return Cell("not at hand", True)
    code, output = environment.conformance(tests[minor])
    return Cell("as torch", True) if code == 0 else Cell("failed", False, output[-3000:])


def of_framework(environment: Environment, package: str, paths: Sequence[str]) -> Cell:
    """The version of a framework, and how many of its tests passed, slow ones as well."""
    version = environment.version_of(package)
    if not version:
        return Cell("not installed", True)
    cell = tested(environment, ["-m", "slow or not slow", *paths])
    return Cell(f"{version}: {cell.text}", cell.is_well, cell.output)


def columns(args: argparse.Namespace) -> dict[str, Callable[[Environment], Cell]]:
    """What is tried, by the column's name."""
    if args.frameworks:
        return {name: partial(of_framework, package=name, paths=paths) for name, paths in FRAMEWORKS.items()}
    pytorch_tests: Mapping[str, Path] = dict(args.pytorch_tests)
    found: dict[str, Callable[[Environment], Cell]] = {"demo": demo, "restart": restart}
    found |= {name: partial(tested, paths=paths) for name, paths in TESTS.items()}
    return {**found, "PyTorch's tests": partial(conformed, tests=pytorch_tests)} if pytorch_tests else found


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each interpreter."""
    names = list(rows[0].cells)
    lines = [f"| torch | Python | {' | '.join(names)} |", "|" + "---|" * (len(names) + 2)]
    for row in rows:
        lines.append(f"| {row.torch} | {row.python} | {' | '.join(row.cells[name].text for name in names)} |")
    return "\n".join(lines)


def main() -> int:
    """Try everything, print the table, and write files if they are wanted; 1 if anything failed."""
    exit_when_told()
    args = parse_arguments()
    rows: list[Row] = []
    machine = describe_machine()
    for python in args.python:
        environment = Environment(python, args.deadline)
        version, torch = environment.versions()
        row = Row(version, torch, str(python))
        rows.append(row)
        for name, run in columns(args).items():
            if args.only and name not in args.only:
                continue
            began = time.monotonic()
            row.cells[name] = cell = run(environment)
            say(f"torch {torch}, Python {version}: {name}: {cell.text} ({time.monotonic() - began:.0f} s)")
            if cell.output:
                say(cell.output)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine, "rows": [asdict(each) for each in rows]}, indent=1))
    text = table(rows)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(text, flush=True)
    return 0 if all(cell.is_well for row in rows for cell in row.cells.values()) else 1


def say(line: str) -> None:
    """Of progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, action="append", required=True, help="an interpreter; may be repeated")
    parser.add_argument("--only", nargs="+", help="these columns")
    parser.add_argument("--frameworks", action="store_true", help="try frameworks")
    parser.add_argument(
        "--pytorch-tests",
        type=_of_version,
        action="append",
        default=[],
        metavar="VERSION=FOLDER",
        help="test/distributed of a PyTorch checkout of that version, 2.15 say; may be repeated",
    )
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for a column of one interpreter")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _of_version(text: str) -> tuple[str, Path]:
    version, _, folder = text.partition("=")
    return version, Path(folder)


if __name__ == "__main__":
    sys.exit(main())
