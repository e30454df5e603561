"""The peers' virtual environments: one each, made from the registry, with one torch that all of them share.

torch is installed once, in an environment of its own; each peer's finds it by a ``.pth`` file behind its own packages.
So every peer has its own dependencies, and they all run the same torch from the same files.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
NVRX_WHEEL = ("--platform=manylinux_2_39_x86_64", "--python-version=3.12", "--only-binary=:all:", "--no-deps")


@dataclass(frozen=True)
class Tool:
    """One environment. ``unpacked``: a requirement whose wheel is unpacked, because pip would refuse to install it."""

    name: str
    distribution: str
    requirements: tuple[str, ...]
    unpacked: str = ""
    programs: tuple[tuple[str, str], ...] = ()  # console scripts that pip does not write: name, "module:function"


TOOLS = (
    Tool("torchrun", "torch", (TORCH, "numpy")),
    Tool(
        "torchft",
        "torchft-nightly",
        ("torchft-nightly==2026.10.26", "requests"),
        programs=(("torchrun", "torch.distributed.run:main"),),
    ),
    Tool(
        "nvrx",
        "nvidia-resiliency-ext",
        (
            "defusedxml",
            "fastapi",
            "grpcio>=1.76",
            "grpcio-tools>=1.76",
            "httpx",
            "nvidia-ml-py",
            "packaging",
            "protobuf",
            "psutil",
            "pydantic>=2",
            "pydantic-settings",
            "pyyaml",
            "slowapi",
            "uvicorn",
        ),
        unpacked="nvidia-resiliency-ext==0.7.0",
        programs=(("ft_launcher", "nvidia_resiliency_ext.fault_tolerance.launcher:main"),),
    ),
    Tool("dlrover", "dlrover", ("dlrover[k8s]==0.6.1", "protobuf", "setuptools")),
)


class NotInstalledError(Exception):
    """An environment could not be made; the message is the last line of what pip said."""


def install(cache: Path) -> dict[str, str]:
    """Make the environments that ``cache`` does not have yet; of those that cannot be made, why not."""
    absent = {}
    for tool in TOOLS:
        if not (cache / tool.name / "complete").exists():
            print(f"{tool.name}: making {cache / tool.name}", file=sys.stderr, flush=True)
            try:
                _make(tool, cache)
            except NotInstalledError as error:
                absent[tool.name] = str(error)
    return absent


def python_of(cache: Path, name: str) -> Path:
    """The Python of an environment."""
    return cache / name / "bin" / "python"


def versions(cache: Path) -> dict[str, str]:
    """Each tool's distribution and version, as its own environment says, and of torch as it finds it."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]), version('torch'))"
    found = {}
    for tool in TOOLS:
        done = subprocess.run(
            [str(python_of(cache, tool.name)), "-c", code, tool.distribution],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            own, torch = done.stdout.split()
            found[tool.name] = f"{tool.distribution} {own}" + ("" if tool.name == "torchrun" else f" (torch {torch})")
    return found


def _make(tool: Tool, cache: Path) -> None:
    folder = cache / tool.name
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    site = next((folder / "lib").glob("python3.*")) / "site-packages"
    if tool.name != "torchrun":
        shared = next((cache / "torchrun" / "lib").glob("python3.*")) / "site-packages"
        (site / "shared_torch.pth").write_text(f"{shared}\n")
    pip = [str(python_of(cache, tool.name)), "-m", "pip", "install", "--quiet"]
    _run([*pip, *tool.requirements])  # what the shared folder has, pip sees and does not install again
    if tool.unpacked:
        _unpack(tool.unpacked, folder, site)
    for name, target in tool.programs:
        _write_program(folder / "bin" / name, folder / "bin" / "python", target)
    (folder / "complete").touch()


def _unpack(requirement: str, folder: Path, site: Path) -> None:
    """The Python files of a wheel that is for a newer C library than this machine's; its compiled ones are not used."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "download", "--quiet", f"--dest={folder / 'wheel'}"]
    _run([*pip, *NVRX_WHEEL, requirement])
    for wheel in (folder / "wheel").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if not name.endswith(".so")])


def _write_program(path: Path, python: Path, target: str) -> None:
    module, _, function = target.partition(":")
    path.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\n\nsys.exit({function}())\n")
    path.chmod(0o755)


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise NotInstalledError(lines[-1] if lines else f"{words[0]} ended with {done.returncode}")
