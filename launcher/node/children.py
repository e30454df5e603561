"""A child of the cluster's agent: one ``unicron-run``, its output, and the news of its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.node.output_sender import OutputSender
from unicron_elastic.rendezvous.records.plan_keys import VERDICT_VARIABLE

GRACE_S = 2.0  # for what a child's own children write after its end
_VERDICT_BYTES = 8192


class Child:
    """From ``start`` on. ``what`` it runs is its owner's; ``exit_code`` is None until it has ended."""

    def __init__(
        self,
        what: Any,
        command: Sequence[str],
        directory: str,
        env: Mapping[str, str],
        *,
        on_end: Callable[[Child], None],
    ) -> None:
        """``on_end`` is called once, from another thread."""
        self.what = what
        self.exit_code: int | None = None
        self.why = ""  # it could not be seen to its end
        self.verdict = ""  # how the job has ended, as the child says: well, failed, or "" if it goes on
        self.why_failed = ""  # as a sentence, if the child says that
        self._command, self._directory, self._env = command, directory, env
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._output: OutputSender | None = None
        self._address = ""  # where its output is wanted
        self._verdict: BinaryIO | None = None  # in memory: nothing is left if this process is killed

    def start(
        self,
        output: str,
        secret: str,
        host: str,
        say: Callable[[str], None],
        links: Mapping[str, socket.socket] = {},
    ) -> None:
        """Starts it; what it writes goes to ``output``, HOST:PORT, and for want of that to this process's own streams.

        ``links`` are sockets on which it speaks to this process, by the variables that tell it of them; they are
        closed here. Raises OSError.
        """
        with contextlib.ExitStack() as closing:
            for link in links.values():
                closing.enter_context(link)
            process = self._started(links)
        try:
            self._follow(process, output, secret, host, say)
        except BaseException:
            process.kill()  # nobody would hear of its end
            process.wait()
            raise

    def _started(self, links: Mapping[str, socket.socket]) -> subprocess.Popen[bytes]:
        verdict = self._verdict = os.fdopen(os.memfd_create("unicron-verdict"), "rb")
        # A session of its own: Ctrl-C here is for the agent, which stops its child as it should be stopped.
        told = {name: str(link.fileno()) for name, link in links.items()}
        return subprocess.Popen(
            self._command,
            cwd=self._directory,
            env={**self._env, **told, VERDICT_VARIABLE: f"/proc/self/fd/{verdict.fileno()}"},
            pass_fds=[verdict.fileno(), *(link.fileno() for link in links.values())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _follow(
        self, process: subprocess.Popen[bytes], output: str, secret: str, host: str, say: Callable[[str], None]
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        with process.stdout as out, process.stderr as err:
            self._address = output
            self._output = OutputSender(
                output,
                secret,
                host,
                out.fileno(),
                err.fileno(),
                say=lambda words: say(words) if self._address else None,
            )
        threading.Thread(target=self._wait, name="unicron-child", daemon=True).start()

    def set_output(self, address: str) -> None:
        """What it writes goes there from now on."""
        if self._output is not None and address != self._address:
            self._address = address
            self._output.set_address(address)

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is there."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self) -> None:
        assert self._process is not None
        assert self._output is not None
        self.exit_code = self._process.wait()
        self._output.finish(GRACE_S)
        self._output.join(GRACE_S)
        self.verdict, self.why_failed = self._read_verdict()
        self._on_end(self)

    def _read_verdict(self) -> tuple[str, str]:
        """How the job has ended, and why it has failed; both "" if the child said nothing."""
        assert self._verdict is not None
        with self._verdict as file:
            word, _, why = file.read(_VERDICT_BYTES).decode(errors="replace").partition(" ")
        return (word, one_line(why)) if word in ("well", "failed") else ("", "")
