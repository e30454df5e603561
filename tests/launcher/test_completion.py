"""What a shell completes, by the script that ``unicron completion`` prints."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from unicron_elastic.launcher.cli import app

BASH = shutil.which("bash")
# As bash calls it: the words of the line, and that the cursor is at the end of the last.
TRY = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
if [[ $1 == unicron ]]; then _unicron; else _unicron_run; fi
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    result = CliRunner().invoke(app, ["completion", "bash"])
    assert result.exit_code == 0
    return str(result.stdout)


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["unicron", "inc"], ["incidents"]),
        (["unicron", "chaos", "k"], ["kill"]),
        (["unicron", "chaos", "kill", "--r"], ["--rank", "--run-id"]),
        (["unicron", "incidents", "--al"], ["--all"]),
        (["unicron", "completion", ""], ["bash", "zsh"]),
        (["unicron-run", "--unicron-wa"], ["--unicron-warm", "--unicron-warm-for-next"]),
        (["unicron-run", "--unicron-warm", "o"], ["on", "off"]),
        (["unicron-run", "--standalone", "--unicron-warm", "on", "--nno"], ["--nnodes"]),
        (["unicron-run", "--nnodes=2", "--rdzv-back"], ["--rdzv-backend"]),
        (["unicron-run", "--nnodes", "2", "tr"], [""]),  # which the shell completes as a file
        (["unicron-run", "--standalone", "train.py", "--nn"], [""]),  # the script's own
    ],
)
def test_bash_offers_what_there_is(script: str, line: list[str], offered: list[str]) -> None:
    assert BASH
    done = subprocess.run(
        [BASH, "--norc", "-c", f"{script}\n{TRY}", "-", *line], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == offered


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_every_command_is_offered(script: str) -> None:
    assert BASH
    done = subprocess.run(
        [BASH, "--norc", "-c", f"{script}\n{TRY}", "-", "unicron", ""], capture_output=True, text=True, check=True
    )
    from typer.main import get_command

    assert set(done.stdout.splitlines()) == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_zsh_gets_the_same_with_what_it_needs_for_it(script: str) -> None:
    of_zsh = CliRunner().invoke(app, ["completion", "zsh"]).stdout
    head, found, rest = of_zsh.partition("_unicron_words() {")
    assert found
    assert rest == script.partition("_unicron_words() {")[2]
    assert "autoload -Uz bashcompinit && bashcompinit\n" in head
    assert "(( $+functions[compdef] )) ||" in head


def test_another_shell_is_refused() -> None:
    result = CliRunner().invoke(app, ["completion", "csh"])
    assert result.exit_code == 2
    assert "'csh'" in result.stderr


def test_nothing_heavy_is_imported() -> None:
    import sys

    code = (
        "import sys; from unicron_elastic.launcher.cli import app; sys.argv = ['unicron', 'completion', 'bash']\n"
        "try:\n    app()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
