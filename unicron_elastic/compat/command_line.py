"""torchrun's own command line, taken out of the installed torch's source. Does not import torch, unless it has to.

Importing torch costs about a second, and ``--help`` or a mistyped flag should not. So the function that builds
torchrun's parser is run out of its source file, together with what it names. Where that fails, torch is imported and
its parser used as it is.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from argparse import Action, ArgumentParser
from pathlib import Path
from typing import Any

from unicron_elastic.compat import KNOWN

__all__ = [
    "TorchMissing",
    "is_setting",
    "name_for_good",
    "parser_from_source",
    "reads_variable",
    "torch_folder",
    "torchrun_parser",
]

_MODULE = "torch.distributed.run"


class TorchMissing(Exception):
    """torch is not installed in this environment."""


def torchrun_parser() -> ArgumentParser:
    """Return the parser of the installed torchrun. Raises TorchMissing."""
    if _MODULE not in sys.modules:
        try:
            return parser_from_source(torch_folder())
        except (ImportError, OSError, SyntaxError, NameError, AttributeError, LookupError, TypeError, ValueError):
            pass  # this torch is written differently: ask it the slow way
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    return parser


def torch_folder() -> Path:
    """Return the folder of the installed torch. Raises TorchMissing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise TorchMissing(
            f"torch is not installed in this Python environment; unicron-run needs torch {KNOWN[0]} or newer"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def parser_from_source(torch: Path) -> ArgumentParser:
    """Return what ``get_args_parser`` returns. Raises what comes of a torch that is written differently."""
    parser: ArgumentParser = _Source(torch.parent, _MODULE).definition("get_args_parser")()
    return parser


def name_for_good(parser: ArgumentParser, command: str) -> None:
    """Make ``parser`` that of ``command``, which torch's ``--print-completion`` would rename to torchrun."""

    class Named(type(parser)):  # type: ignore[misc]
        prog = property(lambda _: command, lambda *_: None)

    parser.__class__ = Named


def reads_variable(action: Action) -> bool:
    """Return whether an option of torchrun takes its default from a variable PET_..."""
    return type(action).__name__ in ("env", "check_env")


def is_setting(action: Action) -> bool:
    """Return whether an option has a value, unlike --help and --print-completion, which do something at once."""
    stores = isinstance(action, argparse._StoreAction | argparse._StoreConstAction)
    return bool(action.option_strings) and (stores or reads_variable(action))


class _Source:
    """The top-level definitions of one source file of torch, each run alone, with those that it names."""

    def __init__(self, root: Path, module: str) -> None:
        self._root = root
        self._path = root.joinpath(*module.split(".")).with_suffix(".py")
        self._nodes: dict[str, ast.stmt] = {}
        self._found: dict[str, Any] = {"__name__": module}
        for node in ast.parse(self._path.read_bytes(), str(self._path)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._nodes[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self._nodes[(alias.asname or alias.name).partition(".")[0]] = node

    def definition(self, name: str) -> Any:
        """Return the function, the class or what is imported under ``name``. Raises LookupError or ImportError."""
        if name not in self._found:
            node = self._nodes[name]
            self._found[name] = None  # until it is made, for those that name one another
            is_here = isinstance(node, ast.FunctionDef | ast.ClassDef)
            self._found[name] = self._run(node) if is_here else self._imported(node, name)
        return self._found[name]

    def _run(self, node: Any) -> Any:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in self._nodes and each.id != node.name:
                self.definition(each.id)
        exec(compile(ast.Module([node], []), str(self._path), "exec"), self._found)
        return self._found[node.name]

    def _imported(self, node: Any, name: str) -> Any:
        (alias,) = (each for each in node.names if (each.asname or each.name).partition(".")[0] == name)
        is_from = isinstance(node, ast.ImportFrom)
        module = node.module if is_from else alias.name
        if module.partition(".")[0] in sys.stdlib_module_names:
            found = importlib.import_module(module)
            if is_from:
                return getattr(found, alias.name)
            return found if alias.asname else sys.modules[name]  # "import a.b" means a
        if not is_from:
            raise ImportError(f"{module} is wanted as a whole")
        return _Source(self._root, module).definition(alias.name)
