"""The fake NVML for the tests of GPU probes, a tree for those of the host, and what collects findings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeNvml
from health_lab import DEADLINE_S, Findings, Tree

from unicron_elastic.health.gpu.nvml import GpuProbe


@pytest.fixture
def findings() -> Findings:
    return Findings()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A healthy node."""
    made = Tree(tmp_path / "tree")
    made.healthy()
    return made


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The fake library, as a driver of today and as an old one."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to make the fake NVML with")
    folder = tmp_path_factory.mktemp("nvml")
    name = "libnvidia-ml.so.1"
    return {
        "new": fake_nvml.compile_library(compiler, folder / "new" / name),
        "old": fake_nvml.compile_library(compiler, folder / "old" / name, "-DOLD_DRIVER"),
    }


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A scenario; nothing is loaded yet."""
    folder = tmp_path / "fake"
    folder.mkdir()
    made = FakeNvml(folder)
    yield made
    made.close()


@pytest.fixture
def load_fake(
    libraries: dict[str, Path], fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Puts a fresh copy of the fake library under the real pynvml."""

    loaded: list[str] = []

    def load(kind: str) -> None:
        if loaded:
            assert loaded == [kind], "one library a test"
            return
        loaded.append(kind)
        monkeypatch.setenv("FAKE_NVML", str(fake.folder))
        monkeypatch.setattr(pynvml, "nvmlLib", fake_nvml.load_copy(libraries[kind], tmp_path))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return load


@pytest.fixture
def make_probe(load_fake: Callable[[str], None], findings: Findings) -> Iterator[Callable[..., GpuProbe]]:
    """Makes probes on the fake library and, at the end, sees that they stop and give the library back."""
    probes: list[GpuProbe] = []

    def make(visible: str | None = None, kind: str = "new") -> GpuProbe:
        load_fake(kind)
        probe = GpuProbe(findings, say=findings.say, visible_devices=visible)
        probes.append(probe)
        return probe

    yield make
    for probe in probes:
        assert probe.stop(DEADLINE_S)
    if probes:
        assert pynvml.nvmlLib.fakeUsers() == 0
