"""Whose ``nvidia_resiliency_ext.fault_tolerance`` a script gets, with and without an installed package."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OFFER = """
from unicron_elastic.worker.rank_monitor.finder import offer_rank_monitor
offer_rank_monitor(None, None)
"""

INSTALLED = {
    "__init__.py": "__version__ = '0.7.0'",
    "checkpointing/__init__.py": "whose = 'theirs'",
    "ptl_resiliency.py": "import nvidia_resiliency_ext.fault_tolerance as ft\nclient = ft.RankMonitorClient",
    "inprocess.py": "from .fault_tolerance.rank_monitor_server import RankMonitorServer",
    "fault_tolerance/__init__.py": "raise AssertionError('it would want a server')",
    "fault_tolerance/rank_monitor_client.py": "raise AssertionError('it would want a server')",
    "fault_tolerance/rank_monitor_server.py": "from .data import whose\nclass RankMonitorServer: pass",
    "fault_tolerance/data.py": "whose = 'theirs'",
    "fault_tolerance/dict_utils.py": "whose = 'theirs'",
}

IMPORTS = [
    "import nvidia_resiliency_ext.fault_tolerance as ft",
    "import nvidia_resiliency_ext.fault_tolerance; ft = nvidia_resiliency_ext.fault_tolerance",
    "from nvidia_resiliency_ext import fault_tolerance as ft",
    "import nvidia_resiliency_ext.fault_tolerance.rank_monitor_client as ft",
    "import importlib; ft = importlib.import_module('nvidia_resiliency_ext.fault_tolerance')",
    "ft = __import__('nvidia_resiliency_ext.fault_tolerance', fromlist=['*'])",
]


def run(code: str, path: Path | None = None, offer: str = OFFER) -> str:
    """What a script prints that runs after the offer; with an installed package if there is a ``path``."""
    script = offer + (f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else "") + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a package that looks like NVIDIA's."""
    for name, content in INSTALLED.items():
        file = tmp_path / "nvidia_resiliency_ext" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return tmp_path


@pytest.mark.parametrize("statement", IMPORTS)
def test_it_is_ours_if_none_is_installed(statement: str) -> None:
    assert run(f"{statement}\nprint(ft.RankMonitorClient.__module__)").startswith("unicron_elastic.")


@pytest.mark.parametrize("statement", IMPORTS)
def test_it_is_ours_though_another_is_installed(statement: str, installed: Path) -> None:
    assert run(f"{statement}\nprint(ft.RankMonitorClient.__module__)", installed).startswith("unicron_elastic.")


def test_all_names_that_callers_import() -> None:
    run("""
    from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorClient, RankMonitorClientError
    from nvidia_resiliency_ext.fault_tolerance import WorkloadAction, WorkloadControlRequest
    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig as FromConfig
    from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts
    assert FromConfig is FaultToleranceConfig
    """)


@pytest.mark.parametrize(
    "statement",
    [
        "import nvidia_resiliency_ext",
        "import nvidia_resiliency_ext.checkpointing",
        "import nvidia_resiliency_ext.checkpointing.local",
        "from nvidia_resiliency_ext import inprocess",
        "from nvidia_resiliency_ext.inprocess import CallWrapper",
    ],
)
@pytest.mark.parametrize("before", ["", "import nvidia_resiliency_ext.fault_tolerance"])
def test_the_rest_is_missing_if_none_is_installed(statement: str, before: str) -> None:
    """After ours was imported the package itself is there, as small as it is, and names no version worth using."""
    code = f"""
    def load(): {before or "pass"}
    load()
    try:
        exec({statement!r})
    except ImportError as error:
        print(error)
    else:
        import nvidia_resiliency_ext
        print(nvidia_resiliency_ext.__version__)
    """
    is_there = bool(before) and statement == "import nvidia_resiliency_ext"
    said = run(code)
    assert said == "0.0.0" if is_there else "nvidia_resiliency_ext" in said


def test_who_asks_whether_one_is_installed_hears_the_truth(installed: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('nvidia_resiliency_ext') is not None)"
    assert run(code) == "False"
    assert run(code, installed) == "True"


def test_the_rest_of_an_installed_package_is_its_own(installed: Path) -> None:
    run(
        """
        import nvidia_resiliency_ext, nvidia_resiliency_ext.fault_tolerance as ft
        assert nvidia_resiliency_ext.__version__ == "0.7.0"
        from nvidia_resiliency_ext import checkpointing
        from nvidia_resiliency_ext.fault_tolerance import data, dict_utils
        assert {module.whose for module in (checkpointing, data, dict_utils)} == {"theirs"}
        from nvidia_resiliency_ext import inprocess, ptl_resiliency
        assert ft.RankMonitorServer is inprocess.RankMonitorServer
        assert ptl_resiliency.client is ft.RankMonitorClient
        """,
        installed,
    )


@pytest.mark.parametrize("name", ["RankMonitorServer", "unheard_of"])
def test_a_name_that_is_not_there(name: str) -> None:
    code = f"""
    try:
        from nvidia_resiliency_ext.fault_tolerance import {name}
    except ImportError as error:
        print(error)
    """
    assert name in run(code)


def test_an_offer_alone_imports_nothing_more() -> None:
    code = """
    import sys
    print([name for name in sys.modules if name.endswith((".client", ".surface")) or name.startswith("nvidia_")])
    """
    assert run(code) == "[]"


def test_two_offers_are_one() -> None:
    assert (
        run("import sys; print(sum(type(each).__name__ == '_Finder' for each in sys.meta_path))", offer=OFFER * 2)
        == "1"
    )
