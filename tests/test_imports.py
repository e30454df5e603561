"""Who may import whom: decisions stay pure, the training process stays light, nothing goes round in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPURE = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}
DECISIONS = (
    "unicron_elastic.detection",
    "unicron_elastic.faults",
    "unicron_elastic.recovery",
    "unicron_elastic.base.incident",
    "unicron_elastic.metrics",
    "unicron_elastic.planning",
    "unicron_elastic.testing.chaos_parse",
    "unicron_elastic.testing.chaos_plan",
    "unicron_elastic.testing.chaos_plan",
    "unicron_elastic.training.group.agreement",
    "unicron_elastic.training.step.shares",
    "unicron_elastic.training.step.tree",
    "unicron_elastic.base.world",
)
CALCULATES = "unicron_elastic.planning"  # with NumPy
HEAVY = {"megatron", "numpy", "psutil", "pynvml", "rich", "torch", "typer"}


def _modules() -> dict[str, Path]:
    """Every module of the package by the name under which it is installed."""
    found = {}
    for source in ("unicron_elastic", "launcher", "rendezvous"):
        for path in (ROOT / source).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            name = ".".join(parts if parts[0] == "unicron_elastic" else ("unicron_elastic", *parts))
            found[name] = path
    return found


MODULES = _modules()


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(tree: ast.AST, *, only_at_import: bool) -> Iterator[ast.AST]:
    """All nodes; with ``only_at_import``, those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if only_at_import and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        ):
            continue
        yield node
        yield from _nodes(node, only_at_import=only_at_import)


def _imports(name: str, *, only_at_import: bool) -> set[str]:
    """The modules that a module imports; ``from package import module`` counts as that module."""
    found = set()
    for node in _nodes(ast.parse(MODULES[name].read_bytes()), only_at_import=only_at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return found


def _top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _under(*packages: str) -> list[str]:
    return [name for name in sorted(MODULES) if name in packages or name.startswith(tuple(f"{p}." for p in packages))]


def test_the_walk_sees_the_modules() -> None:
    assert {"unicron_elastic.recovery.machine", "unicron_elastic.launcher.main", "unicron_elastic"} <= set(MODULES)
    assert "unicron_elastic.faults" in _imports("unicron_elastic.recovery.machine", only_at_import=True)


@pytest.mark.parametrize("name", _under(*DECISIONS))
def test_decisions_are_pure(name: str) -> None:
    allowed = {"numpy"} if name.startswith(CALCULATES) else set()
    assert _top(_imports(name, only_at_import=False)) & (IMPURE | HEAVY) <= allowed


@pytest.mark.parametrize("name", _under(*DECISIONS))
def test_decisions_know_no_shell(name: str) -> None:
    own = {other for other in _imports(name, only_at_import=False) if other.startswith("unicron_elastic")}
    assert own <= set(_under(*DECISIONS))


def test_faults_know_nothing_above_them() -> None:
    for name in _under("unicron_elastic.faults"):
        own = {other for other in _imports(name, only_at_import=False) if other.startswith("unicron_elastic")}
        assert own <= set(_under("unicron_elastic.faults")), name


@pytest.mark.parametrize("name", _under("unicron_elastic.worker"))
def test_the_training_process_knows_no_launcher_and_nothing_heavy(name: str) -> None:
    imported = _imports(name, only_at_import=False)
    assert imported & set(_under("unicron_elastic.launcher", "unicron_elastic.rendezvous")) == set()
    assert _top(imported) & HEAVY == set()


def test_the_rendezvous_knows_no_launcher() -> None:
    for name in _under("unicron_elastic.rendezvous"):
        assert _imports(name, only_at_import=False) & set(_under("unicron_elastic.launcher")) == set(), name


def test_no_module_imports_itself_over_others() -> None:
    edges = {name: _imports(name, only_at_import=True) & set(MODULES) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_package_itself_loads_nothing_else() -> None:
    assert _loaded_by("import unicron_elastic") == {"unicron_elastic"}


@pytest.mark.parametrize(
    "module", ["worker.bootstrap", "worker.warm", "recovery.machine", "launcher.main", "launcher.keeper", "incident"]
)
def test_what_starts_early_loads_nothing_heavy(module: str) -> None:
    assert _top(_loaded_by(f"import unicron_elastic.{module}")) & HEAVY == set()


def test_the_keeper_loads_little() -> None:
    own = {
        name
        for name in _loaded_by("import unicron_elastic.launcher.agent.process.supervisor")
        if name.startswith("unicron_elastic")
    }
    assert own == {
        "unicron_elastic",
        "unicron_elastic.launcher",
        "unicron_elastic.launcher.agent.process.supervisor",
        "unicron_elastic.launcher.agent.process.sweeping",
        "unicron_elastic.worker",
        "unicron_elastic.worker.channel",
        "unicron_elastic.worker.linux",
        "unicron_elastic.worker.signals",
    }
