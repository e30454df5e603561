"""The command line: the installed torch's own parser plus unicron-run's options."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from unicron_elastic import __version__
from unicron_elastic.compat.command_line import name_for_good, torchrun_parser
from unicron_elastic.launcher.config import options

# And what it takes, if that is a choice.
_WITHOUT_VARIABLE = {"logs_specs": (), "numa_binding": ("node", "socket", "exclusive", "core-complex")}


def get_args_parser() -> ArgumentParser:
    """torchrun's parser with unicron-run's options added. Raises TorchMissing."""
    parser = torchrun_parser()
    name_for_good(parser, "unicron-run")
    parser.description = (
        "Runs distributed PyTorch jobs as torchrun does, notices faults within milliseconds and goes on. "
        "Every option of torchrun is accepted, with its PET_* variable."
    )
    torchs_own = frozenset(map(id, parser._actions))
    options.add_arguments(parser)
    options.add_cluster_arguments(parser)
    parser.add_argument(
        "--config",
        default=None,
        metavar="FILE",
        help="YAML with settings; options and variables go before it [env: UNICRON_CONFIG]",
    )
    if "--version" not in parser._option_string_actions:  # as no torch has it so far
        parser.add_argument("--version", action="version", version=f"unicron-elastic {__version__}")
    _let_scripts_be_brief(parser, torchs_own)
    return parser


def _let_scripts_be_brief(parser: ArgumentParser, torchs_own: frozenset[int]) -> None:
    """Have an argument that might abbreviate several options be no error because of ours.

    argparse looks at the arguments of the script as well, and refuses what torchrun takes.
    """
    meant_by = parser._get_option_tuples

    def only_one_or_torchs(text: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = list(meant_by(text))
        return found if len(found) < 2 else [each for each in found if id(each[0]) in torchs_own]

    parser._get_option_tuples = only_one_or_torchs  # type: ignore[method-assign, assignment]


def take_variables(args: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Values of torchrun's options for which torchrun reads no variable. Raises options.BadOption."""
    for name, known in _WITHOUT_VARIABLE.items():
        variable = f"UNICRON_{name.upper()}"
        text = environ.get(variable, "").strip()
        if not text or getattr(args, name, None) is not None or not hasattr(args, name):
            continue
        if known and text not in known:
            right = f"{', '.join(known[:-1])} or {known[-1]}"
            raise options.BadOption(f"{variable}: {text!r} is not valid; give {right}")
        setattr(args, name, text)


def names_signals(parser: ArgumentParser, args: Namespace, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody said which signals end the job, be it those that do so anyway."""
    usual = parser.get_default("signals_to_handle")  # argparse puts the very object into ``args``
    return args.signals_to_handle is not usual or bool(environ.get("PET_SIGNALS_TO_HANDLE"))


def warm_command(args: argparse.Namespace) -> list[str] | None:
    """The workers' command if it is a script or module run by this interpreter, else None: it cannot start warm.

    It is what a worker runs, as torchrun builds it (torch.distributed.run, config_from_args).
    """
    if args.no_python or args.run_path or args.numa_binding is not None or not getattr(args, "use_env", True):
        return None
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return None
    module = ["-m"] if args.module else []
    return [sys.executable, "-u", *module, args.training_script, *args.training_script_args]
