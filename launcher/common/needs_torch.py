"""Whether a script seems to import torch, by its source: who prepares for that in vain makes a short script wait.

It is read and not run: the script, and what it imports from its own folder. Whatever cannot be told counts as torch.
That a guess is wrong costs time and nothing else: workers that start plainly import what they need by themselves.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_KNOWN = frozenset({"numpy", "scipy", "pandas", "tqdm", "yaml", "requests"})  # which import none of it
_ANYTHING = frozenset(
    {"importlib", "runpy", "pkgutil", "imp", "zipimport", "code"}
)  # may import whatever they are told
_CALLS = frozenset({"exec", "eval", "compile", "__import__"})
_SOURCE_BYTES_MAX = 1024 * 1024


def needs_torch(paths: Sequence[str]) -> bool:
    """Whether one of the files that run first seems to import torch; whether none is known, too."""
    return not paths or any(_needs(Path(path), Path(path).parent, follows=True) for path in paths)


def _needs(path: Path, folder: Path, *, follows: bool) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _SOURCE_BYTES_MAX:
            return True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's strings; the worker's interpreter says it
            tree = ast.parse(path.read_bytes())
    except SyntaxError:  # with which it ends
        return False
    except (OSError, ValueError, RecursionError, MemoryError):
        return True
    return any(_may_bring_it(name, folder, follows=follows) for name in _imports(tree))


def _may_bring_it(name: str, folder: Path, *, follows: bool) -> bool:
    own = [each for each in (folder / f"{name}.py", folder / name / "__init__.py") if each.is_file()]
    if own:
        return not follows or _needs(own[0], folder, follows=False) or own[0].name == "__init__.py"
    return name in _ANYTHING or name not in sys.stdlib_module_names | _KNOWN


def _imports(tree: ast.AST) -> Iterator[str]:
    """The first parts of the names of all modules that the source imports anywhere; "" for one that cannot be told."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=str(name), level=0):
                yield name.partition(".")[0]
            case ast.ImportFrom():
                yield ""
            case ast.Name(id=name) if name in _CALLS:
                yield ""
