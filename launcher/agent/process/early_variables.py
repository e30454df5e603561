"""Reads the source of a script, without running it, for variables that libraries read while they are imported.

A script that sets one does so before its import of torch, which in a warm worker has happened already. Modules that
the script imports are not read; docs/differences.md says so. What Python code reads at import, the warm process sees;
of what C code reads there, these are the beginnings.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder

_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")  # a word without "_" is often something else: "USER", "CI"
# TORCH_NCCL_ variables are read when a process group is made, TORCHELASTIC_ variables by nothing that is preloaded.
_READ_AT_IMPORT = re.compile(
    r"(?!TORCH_NCCL_|TORCHELASTIC_)"
    r"(TORCH|PYTORCH_|OMP_|MKL_|KMP_|GOMP_|GOTO_|OPENBLAS_|DNNL_|ONEDNN_|MKLDNN_|NPY_|NUMPY_|KINETO_|GFORTRAN_)[A-Z0-9_]*"
)
_READERS = frozenset({"get", "getenv"})
_SOURCE_BYTES_MAX = 1024 * 1024  # to parse more takes longer than a warm start saves


def early_variable(path: str) -> str | None:
    """The first variable that the Python file seems to set and that C code reads at import; None if there is none."""
    return next(filter(_READ_AT_IMPORT.fullmatch, set_variables(path)), None)


def set_variables(path: str) -> list[str]:
    """The variables that the Python file seems to set, and other names that look like variables.

    What comes through a pipe can be read once, and is left to the worker.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return []
        with open(path, "rb") as file:
            source = file.read(_SOURCE_BYTES_MAX + 1)
        return list(_variables_in(source)) if len(source) <= _SOURCE_BYTES_MAX else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the interpreter will say what is wrong with it


@lru_cache(maxsize=4)  # a launch asks twice, and each new generation again
def _variables_in(source: bytes) -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the script's strings; the worker's interpreter says it
        tree = ast.parse(source)
    return tuple(dict.fromkeys(_set_names(tree)))


def _set_names(tree: ast.AST) -> Iterator[str]:
    """Names of variables, however they stand there, except where one is just read."""
    only_read: set[ast.AST] = set()
    for node in ast.walk(tree):  # a parent comes before its children
        match node:
            case ast.Subscript(slice=key, ctx=ast.Load()):
                only_read.add(key)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[key, *_]) if name in _READERS:
                only_read.add(key)
            case ast.Compare(left=key):
                only_read.add(key)
            case ast.Constant(value=str(text)) if node not in only_read and _VARIABLE.fullmatch(text):
                yield text
            case ast.keyword(arg=str(text)) if _VARIABLE.fullmatch(text):
                yield text


def source_files(argv: Sequence[str]) -> list[str]:
    """The files that the interpreter's command ``argv`` runs first, as far as they are found without importing any."""
    for index, argument in enumerate(argv[1:], 1):
        if argument == "-m":
            with contextlib.suppress(KeyError, ValueError, ImportError):  # a namespace package within another
                return list(_module_files("".join(argv[index + 1 : index + 2]), [os.getcwd(), *sys.path]))
            return []
        if argument == "-":
            return []  # standard input is for the worker to read
        if not argument.startswith("-"):
            return [os.path.join(argument, "__main__.py") if os.path.isdir(argument) else argument]
    return []


def program_of(argv: Sequence[str]) -> Sequence[str]:
    """The words of the interpreter's command up to the script or module."""
    ends = (at for at, word in enumerate(argv[1:], 2) if word == "-" or not word.startswith("-"))
    return argv[: next(ends, len(argv))]


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
