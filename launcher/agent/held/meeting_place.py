"""Where a held keeper waits for the next launch: a socket in a folder that only this user can enter."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_NAME = "held"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class MeetingPlace:
    """`MeetingPlace` is that socket's place, by the descriptor of its folder; one keeper waits there."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._listener: socket.socket | None = None
        self._own: int | None = None  # what this process has made there, held so that nothing else gets its inode

    def listen(self) -> socket.socket:
        """Wait there from now on; who waited there before is told to end. Raises OSError.

        Another may come at the same time: whoever takes a socket from the place tells its keeper to end.
        """
        own = f"{_NAME}.{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._unlink(own)  # of a process that had this number before
        self._listener.bind(self._path_of(own))
        self._own = os.open(own, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        self._listener.listen()
        try:
            while not self._has_put(own):
                self._end_other(f"{own}.other")
        finally:
            self._unlink(own)
        return self._listener

    def accept(self) -> socket.socket | None:
        """Return the connection of who has come, None if that is another user or has gone again."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer(sock)[1] == os.geteuid():
                sock.setblocking(True)
                return sock
            sock.close()
        return None

    def connect(self, timeout_s: float, name: str = _NAME) -> socket.socket | None:
        """Return a connection to who waits there, None if nobody does. Raises OSError for one who is too busy."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout_s)
        try:
            sock.connect(self._path_of(name))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def leave(self) -> None:
        """Wait there no more."""
        if self._listener is not None:
            self._listener.close()
        if self._own is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(_NAME, dir_fd=self._folder, follow_symlinks=False), os.fstat(self._own)):
                    os.unlink(_NAME, dir_fd=self._folder)
            os.close(self._own)
            self._own = None

    def _path_of(self, name: str) -> str:
        """Short whatever the folder is called, and that very folder whoever moves another to its name."""
        return f"/proc/self/fd/{self._folder}/{name}"

    def _has_put(self, own: str) -> bool:
        """Put the own socket into the place; false if another is there."""
        try:
            os.link(own, _NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        return True

    def _end_other(self, name: str) -> None:
        """Take what is in the place to this ``name``, and tell who waits there to end."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(_NAME, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        with contextlib.suppress(OSError):
            sock = self.connect(0.0, name)
            if sock is not None:
                sock.close()  # a keeper whose agent is gone ends
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of who is at the other end: who has connected, or who listens."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
