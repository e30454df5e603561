"""Where a user's ledgers and quarantine are; and that a folder whose name everybody can guess is this user's alone."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def state_folder() -> Path:
    """Where this user's ledgers are: ``unicron`` in $XDG_STATE_HOME or ~/.local/state, else in the temporary folder."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state_home):  # a relative one is invalid and to be ignored (XDG base directory specification)
        return Path(state_home) / "unicron"
    try:
        return Path.home() / ".local" / "state" / "unicron"
    except RuntimeError:  # a container whose user has no home
        return _in_temporary_folder()


def hold_own(path: Path, *, make: bool = False) -> None:
    """Before ``path`` is opened: refuses the folder in the temporary one if somebody else may have prepared it.

    There everybody may make ``unicron-UID``, or a link of that name. Once it is a folder of this user that is closed to
    others, nobody can put another in its place. Other paths are left alone. ``make``: makes the folder if it is not
    there. Raises PermissionError, whose text says what is wrong and what to do; other OSErrors if it cannot be made.
    """
    folder = _in_temporary_folder()
    if folder not in (path, *path.parents):
        return
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if wrong := _wrong(found):
        advice = "give --unicron-ledger, or set XDG_STATE_HOME"
        raise PermissionError(errno.EACCES, f"{folder} {wrong}; {advice}")


@contextlib.contextmanager
def open_own_folder(runtime_dir: str) -> Iterator[int]:
    """Open a folder for sockets that only this user can enter: one in $XDG_RUNTIME_DIR, or in the temporary folder.

    The descriptor is of that very folder, whoever moves another to its name. Raises OSError; the text of a
    PermissionError says what is wrong.
    """
    folder = _in_temporary_folder()
    with contextlib.suppress(OSError):
        if os.path.isabs(runtime_dir) and not _wrong(os.lstat(runtime_dir)):
            folder = Path(runtime_dir) / "unicron"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if wrong := _wrong(os.fstat(opened)):
            raise PermissionError(errno.EACCES, f"{folder} {wrong}")
        yield opened
    finally:
        os.close(opened)


def _in_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"unicron-{os.getuid()}"


def _wrong(found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder, but a link or a file that anybody may have made"
    if found.st_uid != os.getuid():
        return f"belongs to the user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to other users (mode {mode:04o}, should be 0700)" if mode & 0o077 else ""
