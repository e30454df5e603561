"""The command line: the installed torch's own parser plus unicron-run's options, without importing torch.

Importing torch costs about a second, and ``--help`` or a mistyped flag should not. So the function that builds
torchrun's parser is taken out of torch's source file and run by itself; if that fails for a torch whose source looks
different, torch is imported and its parser used as it is.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from argparse import REMAINDER, ArgumentParser
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from unicron_elastic.launcher import options

__all__ = ["TorchMissing", "get_args_parser", "torchrun_parser"]


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
    return parser


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
