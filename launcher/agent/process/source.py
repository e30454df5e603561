"""Reads the source of a script, without running it, for variables that libraries read while they are imported.

A script that sets one does so before its import of torch, which in a warm worker has happened already. Modules that the
script imports are not read; docs/differences.md says so.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder

# TORCH_NCCL_ variables are read when a process group is made, TORCHELASTIC_ variables by nothing that is preloaded.
_READ_AT_IMPORT = re.compile(r"(?!TORCH_NCCL_|TORCHELASTIC_)(TORCH|PYTORCH_|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_)[A-Z0-9_]*")
_READERS = frozenset({"get", "getenv"})
_SOURCE_BYTES_MAX = 1024 * 1024  # to parse more takes longer than a warm start saves


def early_variable(path: str) -> str | None:
    """The first variable that the Python file seems to set and that is read at import; None if there is none."""
    try:
        with open(path, "rb") as file:
            source = file.read(_SOURCE_BYTES_MAX + 1)
        if len(source) > _SOURCE_BYTES_MAX:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's strings; the worker's interpreter says it
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the interpreter will say what is wrong with it
    return next(_set_names(tree), None)


def _set_names(tree: ast.AST) -> Iterator[str]:
    """Names of such variables, however they stand there, except where one is just read."""
    only_read: set[ast.AST] = set()
    for node in ast.walk(tree):  # a parent comes before its children
        match node:
            case ast.Subscript(slice=key, ctx=ast.Load()):
                only_read.add(key)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[key, *_]) if name in _READERS:
                only_read.add(key)
            case ast.Compare(left=key):
                only_read.add(key)
            case ast.Constant(value=str(text)) if node not in only_read and _READ_AT_IMPORT.fullmatch(text):
                yield text
            case ast.keyword(arg=str(text)) if _READ_AT_IMPORT.fullmatch(text):
                yield text


def source_files(argv: Sequence[str]) -> list[str]:
    """The files that the interpreter's command ``argv`` runs first, as far as they are found without importing any."""
    for index, argument in enumerate(argv[1:], 1):
        if argument == "-m":
            with contextlib.suppress(KeyError, ValueError, ImportError):  # a namespace package within another
                return list(_module_files("".join(argv[index + 1 : index + 2]), [os.getcwd(), *sys.path]))
            return []
        if not argument.startswith("-"):
            return [os.path.join(argument, "__main__.py") if os.path.isdir(argument) else argument]
    return []


def _module_files(module: str, folders: Sequence[str]) -> Iterator[str]:
    """The packages around ``module``, from the outermost, and the module itself."""
    name = ""
    for part in [*module.split("."), "__main__"]:
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return
        if spec.origin is not None:
            yield spec.origin
        if spec.submodule_search_locations is None:
            return
        folders = list(spec.submodule_search_locations)
