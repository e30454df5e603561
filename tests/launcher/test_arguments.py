"""The command line: torchrun's own parser, taken out of torch's source, with unicron-run's options added."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torch_run

from unicron_elastic import __version__
from unicron_elastic.compat import command_line
from unicron_elastic.launcher.config import arguments


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of whoever runs the tests change no default."""
    import os

    for name in list(os.environ):
        if name.startswith(("PET_", "UNICRON_")):
            monkeypatch.delenv(name)


def _fast() -> argparse.ArgumentParser:
    return command_line.parser_from_source(command_line.torch_folder())


def _described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Every action, in order, with all that decides how it parses and what --help says."""
    actions = []
    for action in parser._actions:
        described = {name: value for name, value in vars(action).items() if name != "container"}
        described["class"] = type(action).__name__
        described["type"] = getattr(described["type"], "__qualname__", described["type"])
        described["choices"] = None if action.choices is None else [str(choice) for choice in action.choices]
        actions.append(described)
    return actions


def test_the_fast_parser_is_torchs_option_by_option() -> None:
    fast, torchs = _described(_fast()), _described(torch_run.get_args_parser())
    assert len(torchs) > 30
    assert fast == torchs


def test_it_is_torchs_with_every_variable_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in torch_run.get_args_parser()._actions:
        if action.option_strings:
            monkeypatch.setenv(f"PET_{action.dest.upper()}", "7")
    assert _described(_fast()) == _described(torch_run.get_args_parser())


@pytest.mark.parametrize(
    "line",
    [
        ["train.py"],
        ["--nnodes=2:4", "--nproc_per_node", "8", "--max-restarts=3", "train.py", "--lr", "1", "--nnodes", "9"],
        ["--standalone", "--nproc-per-node=gpu", "-m", "package.train", "-x"],
        ["--no-python", "-r", "0:3,1:1", "-t", "3", "--log_dir=/logs", "./train.sh"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint=h:29400", "--rdzv-conf", "timeout=5", "--rdzv-id", "j", "t.py"],
        ["--stand", "--rol", "trainer", "train.py"],
    ],
)
def test_lines_mean_what_they_mean_to_torchrun(line: list[str]) -> None:
    ours = vars(arguments.get_args_parser().parse_args(line))
    own = {name for name in ours if name.startswith("unicron_")} | {"cluster", "detach", "weight", "job_spec", "config"}
    assert len(own) >= 8
    assert {name: value for name, value in ours.items() if name not in own} == vars(
        torch_run.get_args_parser().parse_args(line)
    )


def test_torchruns_variables_are_honoured_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    monkeypatch.setenv("PET_STANDALONE", "1")
    args = _fast().parse_args(["train.py"])
    assert (args.nnodes, args.max_restarts, args.standalone) == ("2:3", 5, True)
    assert _fast().parse_args(["--nnodes=9", "train.py"]).nnodes == "9"


def test_a_flag_of_the_script_is_the_scripts() -> None:
    args = arguments.get_args_parser().parse_args(["train.py", "--unicron-warm", "off"])
    assert args.unicron_warm is None
    assert args.training_script_args == ["--unicron-warm", "off"]


def test_a_torch_that_is_written_differently_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "distributed" / "run.py").write_text("changed = True\n")
    monkeypatch.delitem(sys.modules, "torch.distributed.run")
    monkeypatch.setattr(command_line, "torch_folder", lambda: tmp_path / "torch")
    assert _described(command_line.torchrun_parser()) == _described(torch_run.get_args_parser())


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(command_line.TorchMissing, match="torch is not installed"):
        command_line.torch_folder()


def test_the_parser_is_made_out_of_whatever_torchs_function_names(tmp_path: Path) -> None:
    """A definition beside it, one that is imported from another file of torch, and the standard library."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "modes.py").write_text(
        "from enum import Enum as Base\nimport torch\nclass Mode(Base):\n    FAST = 'fast'\n"
    )
    (tmp_path / "torch" / "distributed" / "run.py").write_text(
        "import torch\nimport os.path\nfrom argparse import ArgumentParser, Action as _Action\n"
        "from torch.modes import Mode as _Mode\n"
        "def _path(text): return os.path.basename(text)\n"
        "class _Shout(_Action):\n"
        "    def __call__(self, parser, namespace, value, flag): namespace.shout = _path(value).upper()\n"
        "def get_args_parser() -> ArgumentParser:\n"
        "    parser = ArgumentParser()\n"
        "    parser.add_argument('--mode', choices=[mode.value for mode in _Mode])\n"
        "    parser.add_argument('--shout', action=_Shout)\n"
        "    return parser\n"
    )
    parsed = command_line.parser_from_source(tmp_path / "torch").parse_args(["--mode", "fast", "--shout", "/a/b"])
    assert vars(parsed) == {"mode": "fast", "shout": "B"}


def test_a_completion_is_of_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    """torch's action (2.14) calls the parser "torchrun" before it prints."""

    class Print(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            parser.prog = "torchrun"
            print(parser.prog)

    parser = argparse.ArgumentParser()
    parser.add_argument("--print-completion", nargs=0, action=Print)
    command_line.name_for_good(parser, "unicron-run")
    parser.parse_args(["--print-completion"])
    assert capsys.readouterr().out == "unicron-run\n"
    assert parser.format_usage().startswith("usage: unicron-run ")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["--help"], 0, ["usage: unicron-run", "--nproc-per-node", "--unicron-warm"]),
        (["--no-such-flag", "train.py"], 2, ["usage: unicron-run", "no-such-flag"]),
        (["--unicron-warm=maybe", "train.py"], 2, ["--unicron-warm", "'maybe'", "on or off"]),
        (["--nnodes=0", "train.py"], 1, ["--nnodes", "'0'", "MIN:MAX"]),
        (["nowhere/train.py"], 1, ["nowhere/train.py", "does not exist"]),
    ],
)
def test_help_and_mistakes_cost_no_import_of_torch(line: list[str], code: int, words: list[str]) -> None:
    program = (
        "import atexit, sys\n"
        "from unicron_elastic.launcher import main\n"
        "atexit.register(lambda: print('imported:', sorted({'torch', 'numpy'}.intersection(sys.modules))))\n"
        "main.console_script()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *line], capture_output=True, text=True, timeout=60, check=False
    )
    written = done.stdout + done.stderr
    assert done.returncode == code, written
    assert done.stdout.endswith("imported: []\n"), written
    assert "Traceback" not in written
    for word in words:
        assert word in written
    if "usage" not in words[0]:
        assert len(done.stderr.splitlines()) == 1  # one sentence


@pytest.mark.parametrize("given", ["--metric", "--metrics", "--c", "--u", "--unicron-hang", "--clus"])
def test_a_script_s_own_options_may_be_like_several_of_ours(given: str) -> None:
    args = arguments.get_args_parser().parse_args(["--nproc-per-node=1", "train.py", given, "3"])
    assert args.training_script_args == [given, "3"]


def test_an_option_of_ours_may_be_abbreviated() -> None:
    assert arguments.get_args_parser().parse_args(["--unicron-conso=off", "train.py"]).unicron_console == "off"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.get_args_parser().parse_args(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"unicron-elastic {__version__}\n")


@pytest.mark.parametrize("before", [[], ["--nnodes=1"], ["--"], ["-m"]])
def test_an_argument_of_the_script_shows_no_version(before: list[str]) -> None:
    args = arguments.get_args_parser().parse_args([*before, "train", "--version", "--vers"])
    assert (args.training_script, args.training_script_args) == ("train", ["--version", "--vers"])
