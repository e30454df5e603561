"""What is said of a function begins with a verb: a tired engineer reads what it does, not a piece of a sentence."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FRAGMENTS = frozenset(["As", "By", "From", "Has", "In", "Is", "It", "Of", "To", "Who", "Whom", "With"])


def fragments(tree: ast.Module) -> Iterator[str]:
    """Name each function whose docstring begins with a word that begins no instruction."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0] in FRAGMENTS:
                yield f"{node.name} (line {node.lineno}): {' '.join(words[:6])}"


@pytest.mark.parametrize("top", ["unicron_elastic", "launcher", "rendezvous"])
def test_docstrings_of_functions_begin_with_a_verb(top: str) -> None:
    files = sorted((REPOSITORY / top).rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    found = [f"{path.relative_to(REPOSITORY)}: {each}" for path, tree in trees.items() for each in fragments(tree)]
    assert files
    assert found == []


def test_a_fragment_is_found() -> None:
    tree = ast.parse('def a():\n    """Of its key."""\n\ndef b():\n    """Return its key."""\n')
    assert list(fragments(tree)) == ["a (line 1): Of its key."]


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []  # pytest collects one of them
