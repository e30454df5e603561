"""The memory cgroup of this process, and those it is part of.

Sources: the kernel's "Control Group v2" and "Memory Resource Controller" (docs.kernel.org/admin-
guide/cgroup-v2.html, cgroup-v1/memory.html), and cgroups(7) for /proc/PID/cgroup. Where both versions are mounted,
memory belongs to one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from unicron_elastic.health.host.files import read


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """`folders` are the cgroup's own folder, its parent's, and so on to `root`, the top that can be seen here."""

    version: int
    root: str
    folders: tuple[str, ...]

    def name(self, folder: str) -> str:
        """How people know a cgroup: its path below the mount."""
        return folder[len(self.root) :] or "/"


def find_memory_cgroup(proc: str = "/proc", mount: str = "/sys/fs/cgroup") -> MemoryCgroup | None:
    """The memory cgroup of this process, or None if there is none or it cannot be seen."""
    paths = _paths(read(f"{proc}/self/cgroup") or "")
    for version, root in ((1, f"{mount}/memory"), (2, mount), (2, f"{mount}/unified")):
        path = paths.get(version)
        if path is None or not os.path.isdir(root) or (version == 2 and not _is_v2(root)):
            continue
        if ".." in path.split("/"):
            return None  # above the top of this cgroup namespace
        folder = f"{root}{path}".rstrip("/")
        # A container without a cgroup namespace reads the host's path and sees its own cgroup as the top.
        folder = folder if os.path.isdir(folder) else root
        return MemoryCgroup(version, root, tuple(_upwards(folder, root)))
    return None


def _paths(text: str) -> dict[int, str]:
    """Version to path, from /proc/PID/cgroup: "4:memory:/path" is version 1, "0::/path" version 2."""
    paths: dict[int, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif controllers == "" and path:
            paths[2] = path
    return paths


def _is_v2(root: str) -> bool:
    return os.path.exists(f"{root}/cgroup.controllers")


def _upwards(folder: str, root: str) -> list[str]:
    folders = [folder]
    while folders[-1] != root:
        folders.append(os.path.dirname(folders[-1]))
    return folders
