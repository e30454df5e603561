"""A site's own check: a command that ends with 0, 1 or 2 for OK, WARNING or CRITICAL and says why in its first line.

Source: the Monitoring Plugins' development guidelines (monitoring-plugins.org/doc/guidelines.html), sections "Plugin
Output" and "Plugin Return Codes", so that what a site has for Nagios, Icinga or node-problem-detector can be named as
it is.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from unicron_elastic.base.fault import Severity
from unicron_elastic.base.finding import CHECK_FAILED, Finding, Level, finding

_LEVELS = {0: Level.OK, 1: Level.WARN, 2: Level.CRITICAL}
_KEPT_BYTES = 4096
_KEPT_CHARACTERS = 300
_END_S = 1.0


class CommandProbe:
    """Runs `command`, a list of words or a line for the shell, with the environment of this process.

    It is the leader of a process group, which is killed after `timeout_s`. `severity` is what CRITICAL means; the
    default isolates the node, as a failing health check does in Slurm. Whatever else goes wrong with it is a warning.
    """

    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        name: str | None = None,
        timeout_s: float = 30.0,
        severity: Severity = Severity.SEV1,
    ) -> None:
        self._words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self.name = name or (command if isinstance(command, str) else shlex.join(command))
        self._timeout_s = timeout_s
        self._severity = severity
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, now: float) -> list[Finding]:
        """What the command says; lasts as long as the command, at most little more than its time-out."""
        if self._running is not None and not self._has_gone():
            return [self._warning("is still there although it was killed: it waits in the kernel", now)]
        try:
            code, text = self._run()
        except OSError as error:
            return [self._warning(f"cannot be run: {error.strerror}", now)]
        if self._is_closed:
            return []
        said = f": {text}" if text else ""
        if code is None:
            return [self._warning(f"did not end within {self._timeout_s:g} s and was killed{said}", now)]
        level = _LEVELS.get(code)
        if level is None:
            how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
            return [self._warning(f"{how}, which says neither good nor bad{said}", now)]
        if level is Level.OK:
            return []
        reason = self._sentence(f"says {text}" if text else "found something wrong and does not say what")
        return [finding("command", level, CHECK_FAILED, self.name, reason, at=now, severity=self._severity)]

    def close(self) -> None:
        """Kills what runs, in whichever thread, and runs nothing any more."""
        with self._lock:
            self._is_closed = True
            self._kill()

    def _run(self) -> tuple[int | None, str]:
        """The exit code, None if it had to be killed, and the first line that it wrote."""
        with self._lock:
            if self._is_closed:
                return None, ""
            self._running = process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        assert process.stdout is not None
        assert process.stderr is not None
        has_ended = False
        try:
            with process.stdout, process.stderr:
                written = _Written(process.stdout.fileno(), process.stderr.fileno())
                has_ended = written.follow(process.pid, self._timeout_s)
        finally:
            if not has_ended:
                with self._lock:
                    self._kill()
            self._wait(process)
        return (process.returncode if has_ended else None), written.first_line()

    def _kill(self) -> None:
        """Kill the command, with the lock held, so that the pid has not been given to another process meanwhile."""
        if self._running is not None and self._running.returncode is None:
            try:
                os.killpg(self._running.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has ended, or has become another user

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return  # not even SIGKILL ends it: it is looked for at the next check
        self._has_gone()

    def _has_gone(self) -> bool:
        with self._lock:
            if self._running is not None and self._running.poll() is not None:
                self._running = None
            return self._running is None

    def _warning(self, words: str, now: float) -> Finding:
        return finding(
            "command", Level.WARN, CHECK_FAILED, self.name, self._sentence(words), at=now, severity=Severity.SEV2
        )

    def _sentence(self, words: str) -> str:
        return f"The check {self.name} {words.rstrip('.')}."


class _Written:
    """The beginning of what a process writes; the rest is read and dropped, so that it never has to wait."""

    def __init__(self, output: int, errors: int) -> None:
        self._kept = {output: b"", errors: b""}
        for descriptor in self._kept:
            os.set_blocking(descriptor, False)

    def follow(self, pid: int, timeout_s: float) -> bool:
        """Reads until the process ends, whoever else still holds its output; whether it did within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(pid)
            try:
                for descriptor in (ended, *self._kept):
                    selector.register(descriptor, selectors.EVENT_READ)
                while (left := deadline - time.monotonic()) > 0:
                    ready = {key.fd for key, _ in selector.select(left)}
                    for descriptor in ready - {ended}:
                        if not self._read(descriptor):
                            selector.unregister(descriptor)
                    if ended in ready:
                        for descriptor in self._kept:
                            self._read(descriptor)
                        return True
            finally:
                os.close(ended)
        return False

    def first_line(self) -> str:
        """Return the first line of its output, or else of its errors; without the figures that follow a "|"."""
        for kept in self._kept.values():
            lines = kept.decode("utf-8", "replace").strip().splitlines()
            if lines:
                line = lines[0].partition("|")[0].strip()
                return "".join(character for character in line if character.isprintable())[:_KEPT_CHARACTERS]
        return ""

    def _read(self, descriptor: int) -> bool:
        """Reads once; False at the end."""
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        kept = self._kept[descriptor]
        self._kept[descriptor] = kept + part[: _KEPT_BYTES - len(kept)]
        return bool(part)
