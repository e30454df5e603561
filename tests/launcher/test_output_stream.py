"""Output that goes from one host to another, with real sockets, pipes and processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pytest
from free_port import free_port

from unicron_elastic.base.seal import SEAL_BYTES, Seal
from unicron_elastic.launcher.node.output_receiver import (
    COUNT,
    END,
    FRAME_BYTES_MAX,
    HEADER,
    WINDOW_BYTES,
    OutputReceiver,
    key_for_output,
)
from unicron_elastic.launcher.node.output_sender import OutputSender
from unicron_elastic.rendezvous.cluster.heartbeat_wire import (
    Hello,
    Nonces,
    WireError,
    challenge,
    read,
    seal_of,
    welcome,
)

DEADLINE_S = 20.0
SECRET = "5e" * 32
LINES = "import sys\nfor n in range(int(sys.argv[1])): print(f'{n:06}', flush=True)"
LINES_UNTIL_TOLD = """
import select, sys, time
n = 0
while not select.select([0], [], [], 0.001)[0]:
    print(f"{n:06}", flush=True)
    n += 1
"""
RECEIVER = """
import sys, threading
from unicron_elastic.launcher.node.output_receiver import OutputReceiver
receiver = OutputReceiver(sys.argv[1], sys.stdout.buffer, sys.stderr.buffer, host="127.0.0.1", beat_s=0.1)
print(receiver.address_for("127.0.0.1"), flush=True)
threading.Event().wait()
"""


class Screen:
    """Where output is shown: the far end of a pipe, which is read by a thread."""

    def __init__(self, reads: bool = True) -> None:
        self._reader, writer = os.pipe()
        self.file: BinaryIO = os.fdopen(writer, "wb", buffering=0)
        self.shown = bytearray()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._thread.start()

    def start(self) -> None:
        self._thread.start()

    def wait(self, condition: Callable[[bytes], object]) -> bytes:
        with self._changed:
            came = self._changed.wait_for(lambda: condition(bytes(self.shown)), DEADLINE_S)
            assert came, f"the deadline has passed; shown: ...{bytes(self.shown[-200:])!r}"
            return bytes(self.shown)

    def end(self) -> bytes:
        """All that was shown, once nobody can show more."""
        self.file.close()
        if self._thread.ident is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive(), "somebody holds the pipe open"
        return bytes(self.shown)

    def close(self) -> None:
        self.end()
        with contextlib.suppress(OSError):
            os.close(self._reader)

    def break_off(self) -> None:
        """Nobody reads any longer, as after ``| head``."""
        os.close(self._reader)

    def _read(self) -> None:
        while data := os.read(self._reader, 1 << 20):
            with self._changed:
                self.shown += data
                self._changed.notify_all()


class Terminal:
    """A receiver and what it shows."""

    def __init__(
        self, opened: contextlib.ExitStack, *, host: str = "127.0.0.1", reads: bool = True, **given: Any
    ) -> None:
        self.out, self.err = Screen(reads), Screen()
        opened.callback(self.out.close)
        opened.callback(self.err.close)
        self.receiver = OutputReceiver(SECRET, self.out.file, self.err.file, host=host, beat_s=0.05, **given)
        opened.callback(self.receiver.close)
        self.address = self.receiver.address_for("127.0.0.1")


class Part:
    """A child on another host, and the sender of its output."""

    def __init__(self, opened: contextlib.ExitStack, address: str, code: str, *args: object, **named: object) -> None:
        self.out, self.err, self.said = Screen(), Screen(), list[str]()
        opened.callback(self.out.close)
        opened.callback(self.err.close)
        pipe = subprocess.PIPE
        argv = [sys.executable, "-S", "-c", code, *map(str, args)]
        self.child = opened.enter_context(subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe))
        opened.callback(self.child.kill)
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        fds = self.child.stdout.fileno(), self.child.stderr.fileno()
        given = {"secret": SECRET, "host": "there", "retry_s": 0.05, "stall_s": 5.0, **named}
        files = {"stdout": self.out.file, "stderr": self.err.file}
        self.sender = OutputSender(address, stdout_fd=fds[0], stderr_fd=fds[1], say=self.said.append, **given, **files)
        opened.callback(self.sender.join, DEADLINE_S)
        opened.callback(self.sender.finish, 0.0)

    def tell_to_end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()

    def end(self) -> None:
        assert self.child.wait(DEADLINE_S) == 0
        assert self.sender.join(DEADLINE_S), "the sender does not end"


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        yield stack
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"{thread.name} is left"


def running_receiver(opened: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], str]:
    argv = [sys.executable, "-c", RECEIVER, SECRET]
    process = opened.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
    opened.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def numbers(text: bytes) -> list[int]:
    assert not text or text.endswith(b"\n")
    assert all(len(line) == 6 for line in text.split()), "lines are whole"
    return [int(line) for line in text.split()]


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_each_stream_comes_as_it_was_written(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    code = r"""
import os
os.write(1, b"one\r\n\x00\xff\xfe \x1b[31mred")
os.write(2, b"wrong\n\nno newline")
"""
    part = Part(opened, here.address, code)
    part.end()
    assert here.receiver.drain(DEADLINE_S, ["there"])
    here.receiver.close()
    assert here.out.end() == b"one\r\n\x00\xff\xfe \x1b[31mred"
    assert here.err.end() == b"wrong\n\nno newline"
    assert (part.out.end(), part.err.end(), part.said) == (b"", b"", [])


def test_lines_of_two_hosts_are_not_mixed(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    code = """
import os, sys
for n in range(3000):
    line = sys.argv[1].encode() * (n % 300) + b"\\n"
    os.write(1, line[: n % 7])
    os.write(1, line[n % 7 :])
"""
    parts = [Part(opened, here.address, code, name, host=name) for name in "ab"]
    for part in parts:
        part.end()
    assert here.receiver.drain(DEADLINE_S, "ab")
    here.receiver.close()
    lines = here.out.end().split(b"\n")
    for name in (b"a", b"b"):
        assert [len(line) for line in lines if line[:1] == name] == [n % 300 for n in range(3000) if n % 300]
    assert all(len(set(line)) <= 1 for line in lines)


def test_fifty_megabytes_come_byte_for_byte(opened: contextlib.ExitStack, tmp_path: os.PathLike[str]) -> None:
    code = """
import hashlib, os, random
block = random.Random(0).randbytes(1 << 20)
told = hashlib.sha256()
for n in range(50):
    data = block[n:] + block[:n]
    told.update(data)
    while data:
        data = data[os.write(1, data) :]
os.write(2, told.hexdigest().encode())
"""
    with open(os.path.join(tmp_path, "shown"), "w+b") as file:
        err = Screen()
        opened.callback(err.close)
        receiver = OutputReceiver(SECRET, file, err.file, host="127.0.0.1")
        opened.callback(receiver.close)
        began_at = time.monotonic()
        part = Part(opened, receiver.address_for("127.0.0.1"), code)
        part.end()
        assert receiver.drain(DEADLINE_S, ["there"])
        took_s = time.monotonic() - began_at
        file.seek(0)
        told = hashlib.sha256(file.read()).hexdigest().encode()
    print(f"{50 / took_s:.0f} MiB/s")
    assert err.wait(lambda shown: len(shown) == 64) == told
    assert part.said == []


def test_what_is_no_whole_line_is_shown_after_a_moment(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    part = Part(opened, here.address, "import os; os.write(1, b'go on? '); os.read(0, 1)")
    here.out.wait(lambda shown: shown == b"go on? ")
    part.tell_to_end()
    part.end()


def test_a_progress_bar_that_never_stands_still_is_shown(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    code = "import os, select\nwhile not select.select([0], [], [], 0.01)[0]: os.write(1, b'\\r|=')"
    part = Part(opened, here.address, code)
    here.out.wait(lambda shown: shown.count(b"\r") > 20)
    part.tell_to_end()
    part.end()


def test_a_line_comes_in_milliseconds(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    code = "import os\nwhile os.read(0, 1): os.write(1, b'x\\n')"
    part = Part(opened, here.address, code)
    assert part.child.stdin is not None
    took_s = []
    for count in range(1, 101):
        began_at = time.monotonic()
        os.write(part.child.stdin.fileno(), b"x")
        here.out.wait(lambda shown, count=count: len(shown) == 2 * count)
        took_s.append(time.monotonic() - began_at)
    print(f"{sorted(took_s)[50] * 1000:.2f} ms")
    assert sorted(took_s)[50] < 0.04, "not held until it stands still"
    part.tell_to_end()
    part.end()


def test_ipv6(opened: contextlib.ExitStack) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    here = Terminal(opened, host="")
    port = here.receiver.port
    assert here.receiver.address_for("::1") == here.receiver.address_for("[::1]") == f"[::1]:{port}"
    for address in (f"[::1]:{port}", f"localhost:{port}", f"127.0.0.1:{port}"):
        Part(opened, address, "print(1)").end()
    assert here.receiver.drain(DEADLINE_S)
    here.out.wait(lambda shown: shown == b"1\n" * 3)


# -- where nobody is, or nobody any longer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "The output is shown here: nobody has asked for it."),
        ("127.0.0.1", "'127.0.0.1' is no HOST:PORT"),
        ("a..b:1", "and is shown here: "),
        ("refused", "Connection refused"),
    ],
)
def test_without_anybody_it_is_shown_where_it_is(opened: contextlib.ExitStack, address: str, reason: str) -> None:
    address = f"127.0.0.1:{free_port()}" if address == "refused" else address
    part = Part(opened, address, LINES + "\nsys.stderr.write('last')", 1000)
    part.end()
    assert numbers(part.out.end()) == list(range(1000))
    assert part.err.end() == b"last"
    assert len(part.said) == 1
    assert reason in part.said[0]


def test_who_does_not_know_the_secret_is_refused_and_refuses(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    part = Part(opened, here.address, LINES, 1000, secret="another")
    part.end()
    assert numbers(part.out.end()) == list(range(1000))
    (said,) = part.said
    assert said.startswith(f"The output cannot be sent to {here.address}, and is shown here: the two do not know")
    assert here.receiver.drain(DEADLINE_S)
    here.receiver.close()
    assert here.out.end() == b""


def test_an_impostor_gets_no_output(opened: contextlib.ExitStack) -> None:
    peer = opened.enter_context(Peer())
    part = Part(opened, peer.address, LINES, 100)
    sock, _ = peer.greeted("another secret", is_checked=False)
    part.end()
    assert numbers(part.out.end()) == list(range(100))
    assert sock.recv(1) == b""
    assert "the coordinator does not know" in part.said[0]


def test_without_a_secret_nothing_begins(opened: contextlib.ExitStack) -> None:
    with pytest.raises(WireError, match="secret"):
        OutputReceiver("", io.BytesIO(), io.BytesIO())
    part = Part(opened, "127.0.0.1:1", "print(1)", secret="")
    part.end()
    assert part.out.end() == b"1\n"
    assert "secret is not known" in part.said[0]


def test_a_receiver_that_is_killed_loses_nothing(opened: contextlib.ExitStack) -> None:
    process, address = running_receiver(opened)
    part = Part(opened, address, LINES_UNTIL_TOLD)
    assert process.stdout is not None
    shown = b"".join(process.stdout.readline() for _ in range(20))
    process.kill()
    shown += process.stdout.read()
    part.out.wait(lambda local: local.count(b"\n") > 100)
    part.tell_to_end()
    part.end()
    there, here = numbers(shown), numbers(part.out.end())
    assert there[:20] == list(range(20))
    assert here == list(range(here[0], here[-1] + 1)), "without a gap, in order"
    assert here[0] <= there[-1] + 1
    assert len(part.said) == 1


def stalls(opened: contextlib.ExitStack, address: str, stall_s: float) -> tuple[float, bytes]:
    """How long a child that writes much took, and what was shown where it is."""
    code = "import os, sys, time\nfor n in range(100_000): sys.stdout.write(f'{n:06}\\n')"
    began_at = time.monotonic()
    part = Part(opened, address, code, stall_s=stall_s)
    part.end()
    assert len(part.said) == 1
    return time.monotonic() - began_at, part.out.end()


def test_a_receiver_that_was_stopped_holds_nobody_up_for_long(opened: contextlib.ExitStack) -> None:
    process, address = running_receiver(opened)
    os.kill(process.pid, signal.SIGSTOP)  # its kernel still takes connections
    took_s, shown = stalls(opened, address, 0.3)
    assert numbers(shown) == list(range(100_000))
    assert 0.3 <= took_s < 8.0


def test_a_receiver_that_falls_silent_holds_nobody_up_for_long(opened: contextlib.ExitStack) -> None:
    """It was let in; then it neither reads nor says anything. All it was sent is shown."""
    peer = opened.enter_context(Peer())
    greeting = threading.Thread(target=peer.greeted)
    greeting.start()
    took_s, shown = stalls(opened, peer.address, 0.3)
    greeting.join()
    assert numbers(shown) == list(range(100_000))
    assert 0.3 <= took_s < 8.0


def test_a_terminal_that_is_slow_is_waited_for(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened, reads=False)  # as after Ctrl-S
    part = Part(opened, here.address, "import sys\nfor n in range(100_000): print(f'{n:06}')", stall_s=0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        part.child.wait(0.6)
    here.out.start()
    part.end()
    assert here.receiver.drain(DEADLINE_S, ["there"])
    here.receiver.close()
    assert numbers(here.out.end()) == list(range(100_000))
    assert part.said == []


def test_it_goes_back_to_sending_when_somebody_is_there_again(opened: contextlib.ExitStack) -> None:
    port = free_port()
    part = Part(opened, f"127.0.0.1:{port}", LINES_UNTIL_TOLD)
    part.out.wait(lambda shown: shown.count(b"\n") > 20)
    listener = socket.create_server(("127.0.0.1", port))
    listener.setblocking(False)
    here = Terminal(opened, listen=lambda _: listener)
    here.out.wait(lambda shown: shown.count(b"\n") > 20)
    part.tell_to_end()
    part.end()
    assert here.receiver.drain(DEADLINE_S, ["there"])
    here.receiver.close()
    shown = numbers(part.out.end()) + numbers(here.out.end())
    assert shown == list(range(len(shown))), "each line once"
    assert len(part.said) == 1


def test_somebody_attaches_later_and_somebody_else_after_that(opened: contextlib.ExitStack) -> None:
    first, second = Terminal(opened), Terminal(opened)
    part = Part(opened, "", LINES_UNTIL_TOLD)
    part.out.wait(lambda shown: shown.count(b"\n") > 20)
    for here in (first, second):
        part.sender.set_address(here.address)
        here.out.wait(lambda shown: shown.count(b"\n") > 20)
    part.sender.set_address("")
    for here in (first, second):
        assert here.receiver.drain(DEADLINE_S, ["there"])
        here.receiver.close()
    count = len(part.out.shown)
    part.out.wait(lambda shown: len(shown) > count + 100)
    part.tell_to_end()
    part.end()
    shown, *others = (screen.end() for screen in (part.out, first.out, second.out))
    at = shown.index(b"\n%06d\n" % (numbers(others[-1])[-1] + 1)) + 1
    whole = shown[:at] + b"".join(others) + shown[at:]
    assert numbers(whole) == list(range(len(whole) // 7)), "each line once, in order"
    assert part.said == ["The output is shown here: nobody has asked for it."] * 2


def test_who_attaches_elsewhere_does_not_wait_for_a_stopped_terminal(opened: contextlib.ExitStack) -> None:
    first, second = Terminal(opened, reads=False), Terminal(opened)
    opened.callback(first.out.start)
    part = Part(opened, first.address, "for n in range(100_000): print(f'{n:06}')", stall_s=0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        part.child.wait(0.1)
    part.sender.set_address(second.address)
    part.end()
    assert second.receiver.drain(DEADLINE_S, ["there"])
    second.receiver.close()
    shown = numbers(second.out.end())
    assert shown == list(range(shown[0], 100_000)), "from a line on that the first one has not shown in full"
    assert shown[0] * 7 <= 65536 + FRAME_BYTES_MAX
    assert part.said == []


def test_a_stopped_receiver_that_goes_on_is_sent_to_again(opened: contextlib.ExitStack) -> None:
    process, address = running_receiver(opened)
    assert process.stdout is not None
    part = Part(opened, address, LINES_UNTIL_TOLD, stall_s=0.3)
    assert process.stdout.readline() == b"000000\n"
    os.kill(process.pid, signal.SIGSTOP)
    local = part.out.wait(lambda shown: shown.count(b"\n") > 20)
    os.kill(process.pid, signal.SIGCONT)
    while int(process.stdout.readline()) <= numbers(local[: len(local) // 7 * 7])[-1]:
        pass
    part.tell_to_end()
    part.end()
    assert len(part.said) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("does", ["time.sleep(100)", "os.write(1, b'x' * 999 + b'\\n')"])
def test_what_the_child_leaves_behind_keeps_nobody_waiting(opened: contextlib.ExitStack, does: str) -> None:
    here = Terminal(opened)
    code = f"""
import os, time
if os.fork():
    os.write(1, b"last words")
    os._exit(0)
os.write(2, b"%d\\n" % os.getpid())
while True: {does}
"""
    part = Part(opened, here.address, code)
    assert part.child.wait(DEADLINE_S) == 0
    pid = int(here.err.wait(lambda shown: shown.endswith(b"\n")))
    try:
        assert not part.sender.join(0.1)
        part.sender.finish(0.1)
        assert part.sender.join(DEADLINE_S)
        assert here.receiver.drain(DEADLINE_S, ["there"])
        here.out.wait(lambda shown: b"last words" in shown)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_drain_waits_for_who_has_not_come_and_has_a_deadline(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    assert here.receiver.drain(0.0)
    assert not here.receiver.drain(0.05, ["there"])
    part = Part(opened, here.address, "import os; os.write(1, b'1\\n'); os.read(0, 1)")
    here.out.wait(lambda shown: shown)
    assert not here.receiver.drain(0.05)
    part.tell_to_end()
    assert here.receiver.drain(DEADLINE_S, ["there"])


def test_a_child_that_says_nothing_ends_as_well(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened)
    Part(opened, here.address, "").end()
    assert here.receiver.drain(DEADLINE_S, ["there"])


def test_a_standard_output_that_is_broken_stops_nobody(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened, reads=False)
    here.out.break_off()
    part = Part(opened, here.address, "import sys\nprint('x' * 1_000_000)\nprint('seen', file=sys.stderr)")
    part.end()
    assert here.receiver.drain(DEADLINE_S, ["there"])
    here.err.wait(lambda shown: shown == b"seen\n")
    assert part.said == []


def test_a_process_ends_well_while_its_terminal_is_stopped(opened: contextlib.ExitStack) -> None:
    """Ctrl-C after Ctrl-S: the thread that writes waits for the terminal."""
    code = """
import sys
from unicron_elastic.launcher.node import output_receiver
output_receiver._CLOSE_S = 0.1
screen = open(int(sys.argv[2]), "wb")
receiver = output_receiver.OutputReceiver(sys.argv[1], screen, sys.stderr.buffer, host="127.0.0.1")
print(receiver.address_for("127.0.0.1"), flush=True)
sys.stdin.read()
receiver.close()
print("end")
"""
    screen, pipe = Screen(reads=False), subprocess.PIPE
    opened.callback(screen.close)
    opened.callback(screen.start)
    fd = screen.file.fileno()
    argv = [sys.executable, "-c", code, SECRET, str(fd)]
    process = opened.enter_context(subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[fd]))
    opened.callback(process.kill)
    assert process.stdout is not None
    part = Part(opened, process.stdout.readline().decode().strip(), "print('x\\n' * 500_000)")
    with pytest.raises(subprocess.TimeoutExpired):
        part.child.wait(0.1)
    assert process.communicate(timeout=DEADLINE_S) == (b"end\n", b"")
    assert process.returncode == 0
    part.end()
    assert len(part.said) == 1


def test_files_without_a_descriptor_do_as_well(opened: contextlib.ExitStack) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    receiver = OutputReceiver(SECRET, out, err)
    opened.callback(receiver.close)
    Part(opened, receiver.address_for("127.0.0.1"), "print(1)").end()
    assert receiver.drain(DEADLINE_S, ["there"])
    assert (out.getvalue(), err.getvalue()) == (b"1\n", b"")


@pytest.mark.usefixtures("opened")
def test_no_descriptor_is_left() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with contextlib.ExitStack() as inner:
        here = Terminal(inner)
        for address in (here.address, "127.0.0.1:1", ""):
            Part(inner, address, "print(1)").end()
        here.receiver.close()
        here.receiver.close()
    assert descriptors() == before


# -- peers that are none -----------------------------------------------------------------------------------------------


class Peer:
    """Somebody to connect to, by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sock: socket.socket | None = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self.sock is not None:
            self.sock.close()

    def greeted(self, secret: str = SECRET, *, is_checked: bool = True) -> tuple[socket.socket, Seal]:
        self.sock, _ = self._listener.accept()
        self._listener.close()
        said, nonce = challenge()
        self.sock.sendall(said)
        told = read(self.sock.recv(4096).strip())
        nonces = Nonces(nonce, str(told["nonce"]))
        if is_checked:
            _, nonces = Hello.parse(told, key_for_output(secret), nonce)
        self.sock.sendall(welcome(key_for_output(secret), nonces, 0.1))
        return self.sock, seal_of(key_for_output(secret), nonces, is_coordinator=True)


def let_in(here: Terminal) -> tuple[socket.socket, Seal]:
    """A connection to a receiver, by hand, on which it takes frames."""
    sock = socket.create_connection(("127.0.0.1", here.receiver.port), DEADLINE_S)
    said, nonces = Hello("output", "there", "").line(key_for_output(SECRET), read(sock.recv(4096).strip()))
    sock.sendall(said)
    assert b"proof" in sock.recv(4096)
    return sock, seal_of(key_for_output(SECRET), nonces, is_coordinator=False)


def wait_for_end(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass


FRAME = HEADER.pack(1, FRAME_BYTES_MAX) + b"x" * FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "frames",
    [
        [HEADER.pack(3, 1) + b"x"],
        [HEADER.pack(END, 1) + b"x"],
        [HEADER.pack(1, FRAME_BYTES_MAX + 1)],
        [HEADER.pack(1, 1) + b"x", HEADER.pack(END, 0), HEADER.pack(1, 1)],
    ],
)
def test_frames_that_are_none_end_the_connection(opened: contextlib.ExitStack, frames: list[bytes]) -> None:
    here = Terminal(opened)
    sock, seal = let_in(here)
    with sock:
        sock.sendall(b"".join(frame + seal.of(frame) for frame in frames))
        wait_for_end(sock)
    assert here.receiver.drain(DEADLINE_S)


def test_what_somebody_in_between_puts_in_is_not_shown(opened: contextlib.ExitStack) -> None:
    """Nor what comes after it: the sender hears of the end, and shows where it is what was not shown here."""
    here = Terminal(opened)
    frames = [HEADER.pack(1, 4) + text for text in (b"one\n", b"two\n", b"six\n")]
    sock, seal = let_in(here)
    with sock:
        sealed = [frame + seal.of(frame) for frame in frames]
        sock.sendall(sealed[0] + sealed[1].replace(b"two", b"ten") + sealed[2])
        wait_for_end(sock)
    assert here.receiver.drain(DEADLINE_S)
    here.receiver.close()
    assert here.out.end() == b"one\n"


def test_who_runs_ahead_of_what_is_written_is_dropped(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened, reads=False)
    sock, seal = let_in(here)
    with sock:
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * WINDOW_BYTES // FRAME_BYTES_MAX):
                sock.sendall(FRAME + seal.of(FRAME))
        wait_for_end(sock)
    here.out.start()
    assert here.receiver.drain(DEADLINE_S)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b"[" * 9000 + b"\n", b"x" * 70_000])
def test_a_stranger_is_dropped(opened: contextlib.ExitStack, said: bytes) -> None:
    here = Terminal(opened)
    with socket.create_connection(("127.0.0.1", here.receiver.port), DEADLINE_S) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
        wait_for_end(sock)
    assert here.receiver.drain(DEADLINE_S)


def test_strangers_take_a_bounded_place_for_a_bounded_time(opened: contextlib.ExitStack) -> None:
    here = Terminal(opened, greetings_max=4, greeting_s=0.3)
    where = ("127.0.0.1", here.receiver.port)
    strangers = [opened.enter_context(socket.create_connection(where, DEADLINE_S)) for _ in range(4)]
    assert all(sock.recv(4096) for sock in strangers)
    strangers.append(opened.enter_context(socket.create_connection(where, DEADLINE_S)))
    assert strangers[-1].recv(4096)
    assert strangers[0].recv(4096) == b"", "the one that was silent for the longest time makes room"
    for sock in strangers[1:]:
        wait_for_end(sock)
    Part(opened, here.address, "print(1)").end()
    here.out.wait(lambda shown: shown == b"1\n")


def test_a_receiver_that_counts_what_nobody_sent_is_left(opened: contextlib.ExitStack) -> None:
    peer = opened.enter_context(Peer())
    part = Part(opened, peer.address, LINES, 10)
    sock, seal = peer.greeted()
    sock.sendall(COUNT.pack(1_000_000) + seal.of(COUNT.pack(1_000_000)))
    part.end()
    assert numbers(part.out.end()) == list(range(10))
    assert "what nobody sent" in part.said[0]


def test_a_count_that_somebody_in_between_puts_in_is_not_believed(opened: contextlib.ExitStack) -> None:
    """It would have the sender forget what nobody has shown."""
    peer = opened.enter_context(Peer())
    part = Part(opened, peer.address, LINES, 10)
    sock, _ = peer.greeted()
    assert sock.recv(1)
    sock.sendall(COUNT.pack(1) + bytes(SEAL_BYTES))
    part.end()
    assert numbers(part.out.end()) == list(range(10))
    assert "has not sent at this point" in part.said[0]
