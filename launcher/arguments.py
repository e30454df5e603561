"""The command line: the installed torch's own parser plus unicron-run's options, without importing torch.

Importing torch costs about a second, and ``--help`` or a mistyped flag should not. So the function that builds
torchrun's parser is taken out of torch's source file and run by itself; if that fails for a torch whose source looks
different, torch is imported and its parser used as it is.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from unicron_elastic.launcher import options

__all__ = ["TorchMissing", "get_args_parser", "take_variables", "torchrun_parser"]

# And what it takes, if that is a choice.
_WITHOUT_VARIABLE = {"logs_specs": (), "numa_binding": ("node", "socket", "exclusive", "core-complex")}


class TorchMissing(Exception):
    """torch is not installed in this environment."""


def get_args_parser() -> ArgumentParser:
    """torchrun's parser with unicron-run's options added. Raises TorchMissing."""
    parser = torchrun_parser()
    parser.prog = "unicron-run"
    parser.description = (
        "Runs distributed PyTorch jobs as torchrun does, notices faults within milliseconds and goes on. "
        "Every option of torchrun is accepted, with its PET_* variable."
    )
    options.add_arguments(parser)
    options.add_cluster_arguments(parser)
    parser.add_argument(
        "--config",
        default=None,
        metavar="FILE",
        help="YAML with settings; options and variables go before it [env: UNICRON_CONFIG]",
    )
    return parser


def take_variables(args: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Values of torchrun's options for which torchrun reads no variable. Raises options.BadOption."""
    for name, known in _WITHOUT_VARIABLE.items():
        variable = f"UNICRON_{name.upper()}"
        text = environ.get(variable, "").strip()
        if not text or getattr(args, name, None) is not None or not hasattr(args, name):
            continue
        if known and text not in known:
            right = f"{', '.join(known[:-1])} or {known[-1]}"
            raise options.BadOption(f"{variable}: {text!r} is not possible here; it takes {right}")
        setattr(args, name, text)


def torchrun_parser() -> ArgumentParser:
    """The parser of the installed torchrun. Raises TorchMissing."""
    if "torch.distributed.run" not in sys.modules:
        try:
            return _parser_from_source(_torch_folder())
        except (OSError, SyntaxError, NameError, AttributeError, KeyError, TypeError):
            pass  # this torch is written differently: ask it the slow way
    from torch.distributed.run import get_args_parser as torch_get_args_parser

    parser: ArgumentParser = torch_get_args_parser()
    return parser


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise TorchMissing("torch is not installed in this Python environment; unicron-run needs torch 2.13 or newer")
    return Path(next(iter(spec.submodule_search_locations)))


def _parser_from_source(torch: Path) -> ArgumentParser:
    actions = _load_file(torch / "distributed" / "argparse_util.py")
    namespace: dict[str, Any] = {
        "ArgumentParser": ArgumentParser,
        "REMAINDER": REMAINDER,
        "env": actions.env,
        "check_env": actions.check_env,
        "_AffinityMode": _definition(torch / "numa" / "binding.py", "AffinityMode", {"Enum": Enum}),
    }
    build = _definition(torch / "distributed" / "run.py", "get_args_parser", namespace)
    parser: ArgumentParser = build()
    return parser


def _load_file(path: Path) -> ModuleType:
    """Runs one source file that imports nothing but the standard library."""
    spec = importlib.util.spec_from_file_location(f"_unicron_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _definition(path: Path, name: str, namespace: dict[str, Any]) -> Any:
    """The top-level function or class ``name`` of a source file, run in ``namespace``. Raises KeyError."""
    for node in ast.parse(path.read_bytes(), str(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
            return namespace[name]
    raise KeyError(name)
