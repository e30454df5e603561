"""What is private to torch, or changes with it, is named in unicron_elastic/compat and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOM = ROOT / "unicron_elastic" / "compat"
FILES = [
    path
    for source in ("unicron_elastic", "launcher", "rendezvous")
    for path in sorted((ROOT / source).rglob("*.py"))
    if ROOM not in path.parents
]
# Beside all that begins with an underscore. Of torch.distributed.launcher and torch.distributed.run the package has
# copies of its own, whose docstrings name them.
CHANGING = (
    "torch.distributed.argparse_util",
    "torch.distributed.distributed_c10d",
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torch.numa",
    "torch.testing._internal",
)
PRELOADED = {"torch._dynamo"}  # a user may say so, too: a module that the warm process imports


def is_private(name: str) -> bool:
    """Of a name with dots, that begins with torch."""
    return (
        any(name == each or name.startswith(f"{each}.") for each in CHANGING)
        or re.search(r"\._(?!_)", name) is not None
    )


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """ "torch.distributed._x" of an expression, by the names under which torch's modules are imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([names[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in names else ""


def _docstrings(tree: ast.AST) -> set[ast.expr]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def private_names(source: str) -> Iterator[str]:
    """All that it names of torch's private parts: in imports, expressions, and texts that are nothing but a name."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in node.names
                      if alias.name.partition(".")[0] == "torch"}  # fmt: skip
            yield from (alias.name for alias in node.names if _is_private_of_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if _is_private_of_torch(f"{node.module}.{alias.name}"):
                    yield f"{node.module}.{alias.name}"
    texts = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(name := _dotted(node, names)):
            yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            words = node.value if re.fullmatch(r"[\w.,?]+", node.value) else ""
            found = {word.lstrip("?") for word in words.split(",")} - PRELOADED
            yield from (word for word in found if _is_private_of_torch(word))


def _is_private_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch" and is_private(name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_room_knows_torchs_private_parts(path: Path) -> None:
    assert list(private_names(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.elastic.rendezvous import RendezvousHandler",
        "import torch.distributed.run as torch_run",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch\ndef f(): return torch._foreach_add_([], 1)",
        "import torch.distributed as dist\ndist.distributed_c10d.group_count = 1",
        "from torch import distributed\ndistributed._world",
        "import sys\nsys.modules.get('torch.distributed.distributed_c10d')",
        "PRELOAD = 'torch,torch._inductor'",
    ],
)
def test_each_way_to_name_one_is_seen(source: str) -> None:
    assert list(private_names(source)) != []


@pytest.mark.parametrize(
    "source",
    [
        '"""As torch.distributed.run does."""\nimport torch.distributed as dist\ndist.init_process_group()',
        "from unicron_elastic.compat.groups import fake_store",
        "PRELOAD = '?numpy,torch,?torch._dynamo'",
        "import torch\nself._x = torch.zeros(1)",
    ],
)
def test_what_is_public_is_not(source: str) -> None:
    assert list(private_names(source)) == []
