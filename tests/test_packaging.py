"""What is installed is what is here, and once: launcher/ and rendezvous/ are linked into the package."""

from __future__ import annotations

import configparser
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("unicron_elastic", "launcher", "rendezvous")


def _pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded


def _installed_name(path: Path) -> str:
    """The name under which a folder or file of the repository is installed, with slashes."""
    relative = path.relative_to(ROOT)
    inside = relative if relative.parts[0] == "unicron_elastic" else Path("unicron_elastic") / relative
    return inside.as_posix()


@pytest.mark.parametrize("folder", SOURCES[1:])
def test_the_package_has_a_relative_link_to_a_folder_at_the_top(folder: str) -> None:
    assert (ROOT / "unicron_elastic" / folder).readlink() == Path("..", folder)


def test_who_walks_the_sources_meets_each_file_once() -> None:
    files = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    assert len({path.resolve() for path in files}) == len(files)


@pytest.mark.parametrize("name", ["launcher.main", "launcher.plugin"])
def test_a_module_is_imported_through_the_package(name: str) -> None:
    spec = importlib.util.find_spec(f"unicron_elastic.{name}")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / f"{name.replace('.', '/')}.py"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for source in SOURCES for path in (ROOT / source).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_coverage_measures_all_three() -> None:
    assert sorted(_pyproject()["tool"]["coverage"]["run"]["source_pkgs"]) == [
        "unicron_elastic",
        "unicron_elastic.launcher",
        "unicron_elastic.rendezvous",
    ]


@pytest.mark.parametrize("package", ["launcher", "rendezvous"])
def test_a_second_copy_cannot_be_imported_from_the_root(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: import unicron_elastic.{package}, not {package}" in done.stderr


@pytest.fixture(scope="module", params=["folder", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from a copy of the sources, or from an archive made of it; nothing is left in the repository."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    if request.param == "sdist":
        _run(["-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"], source)
        (source,) = folder.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _run(["-m", "pip", "wheel", *options, "-w", str(folder), str(source)], folder)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def _run(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_source_file_and_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    expected = {_installed_name(path) for source in SOURCES for path in (ROOT / source).rglob("*.py")}
    expected.add("unicron_elastic/py.typed")
    expected |= {_installed_name(path) for path in (ROOT / "launcher" / "export" / "web" / "page").iterdir()}
    assert "unicron_elastic/worker/inject/sitecustomize.py" in expected
    assert "unicron_elastic/launcher/main.py" in expected
    assert sorted(name for name in wheel.namelist() if ".dist-info/" not in name) == sorted(expected)


def test_the_wheel_declares_the_commands_and_they_exist(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    parsed = configparser.ConfigParser()
    parsed.read_string(wheel.read(name).decode())
    assert dict(parsed["console_scripts"]) == _pyproject()["project"]["scripts"]
    names = set(wheel.namelist())
    for target in parsed["console_scripts"].values():
        module = target.partition(":")[0]
        assert f"{module.replace('.', '/')}.py" in names


def test_the_wheel_carries_its_licence(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
