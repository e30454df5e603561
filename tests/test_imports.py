"""Who may import whom: decisions stay pure, the training process stays light, nothing goes round in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room may import the rooms named here and its own modules, also inside of functions. The rooms stand in the order of
# their floors: none names one that comes after it. "." is what `import unicron_elastic` gives.
MAY_IMPORT = {
    "base": "",
    "compat": "",
    "compat.collectives": "",
    "compat.watching": "",
    "launcher.agent": "",
    "launcher.view": "",
    "membership": "",
    "planning": "",
    "simulation": "",
    "state": "compat",
    "worker.process": "",
    "engine": "",
    "engine.protocol": "base",
    "engine.transport": "compat",
    "faults": "base",
    "health.gpu": "base",
    "health.host": "base worker.process",
    "planning.model": "base",
    "rendezvous.store": "base",
    "state.pull": "base state",
    "training.step": "compat compat.watching engine.protocol engine.transport state",
    "worker.collectives": "compat worker.process",
    "engine.group": "compat compat.collectives engine.transport worker.collectives",
    "worker": "base compat worker.collectives worker.process",
    "launcher.common": "base membership worker",
    "detection": "base faults",
    "health": "base health.gpu health.host",
    "launcher.view.incidents": "base launcher.common",
    "launcher.view.job": "base launcher.common",
    "metrics": "base faults",
    "planning.allocate": "base planning.model",
    "recovery": "base faults planning.model",
    "simulation.history": "base faults",
    "state.snapshot": "compat state state.pull worker",
    "testing": "compat rendezvous.store worker worker.process",
    "testing.late": "compat compat.collectives engine.group engine.transport",
    "worker.rank_monitor": "worker",
    "launcher.config": "base compat recovery rendezvous.store testing worker.process",
    "planning.coordinate": "base planning.allocate planning.model",
    "simulation.model": "base faults planning.model simulation.history",
    "state.storage": "state state.snapshot",
    "worker.start": "compat testing worker worker.collectives worker.process worker.rank_monitor",
    "rendezvous.records": "base membership planning.coordinate planning.model rendezvous.store",
    "simulation.live": "base faults planning.coordinate planning.model recovery simulation.history simulation.model",
    "training.snapshot": "compat compat.watching state state.snapshot state.storage training.step worker",
    "training.wrapped": "training.step",
    "worker.inject": "worker.start",
    "rendezvous.job": "base compat membership rendezvous.records rendezvous.store worker.process",
    "rendezvous.plan": (
        "base metrics planning.allocate planning.coordinate planning.model rendezvous.records rendezvous.store"
    ),
    "simulation.policies": "faults planning.allocate planning.model simulation.live simulation.model",
    "training.group": (
        "base compat engine.protocol engine.transport state state.pull training.snapshot training.step worker "
        "worker.collectives worker.process"
    ),
    "training.shard": (
        "base compat compat.collectives engine.group engine.protocol engine.transport state state.snapshot "
        "training.group training.step worker worker.process"
    ),
    "launcher.view.cluster": (
        "base launcher.common membership metrics planning.coordinate planning.model rendezvous.plan "
        "rendezvous.records rendezvous.store"
    ),
    "rendezvous.cluster": "base membership metrics rendezvous.plan rendezvous.records rendezvous.store",
    "simulation.study": (
        "base faults planning.coordinate planning.model simulation.history simulation.live simulation.model "
        "simulation.policies"
    ),
    "training": (
        "base compat engine.group engine.protocol engine.transport state state.snapshot training.group "
        "training.shard training.snapshot training.step training.wrapped worker"
    ),
    "megatron": (
        "base compat engine.protocol engine.transport faults planning.model state.storage training training.group "
        "training.step worker worker.collectives"
    ),
    ".": "training training.step worker",
    "training.loader": "training training.step",
    "accelerate": "base training training.loader training.step",
    "lightning": "base training training.loader training.step",
    "transformers": "accelerate base training training.loader training.step",
    "attach": "training training.loader training.step transformers",
    "launcher.export": "launcher.common launcher.config",
    "launcher.export.metrics": (
        "base compat launcher.common launcher.export launcher.view.job metrics recovery rendezvous.cluster"
    ),
    "launcher.export.web": (
        "launcher.common launcher.export launcher.view.cluster metrics rendezvous.cluster rendezvous.records "
        "rendezvous.store"
    ),
    "rendezvous.torch": (
        "base compat membership metrics rendezvous.cluster rendezvous.job rendezvous.records rendezvous.store"
    ),
    "launcher.agent.held": "worker worker.process",
    "launcher.agent.process": (
        "base compat detection health.gpu health.host launcher.agent.held launcher.common launcher.config "
        "launcher.export.metrics worker "
        "worker.inject worker.process worker.start"
    ),
    "launcher.node": (
        "base compat launcher.common launcher.config launcher.export.metrics launcher.view.cluster metrics "
        "planning.coordinate planning.model rendezvous.cluster rendezvous.records rendezvous.store"
    ),
    "rendezvous": "",
    "launcher.agent.hangs": (
        "detection faults health.gpu health.host launcher.agent.process launcher.common recovery worker worker.process"
    ),
    "launcher.agent.worlds": (
        "base launcher.agent.process launcher.common recovery rendezvous.job rendezvous.store state.snapshot worker"
    ),
    "launcher.agent.core": (
        "base compat faults health health.gpu health.host launcher.agent.hangs launcher.agent.process "
        "launcher.agent.worlds launcher.common launcher.config launcher.export.metrics launcher.view.incidents "
        "launcher.view.job metrics planning.model recovery rendezvous.job rendezvous.records worker worker.process"
    ),
    "launcher.commands": (
        "base compat launcher.agent.core launcher.common launcher.config launcher.export launcher.export.metrics "
        "launcher.export.web launcher.node launcher.view.cluster planning.coordinate planning.model "
        "rendezvous.cluster rendezvous.plan rendezvous.records rendezvous.store simulation.history "
        "simulation.model simulation.policies simulation.study testing"
    ),
    "launcher": (
        "base compat launcher.agent.core launcher.agent.process launcher.commands launcher.common launcher.config "
        "launcher.export.metrics launcher.node launcher.view.incidents rendezvous.torch worker.process"
    ),
}
FILES_MAX = 16
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
    "unicron_elastic.base.fault",
    "unicron_elastic.base.incident",
    "unicron_elastic.base.quarantine",
    "unicron_elastic.base.world",
    "unicron_elastic.detection",
    "unicron_elastic.engine.protocol",
    "unicron_elastic.faults",
    "unicron_elastic.membership",
    "unicron_elastic.metrics",
    "unicron_elastic.planning",
    "unicron_elastic.recovery",
    "unicron_elastic.testing.chaos_plan",
    "unicron_elastic.training.step.comparison",
)
CALCULATES = "unicron_elastic.planning"  # with NumPy
HEAVY = {"accelerate", "lightning", "megatron", "numpy", "psutil", "pynvml", "rich", "torch", "transformers", "typer"}


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


def _room(name: str) -> str:
    """The room of a module: its package, or a package itself; "." for that of all."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    return package.removeprefix("unicron_elastic").lstrip(".") or "."


def test_the_table_has_every_room_and_no_other() -> None:
    assert {_room(name) for name in MODULES} == set(MAY_IMPORT)


def test_the_table_leads_down_only() -> None:
    below: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= below, room
        below.add(room)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_the_table_says_and_nothing_else(room: str) -> None:
    modules = [name for name in MODULES if _room(name) == room]
    imported = {other for name in modules for other in _imports(name, only_at_import=False) if other in MODULES}
    assert {_room(other) for other in imported - {"unicron_elastic"}} - {room} == set(MAY_IMPORT[room].split())


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_newcomer_can_list_a_room(room: str) -> None:
    assert len([name for name in MODULES if _room(name) == room]) <= FILES_MAX


@pytest.mark.parametrize("name", _under("unicron_elastic.worker"))
def test_the_training_process_knows_no_launcher_and_nothing_heavy(name: str) -> None:
    imported = _imports(name, only_at_import=False)
    assert imported & set(_under("unicron_elastic.launcher", "unicron_elastic.rendezvous")) == set()
    assert _top(imported) & HEAVY == set()


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
    "module",
    [
        "worker.start.bootstrap",
        "worker.start.warm",
        "recovery.machine",
        "launcher.main",
        "launcher.agent.process.supervisor",
        "base.incident",
    ],
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
        "unicron_elastic.launcher.agent",
        "unicron_elastic.launcher.agent.process",
        "unicron_elastic.launcher.agent.process.supervisor",
        "unicron_elastic.launcher.agent.process.sweeping",
        "unicron_elastic.worker",
        "unicron_elastic.worker.channel",
        "unicron_elastic.worker.helper_tasks",
        "unicron_elastic.worker.message",
        "unicron_elastic.worker.process",
        "unicron_elastic.worker.process.ignored_signals",
        "unicron_elastic.worker.process.mark",
        "unicron_elastic.worker.process.prctl",
        "unicron_elastic.worker.process.process_stat",
    }
