"""The folders of states in storage: ``step-120`` is whole if it has a manifest, which is written last.

The manifest has the size and the checksum of each file.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import stat
import sys
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path
from types import MappingProxyType

from unicron_elastic.state.checksum import Checksum

MANIFEST = "unicron.json"
RANDOM_OF_FIRST = "random of rank 0"  # in what is loaded, for ranks that have none of their own
Description = dict[str, int | str]
_SHARDS = ".distcp"  # torch's files of tensors
_told_of_later: set[Path] = set()
READ_BYTES = 4 * 1024 * 1024


def folder_of(folder: Path, step: int) -> Path:
    """Where the state of a step is."""
    return folder / f"step-{step}"


def steps_in(folder: Path, *, finished: bool = True) -> list[int]:
    """The steps whose states are there, the oldest first; with ``finished`` false, those that were not finished."""
    found = [
        (int(match[1]), path)
        for path in _entries(folder)
        if (match := re.fullmatch(r"step-(0|[1-9]\d{0,14})", path.name, re.ASCII))
    ]
    return sorted(step for step, path in found if os.path.exists(path / MANIFEST) == finished)


def finish(path: Path, known: Mapping[str, Description] = MappingProxyType({})) -> None:
    """Writes the manifest of a folder whose files are all written, so that it counts from now on. Raises OSError.

    ``known``: what is ``described`` already, by name.
    """
    files = {each.name: known[each.name] if each.name in known else described(each) for each in _files(path)}
    unfinished = path / f"{MANIFEST}.{os.getpid()}"
    with unfinished.open("w") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path / MANIFEST)
    sync(path)


def check(path: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Raises ValueError that names the file which is not what was written, if there is one.

    ``share``: a rank that looks at the files, and how many ranks share the shards' files among them; each rank looks
    at all others, since every rank reads them.
    """
    try:
        with _opened(path / MANIFEST) as manifest:
            told = json.loads(manifest.read())
        files = dict(told["files"])
        for name in _of_share(files, *share):
            if described(path / Path(name).name) != files[name]:
                raise ValueError(f"the file {path / Path(name).name} is not what was written: its checksum is wrong")
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not whole: {error}") from error


def _of_share(files: Collection[str], rank: int, world_size: int) -> list[str]:
    """The names of the files at which a rank looks."""
    shards = sorted(name for name in files if name.endswith(_SHARDS))
    if len(shards) > 1:
        shards = shards[rank % world_size :: world_size]
    return sorted(name for name in files if not name.endswith(_SHARDS)) + shards


def to_remove(finished: Collection[int], unfinished: Collection[int], keep: int, written: int) -> list[int]:
    """Which steps go once step ``written`` is: up to it, all but the newest ``keep``, and what was not finished before.

    Later ones stay, as they are not of this training, or of its future that was given up.
    """
    whole = sorted(step for step in finished if step <= written)
    return whole[: -keep or None] + [step for step in sorted(unfinished) if step < written]


def tidy(path: Path, keep: int, unfinished: Collection[int] = ()) -> None:
    """Removes what is too old once the state in ``path`` is there, and says once of a folder if it holds what is later.

    ``unfinished``: steps that were begun before and never finished.
    """
    folder, written, finished = path.parent, int(path.name.partition("-")[2]), steps_in(path.parent)
    for step in to_remove(finished, unfinished, keep, written):
        remove(folder_of(folder, step))
    last = max(finished, default=written)
    if last > written and folder not in _told_of_later:
        _told_of_later.add(folder)
        sys.stderr.write(
            f"unicron: {folder} holds a state of step {last}, later than step {written}, which was saved there now, "
            "and run.restore() takes the latest: give each training a folder of its own.\n"
        )


def remove(path: Path) -> None:
    """Removes a folder, its manifest first, so that half of it does not count. Errors are left to the next time."""
    try:
        (path / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith(MANIFEST))


def _opened(path: Path) -> FileIO:
    """A file to be read. Raises OSError, also for what is none: to open a pipe would wait until somebody writes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no regular file")
    return FileIO(fd, "rb")


def described(path: Path) -> Description:
    """The size and the checksum of a file. Raises OSError."""
    checksum, size = Checksum(), 0
    # Not from malloc: a thread of its own writes each state, and glibc would keep such a block in each of its arenas.
    room = memoryview(mmap.mmap(-1, READ_BYTES))
    with _opened(path) as file:
        while count := file.readinto(room):
            while count < READ_BYTES and (more := file.readinto(room[count:])):
                count += more
            checksum.add(room[:count])
            size += count
    return {"bytes": size, "sum": checksum.digest().hex()}


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlast a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
