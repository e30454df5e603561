"""The house rules that are not kept everywhere yet: how many places break each may only fall."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PRODUCT = ("unicron_elastic", "launcher", "rendezvous")
MAY_READ_ENVIRONMENT = ("launcher/main.py", "unicron_elastic/worker/start/")
SENDS = frozenset(["say", "send", "tell", "put"])  # what goes to another process or to the store
OF_THE_WHOLE = tuple(f"tests/{room}/" for room in ("cluster", "docs", "endtoend", "fuzz"))
SHELLS = "launcher/agent/core/"
FRAGMENTS = re.compile(r"(?:As|At|By|For|From|How|In|Of|On|So|To|What|Whatever|When|Where|Who|Whoever|Whom|With)\b")
OURS = "unicron_elastic"
TOP_LEVEL = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Rule = Callable[[], Iterator[str]]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Let go of two million nodes: through those the collector would look in all tests that come behind these."""
    gc.disable()
    yield
    trees.cache_clear()
    gc.enable()


@cache
def trees(*tops: str) -> dict[str, ast.Module]:
    """Parse all files below these folders, by their path in the repository."""
    paths = sorted(path for top in tops for path in (REPOSITORY / top).rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def calls(tree: ast.AST, names: Iterable[str]) -> Iterator[ast.Call]:
    """Find calls of a function or method that has one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in names:
                yield node


def class_names_of_more_than_one_class() -> Iterator[str]:
    where = defaultdict(list)
    for path, tree in trees(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path)
    return (f"{name}: {', '.join(paths)}" for name, paths in where.items() if len(paths) > 1)


def second_headings() -> Iterator[str]:
    """Find docstrings and comments that stand alone in the middle of a file, and begin another part of it."""
    for path, tree in trees(*PRODUCT).items():
        values = [node.value for node in tree.body[1:] if isinstance(node, ast.Expr)]
        yield from (f"{path}:{value.lineno}" for value in values if isinstance(value, ast.Constant))
        lines = (REPOSITORY / path).read_text(encoding="utf-8").splitlines()
        for number, (above, line, below) in enumerate(zip(["", *lines], lines, [*lines[1:], ""], strict=False), 1):
            if line.startswith("#") and not below and not above.startswith(('"""', "#!")) and number > 3:
                yield f"{path}:{number}"


def files_called_otherwise_than_what_they_hold() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        stem = Path(path).stem.replace("_", "")
        names = [node.name.replace("_", "").lower() for node in tree.body if isinstance(node, TOP_LEVEL)]
        if names and stem not in ("init", "main") and not any(stem in name or name in stem for name in names):
            yield path


def dictionaries_that_are_sent() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        for call in calls(tree, SENDS):
            if any(isinstance(argument, ast.Dict) for argument in call.args):
                yield f"{path}:{call.lineno}"


def reads_of_the_environment() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        if not path.startswith(MAY_READ_ENVIRONMENT):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                    yield f"{path}:{node.lineno}"


def probes_of_the_rendezvous() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        for call in calls(tree, () if "/compat/" in path else ("getattr", "hasattr")):
            if call.args and path.startswith(SHELLS) and "handler" in ast.unparse(call.args[0]):
                yield f"{path}:{call.lineno}"


def decisions_while_a_command_is_carried_out() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        if path.startswith(SHELLS):
            yield from (f"{path}:{call.lineno}" for call in calls(tree, ["_handle"]))


def decisions_on_words_meant_for_people() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        for call in calls(tree, ["startswith"]):
            if any(isinstance(each, ast.Constant) and str(each.value).startswith("unicron-") for each in call.args):
                yield f"{path}:{call.lineno}"


def patches_of_our_own_names() -> Iterator[str]:
    for path, tree in trees("tests").items():
        foreign = set(_imported(tree))
        for call in calls(tree, ["setattr"]):
            if call.args and ast.unparse(call.func).startswith("monkeypatch."):
                target = call.args[0]
                if isinstance(target, ast.Constant):
                    is_ours = str(target.value).startswith(OURS)
                else:
                    is_ours = ast.unparse(target).partition(".")[0] not in foreign
                if is_ours:
                    yield f"{path}:{call.lineno}"


def _imported(tree: ast.Module) -> Iterator[str]:
    """Name what a file has imported from others than us."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name).partition(".")[0] for each in node.names if OURS not in each.name)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(OURS):
            yield from (each.asname or each.name for each in node.names)


def docstrings_of_classes_without_a_subject() -> Iterator[str]:
    for path, tree in trees(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and FRAGMENTS.match(ast.get_docstring(node) or ""):
                yield f"{path}:{node.lineno}: {ast.get_docstring(node)!r:.60}"


def unit_tests_called_after_no_module() -> Iterator[str]:
    stems = {Path(path).stem.strip("_") for path in trees(*PRODUCT)}
    stems |= {Path(path).parent.name for path in trees(*PRODUCT)}
    for path in trees("tests"):
        if (
            not path.startswith(OF_THE_WHOLE)
            and (stem := Path(path).stem).startswith("test_")
            and stem.removeprefix("test_") not in stems
        ):
            yield path


AT_MOST: dict[Rule, int] = {
    class_names_of_more_than_one_class: 0,
    second_headings: 0,
    files_called_otherwise_than_what_they_hold: 119,
    dictionaries_that_are_sent: 0,
    reads_of_the_environment: 93,
    probes_of_the_rendezvous: 0,
    decisions_while_a_command_is_carried_out: 4,
    decisions_on_words_meant_for_people: 0,
    patches_of_our_own_names: 71,
    docstrings_of_classes_without_a_subject: 186,
    unit_tests_called_after_no_module: 167,
}


@pytest.mark.parametrize("rule", AT_MOST, ids=lambda rule: rule.__name__)
def test_a_rule_is_broken_no_more_than_before(rule: Rule) -> None:
    found = list(rule())
    words = rule.__name__.replace("_", " ")
    assert len(found) <= AT_MOST[rule], f"{len(found)} {words}:\n" + "\n".join(found)
