"""Collectives that are broken off on the agent's word, with real process groups of forked workers."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unicron_elastic.compat import loaded
from unicron_elastic.faults import Failure, Status, classify
from unicron_elastic.worker.answer_questions import answer_questions
from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.collectives.broken import Broken, break_collectives, watch_groups
from unicron_elastic.worker.collectives.gloo_connections import kept_time_out, shut_gloo_connections
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.instructions import AskPosition
from unicron_elastic.worker.notices import Position
from unicron_elastic.worker.pulse import PulsePage

DEADLINE_S = 30.0
GROUP_TIMEOUT = timedelta(seconds=600)  # what raises before long was not ended by it
BROKEN_WITHIN_S = 5.0  # it takes a few milliseconds; the machine may be loaded
HOST = "127.0.0.1"


# --- What the forked workers do. Each returns what can be pickled.


def init(port: int, prefix: str, rank: int, world: int, backend: str = "gloo") -> None:
    store = dist.PrefixStore(prefix, dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=DEADLINE_S)))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)


def reduce() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def reduce_in_pairs(world: int) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group(list(range(world)), timeout=GROUP_TIMEOUT))
    kept.append(ones)
    return float(ones)


def reduce_in_the_second_group() -> float:
    (group,) = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    dist.all_reduce(ones := torch.ones(1), group=group)
    return float(ones)


def receive() -> None:
    dist.recv(torch.ones(1), src=0)


def wait_for_a_reduction() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def use_store() -> bytes:
    store = distributed_c10d._get_default_store()
    store.set("after", "all")
    return bytes(store.get("after"))


def connect() -> None:
    """The script's own connections, with such options as clients in Python, C and C++ give theirs."""
    with socket.create_server((HOST, 0)) as server:
        for blocks, timeout_s in ((True, 0), (False, 0), (True, 600)):
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
            for end in (client, accepted):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", timeout_s, 0))
                end.setblocking(blocks)
                end.set_inheritable(True)
            kept.append((client, accepted))


def init_among_connections(port: int, prefix: str, rank: int, world: int) -> int:
    """Makes the group while a thread connects, too; how many connections that were."""
    is_made = threading.Event()

    def connect_all_the_time() -> None:
        for _ in range(40):
            connect()
            if is_made.is_set():
                return

    thread = threading.Thread(target=connect_all_the_time)
    before = len(kept)
    thread.start()
    init(port, prefix, rank, world)
    is_made.set()
    thread.join()
    return len(kept) - before


def connections_work() -> bool:
    for client, accepted in kept:
        client.setblocking(True)
        accepted.setblocking(True)
        client.sendall(b"there")
        assert accepted.recv(5, socket.MSG_WAITALL) == b"there"
        accepted.sendall(b"back")
        assert client.recv(4, socket.MSG_WAITALL) == b"back"
    return bool(kept)


def listening() -> list[str]:
    """The sockets that accept connections; a listening socket that was shut down does not."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def reduce_on_the_gpu(rank: int) -> None:
    torch.cuda.set_device(rank)
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()


kept: list[Any] = []


def break_when_told(reasons: Connection) -> None:
    """As the thread that hears of a newer world does; says what was broken."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            reasons.send(break_collectives(reasons.recv()))


def worker(commands: Connection, reasons: Connection, control_fd: int) -> None:
    """One worker: does what it is told, and says what came of it and when (monotonic seconds)."""
    gc.freeze()  # as in in_a_fork
    control = Control(control_fd)
    threading.Thread(target=break_when_told, args=(reasons,), daemon=True).start()
    watch_groups(lambda: answer_questions(control))
    while True:
        action, arguments = commands.recv()
        try:
            result = action(*arguments)
        except Exception as error:
            result = error
        commands.send((result, time.monotonic()))


class Ranks:
    """Forked workers, each with a control channel, and the store, which outlives them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.commands, self.reasons, self.channels, self.processes = [], [], [], []
        fork = get_context("fork")
        for _ in range(world):
            ours, theirs = fork.Pipe()
            reasons, their_reasons = fork.Pipe()
            channel, far_end = Channel.pair()
            channel.settimeout(DEADLINE_S)
            process = fork.Process(target=worker, args=(theirs, their_reasons, far_end.fileno()), daemon=True)
            process.start()
            far_end.close()
            theirs.close()
            their_reasons.close()
            self.commands.append(ours)
            self.reasons.append(reasons)
            self.channels.append(channel)
            self.processes.append(process)
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def tell(self, rank: int, action: Callable[..., Any], *arguments: Any) -> None:
        self.commands[rank].send((action, arguments))

    def hear(self, rank: int) -> tuple[Any, float]:
        assert self.commands[rank].poll(DEADLINE_S), f"rank {rank} does not come back"
        result, at = self.commands[rank].recv()
        return result, at

    def do(self, rank: int, action: Callable[..., Any], *arguments: Any) -> Any:
        self.tell(rank, action, *arguments)
        result = self.hear(rank)[0]
        if isinstance(result, Exception):
            raise result
        return result

    def all_do(self, action: Callable[..., Any], *arguments: Any, but: int | None = None) -> list[Any]:
        ranks = [rank for rank in range(self.world) if rank != but]
        for rank in ranks:
            self.tell(rank, action, *arguments)
        return [self.hear(rank)[0] for rank in ranks]

    def init(self, prefix: str = "first", action: Callable[..., Any] = init) -> list[Any]:
        for rank in range(self.world):
            self.tell(rank, action, self.store.port, prefix, rank, self.world)
        return [self.hear(rank)[0] for rank in range(self.world)]

    def until_it_waits(self, rank: int, collectives_begun: int) -> None:
        """Until the worker is in its next collective, as it says itself."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.channels[rank].send(AskPosition(question=1))
            answer = self.channels[rank].hear([Position])
            assert isinstance(answer, Position)
            if any(group.begun >= collectives_begun for group in answer.groups):
                return
            time.sleep(0.002)
        pytest.fail("it does not begin")

    def break_off(self, rank: int) -> Broken:
        self.reasons[rank].send("a test")
        assert self.reasons[rank].poll(DEADLINE_S)
        broken = self.reasons[rank].recv()
        assert isinstance(broken, Broken)
        return broken

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for end in (*self.commands, *self.reasons, *self.channels):
            end.close()
        del self.store  # now, and not when the garbage is collected, in a fork perhaps


@pytest.fixture
def make() -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def one(world: int) -> Ranks:
        made.append(Ranks(world))
        return made[-1]

    yield one
    for ranks in made:
        ranks.close()


def ends_broken(ranks: Ranks, rank: int, begun_at: float) -> str:
    """What the worker's blocked call raised, soon after ``begun_at``."""
    error, at = ranks.hear(rank)
    assert isinstance(error, RuntimeError)
    assert at - begun_at < BROKEN_WITHIN_S
    fault = classify(
        Failure(at=at, rank=rank, local_rank=rank, pid=1, exception_type="RuntimeError", message=str(error))
    )
    assert (fault.status, fault.is_consequence) == (Status.CONNECTION_REFUSED_OR_RESET, True)
    return str(error)


def test_who_waits_for_a_stopped_peer_goes_on_and_makes_a_new_group(make: Callable[[int], Ranks]) -> None:
    ranks = make(3)
    ranks.init()
    assert ranks.all_do(reduce) == [3.0] * 3
    os.kill(ranks.processes[2].pid, signal.SIGSTOP)
    for rank in (0, 1):
        ranks.tell(rank, reduce)
        ranks.until_it_waits(rank, 2)
    begun_at = time.monotonic()
    assert ranks.break_off(0) == Broken(groups=("0",), sockets=2)
    assert ranks.break_off(1).groups == ("0",)
    for rank in (0, 1):
        assert "Connection closed by peer" in ends_broken(ranks, rank, begun_at)
        assert ranks.do(rank, use_store) == b"all"
    ranks.all_do(dist.destroy_process_group, but=2)
    for rank in (0, 1):
        ranks.tell(rank, init, ranks.store.port, "second", rank, 2)
    assert [ranks.hear(rank)[0] for rank in (0, 1)] == [None, None]
    assert ranks.all_do(reduce, but=2) == [2.0, 2.0]
    # And once more, for the new group.
    ranks.tell(0, reduce)
    time.sleep(0.05)  # what begins later raises as well
    begun_at = time.monotonic()
    assert ranks.break_off(0).sockets == 1
    ends_broken(ranks, 0, begun_at)


def test_nothing_but_gloos_connections_is_touched(make: Callable[[int], Ranks]) -> None:
    ranks = make(2)
    ranks.all_do(connect)
    assert all(count >= 3 for count in ranks.init(action=init_among_connections))
    ranks.all_do(connect)
    listened = ranks.do(0, listening)
    assert listened  # gloo's
    ranks.tell(0, reduce)
    ranks.until_it_waits(0, 1)
    begun_at = time.monotonic()
    assert ranks.break_off(0) == Broken(groups=("0",), sockets=1)
    ends_broken(ranks, 0, begun_at)
    assert ranks.all_do(connections_work) == [True, True]
    assert ranks.do(0, listening) == listened
    assert ranks.all_do(use_store) == [b"all", b"all"]


@pytest.mark.parametrize("call", [receive, wait_for_a_reduction, dist.barrier, dist.monitored_barrier])
def test_whatever_waits_for_a_peer_is_broken(make: Callable[[int], Ranks], call: Callable[..., Any]) -> None:
    ranks = make(2)
    ranks.init()
    ranks.tell(1, call)
    time.sleep(0.05)  # not all are collectives, by which one could tell; what begins later raises as well
    begun_at = time.monotonic()
    assert ranks.break_off(1).sockets == 1
    ends_broken(ranks, 1, begun_at)


def test_every_group_is_broken_however_it_was_made(
    make: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    ranks = make(2)
    ranks.init()
    assert ranks.all_do(reduce) == [2.0, 2.0]
    assert ranks.all_do(reduce_in_pairs, 2) == [2.0, 2.0]
    ranks.tell(0, reduce_in_the_second_group)
    ranks.until_it_waits(0, 2)
    begun_at = time.monotonic()
    broken = ranks.break_off(0)
    assert (len(broken.groups), broken.sockets) == (2, 2)
    ends_broken(ranks, 0, begun_at)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        ranks.do(0, reduce)


def test_the_agent_is_answered_from_the_first_group_on(make: Callable[[int], Ranks]) -> None:
    ranks = make(2)
    before = ranks.do(0, threads)
    assert ranks.do(1, threads) == before
    ranks.channels[0].send(AskPosition(question=7))
    for rank in range(2):  # each makes a group of its own: what breaks in one must not meet the other while it connects
        ranks.do(rank, init, ranks.store.port, f"alone {rank}", 0, 1)
    answer = ranks.channels[0].hear([Position])  # when it can be heard
    assert isinstance(answer, Position)
    assert answer.question == 7
    assert ranks.do(1, threads) > before
    before = ranks.do(1, threads)
    ranks.all_do(dist.destroy_process_group)
    ranks.init("second")
    assert ranks.do(1, threads) == before
    assert ranks.all_do(reduce) == [2.0, 2.0]


# --- In this process.


def test_without_torch_distributed_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    assert break_collectives("a test") == Broken()
    assert "torch.distributed.distributed_c10d" not in sys.modules


def test_without_a_group_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert break_collectives("a test", shut_connections=lambda: pytest.fail("there is no group")) == Broken()
    assert capsys.readouterr().err == ""


def test_a_default_time_out_of_the_script_changes_no_socket() -> None:
    """Python applies it to every socket object it makes, and so to the descriptor beneath."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.setdefaulttimeout(5)
        try:
            assert shut_gloo_connections() == 0
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(ours.fileno())
        ours.sendall(b"still there")
        assert theirs.recv(20) == b"still there"


def test_no_descriptor_is_left_behind() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    shut_gloo_connections()
    assert sorted(os.listdir("/proc/self/fd")) == before


class Aborted:
    """A process group with a back end whose abort works."""

    def __init__(self, name: str, backend: str, abort: Callable[[], object]) -> None:
        self.group_name = name
        self.abort = abort
        self._device_types = ["cpu", "cuda"]
        self._backend = backend

    def _get_backend(self, device: str) -> Any:
        return SimpleNamespace(name=lambda: "gloo" if device == "cpu" else self._backend)


def with_groups(monkeypatch: pytest.MonkeyPatch, *groups: Any) -> None:
    module: Any = SimpleNamespace(_world=SimpleNamespace(pg_map=dict.fromkeys(groups)))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)


def test_back_ends_that_can_abort_do_so_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2)
    is_over = threading.Semaphore(0)

    def abort() -> None:
        meet.wait(DEADLINE_S)  # neither abort ends before the other has begun
        is_over.release()

    groups = [Aborted("0", "nccl", abort), Aborted("1", "gloo", lambda: pytest.fail("gloo")), Aborted("2", "x", abort)]
    with_groups(monkeypatch, *groups)
    before = set(threading.enumerate())
    assert break_collectives("a test") == Broken(groups=("0", "1", "2"), sockets=0, aborts=2)
    assert set(threading.enumerate()) <= before
    assert is_over.acquire(timeout=DEADLINE_S)
    assert is_over.acquire(timeout=DEADLINE_S)


def test_an_abort_that_lasts_or_fails_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    is_enough, is_over = threading.Event(), threading.Event()

    def fail() -> None:
        try:
            raise RuntimeError("the device is gone")
        finally:
            is_over.set()

    broken_group: Any = SimpleNamespace()  # has nothing that a group should have
    nccl = [Aborted("0", "nccl", lambda: is_enough.wait(DEADLINE_S)), Aborted("1", "nccl", fail)]
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: os.write(2, text.encode())))
    try:
        with_groups(monkeypatch, *nccl)
        sys.modules["torch.distributed.distributed_c10d"]._world.pg_map[id(broken_group)] = None  # type: ignore[attr-defined]
        begun_at = time.monotonic()
        assert break_collectives("a test") == Broken(groups=("0", "1", ""), sockets=0, aborts=2)
        assert time.monotonic() - begun_at < BROKEN_WITHIN_S
        assert is_over.wait(DEADLINE_S)
    finally:
        is_enough.set()
    assert "broken off: a test" in capfd.readouterr().err


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("anything")

    with_groups(monkeypatch, Aborted("0", "gloo", fail))
    monkeypatch.setattr(sys, "stderr", None)
    assert break_collectives("a test", shut_connections=fail).groups == ("0",)


REGISTERING = str(loaded.first_registering(distributed_c10d))


@pytest.fixture
def registration(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(distributed_c10d, REGISTERING)
    monkeypatch.setattr(distributed_c10d, REGISTERING, original)  # put back afterwards
    return original


def test_the_hook_looks_like_torchs_function(registration: Callable[..., Any]) -> None:
    watch_groups(lambda: None)
    hooked = getattr(distributed_c10d, REGISTERING)
    assert hooked is not registration
    assert hooked.__doc__ == registration.__doc__
    if inspect.isfunction(registration):  # before torch 2.13 it is one of C++
        assert inspect.signature(hooked) == inspect.signature(registration)
        assert inspect.getsource(hooked) == inspect.getsource(registration)
        assert pickle.loads(pickle.dumps(hooked)) is hooked


def in_a_fork(function: Callable[[], object]) -> None:
    """torch counts the groups of a process for good, and other tests of this one look at its numbers."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # a store of an earlier test would wait for a thread that a fork does not have
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            function()
            sys.stderr.flush()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def init_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])


@pytest.mark.usefixtures("registration")
def test_a_callback_that_fails_does_not_fail_the_script(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no thread can be started")

    def script() -> None:
        watch_groups(fail)
        init_alone()

    in_a_fork(script)
    assert capfd.readouterr().err.count("no thread can be started") == 1


def test_a_torch_that_makes_its_groups_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", other)  # type: ignore[arg-type]
    watch_groups(lambda: None)
    assert vars(other) == {}


@pytest.mark.usefixtures("registration")
def test_a_process_that_the_script_forks_does_not_call_back(tmp_path: Path) -> None:
    called = tmp_path / "called"
    watch_groups(called.touch)
    in_a_fork(init_alone)
    assert not called.exists()


def test_a_worker_starts_its_thread_with_its_first_group_and_only_once() -> None:
    """All of the bootstrap, with a script that makes a group and steps."""
    code = """
        import os, sys
        from unicron_elastic.worker.start.bootstrap import attach
        attach(int(sys.argv[1]), int(sys.argv[2]))
        def ours():
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            return names.count("unicron-answers\\n")
        import torch, torch.distributed as dist
        assert ours() == 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        input()
        before = ours()
        parameter = torch.zeros(1, requires_grad=True)
        torch.optim.SGD([parameter]).step()
        dist.destroy_process_group()
        print(before, ours(), flush=True)
        input()
        print(ours())
    """
    channel, far_end = Channel.pair()
    channel.settimeout(DEADLINE_S)
    page = PulsePage()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(far_end.fileno()), str(page.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(far_end.fileno(), page.fd),
        text=True,
    )
    far_end.close()
    page.close()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        channel.send(AskPosition(question=1))
        assert isinstance(channel.hear([Position]), Position)  # before any step
        process.stdin.write("\n")
        process.stdin.flush()
        assert channel.receive()[0]["step"] == 1
        assert process.stdout.readline() == "1 1\n"
        channel.send(AskPosition(question=2))
        assert isinstance(channel.hear([Position]), Position)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
    channel.close()
    assert process.returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two NCCL ranks need two GPUs")
def test_who_waits_for_the_gpu_goes_on_and_the_next_collective_raises(make: Callable[[int], Ranks]) -> None:
    ranks = make(2)
    for rank in (0, 1):
        ranks.tell(rank, init, ranks.store.port, "first", rank, 2, "nccl")
    assert [ranks.hear(rank)[0] for rank in (0, 1)] == [None, None]
    for rank in (0, 1):
        ranks.tell(rank, reduce_on_the_gpu, rank)
    assert [ranks.hear(rank)[0] for rank in (0, 1)] == [None, None]
    ranks.tell(0, reduce_on_the_gpu, 0)
    ranks.until_it_waits(0, 2)
    begun_at = time.monotonic()
    assert ranks.break_off(0).groups == ("0",)
    assert ranks.hear(0)[1] - begun_at < BROKEN_WITHIN_S
    with pytest.raises(Exception, match="abort"):
        ranks.do(0, reduce_on_the_gpu, 0)


def test_two_time_outs_that_are_a_tick_apart_are_told_apart() -> None:
    kept = [kept_time_out(seconds) for seconds in (600.0, 600.02, 600.04, 601.0)]
    assert len(set(kept)) == 4
    assert kept_time_out(600.02) == kept[1]
