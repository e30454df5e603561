"""Several hosts on one machine, and the faults of the network between them.

A ``Host`` is a network, a host name, an ``/etc/hosts``, a ``/dev/shm`` and a ``/sys`` of its own. A ``Network`` is the
bridge between hosts, itself in a namespace, so that the machine's own network has nothing of it. Files other than these
are shared, and so are the pids: the pid that a process sees of itself is the one that a test can signal.

Every namespace has the pid of its creator in its name, and the processes in it end when that creator ends, however it
ends. The names themselves go away with ``Network.close``, or in the next run with ``remove_leftovers``.

Hosts know each other's hardware addresses for good. So a host that is cut off is silent and never "unreachable", and a
link that is cut in one direction goes on carrying the other one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from warm_launcher import WarmLaunchers, WarmProcess

T = TypeVar("T")

DEADLINE_S = 10.0
HOSTS_MAX = 64
PREFIX = "unicron-test"
NAMESPACES = Path("/run/netns")
TOOLS = ("env", "ip", "mount", "nsenter", "sh", "tc", "unshare")
CLONE_NEWNET = 0x40000000

# The first process of a host. It ends when the test process does, and takes the others of the host with it.
FIRST_PROCESS = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$2/cgroup"; fi
mount -t sysfs sysfs /sys
if [ -d /sys/fs/cgroup ]; then mount --move "$2/cgroup" /sys/fs/cgroup; fi
echo ready
read -r line || true
for pid in $(ip netns pids "$3"); do [ "$pid" = $$ ] || kill -KILL "$pid" || true; done
"""

_serials = itertools.count(1)


def run_tool(*argv: str, text: str | None = None) -> str:
    """Runs a command to its end and returns its output; raises with its message if it fails."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _works(*argv: str) -> str:
    """The message with which a command fails in namespaces of its own, or nothing."""
    try:
        run_tool("unshare", "--net", "--uts", "--mount", *argv)
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    return ""


@functools.cache
def why_no_hosts() -> str:
    """The reason why hosts cannot be made here, in one sentence, or nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.uname().sysname != "Linux":
        return "hosts of a test are namespaces of Linux"
    if missing:
        return f"hosts of a test need the commands {', '.join(missing)}"
    if os.geteuid() != 0:
        return "hosts of a test are namespaces, which only root may make"
    failure = _works("ip", "link", "add", "type", "veth") or _works("ip", "link", "add", "type", "bridge")
    return f"hosts of a test need namespaces with veth and bridge ({failure})" if failure else ""


@functools.cache
def why_no_one_way_cut() -> str:
    """The reason why one direction alone cannot be cut, in one sentence, or nothing."""
    failure = _works("tc", "qdisc", "add", "dev", "lo", "root", "blackhole")
    return f"the kernel cannot cut a link in one direction ({failure})" if failure else ""


@functools.cache
def why_no_netem() -> str:
    """The reason why a link cannot be made slow or lossy, in one sentence, or nothing."""
    failure = _works("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    return f"the kernel has no netem to delay or lose packets with ({failure})" if failure else ""


def start_ticks(pid: int) -> str:
    """When this process began, in the kernel's ticks; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine, ours or not."""
    try:
        return sorted(os.listdir(NAMESPACES))
    except FileNotFoundError:
        return []


def remove_leftovers() -> list[str]:
    """Removes the namespaces of test processes that are gone, with all that runs in them; returns their names."""
    removed = []
    for name in namespaces():
        made = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
        if made is not None and start_ticks(int(made[1])) != made[2]:
            remove_namespace(name)
            removed.append(name)
    return removed


def remove_namespace(name: str) -> None:
    """Kills what runs in a namespace and removes its name; one that is gone is no error."""
    kill_all(lambda: pids_in(name))
    try:
        run_tool("ip", "netns", "delete", name)
    except RuntimeError:
        if (NAMESPACES / name).exists():
            raise


def pids_in(namespace: str) -> set[int]:
    """The processes of a namespace, other than this one, which may have a thread in it."""
    try:
        where = os.stat(NAMESPACES / namespace)
    except FileNotFoundError:
        return set()
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {pid for pid in found if pid != os.getpid() and _is_in(pid, where)}


def _is_in(pid: int, where: os.stat_result) -> bool:
    """Whether a process is in the network namespace with this inode."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), where)
    except OSError:  # it has ended, or its first thread has
        return any(_is_same(path, where) for path in Path(f"/proc/{pid}/task").glob("*/ns/net"))


def _is_same(path: Path, where: os.stat_result) -> bool:
    """Whether a path leads to this inode."""
    try:
        return os.path.samestat(path.stat(), where)
    except OSError:  # the thread has ended
        return False


def kill_all(list_pids: Callable[[], set[int]]) -> None:
    """Kills the listed processes, and those that are listed afterwards, and waits for the end of all."""
    end = time.monotonic() + DEADLINE_S
    while pids := list_pids():
        with contextlib.ExitStack() as opened:
            killed = [opened.enter_context(_killed(pid)) for pid in pids]
            for pidfd in killed:
                if pidfd is not None and not _is_readable(pidfd, end):
                    raise TimeoutError(f"killed processes do not end: {pids}")


@contextlib.contextmanager
def _killed(pid: int) -> Iterator[int | None]:
    """Kills a process; gives its pidfd, which can be read when all its threads have ended, or None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        yield pidfd
    finally:
        os.close(pidfd)


def _path_of(tool: str) -> str:
    """The path of a tool, which is not looked for in the PATH that a process of a host is given."""
    path = shutil.which(tool)
    assert path is not None, why_no_hosts()
    return path


def _is_readable(fd: int, end: float) -> bool:
    """Whether ``fd`` can be read before ``end``."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))


def _enter_network(namespace: str) -> None:
    """Moves the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / namespace) as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class Host:
    """One host of a network. Made and switched on by ``Network.add``."""

    def __init__(self, network: Network, number: int, name: str) -> None:
        self.network = network
        self.number = number
        self.name = name
        self.address = network.address_of(number)
        self.namespace = f"{network.namespace}.{name}"
        self.bridge = "bridge0"
        self.started: list[subprocess.Popen[bytes] | WarmProcess] = []
        self.is_on = False
        self._port = f"port{number}"
        self._first: subprocess.Popen[bytes] | None = None
        self._is_cut_out = self._is_cut_in = False
        self._delay_ms = self._loss_percent = 0.0

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"

    def power_on(self) -> None:
        """Switches the host on, with nothing in it but a network link without faults."""
        if self.is_on:
            return
        self._is_cut_out = self._is_cut_in = False
        self._delay_ms = self._loss_percent = 0.0
        run_tool("ip", "netns", "add", self.namespace)
        self.is_on = True
        mac = self.network.mac_of(self.number)
        self.network.configure_bridge(
            f"link add {self._port} type veth peer name eth0 address {mac} netns {self.namespace}",
            f"link set {self._port} addrgenmode none master {self.bridge} up",
        )
        others = [number for number in range(1, HOSTS_MAX + 1) if number != self.number]
        self._configure(
            "link set lo up",
            "link set eth0 addrgenmode none up",
            f"address add {self.address}/24 brd + dev eth0",
            *(
                f"neigh add {self.network.address_of(n)} lladdr {self.network.mac_of(n)} dev eth0 nud permanent"
                for n in others
            ),
        )
        self._begin_first_process()
        self._wait_for_link()

    def power_off(self) -> None:
        """Takes the host away at once, as a loss of power does: nobody hears a FIN or RST of it."""
        if not self.is_on:
            return
        self.network.configure_bridge(f"link set {self._port} down")
        kill_all(lambda: self.pids() | pids_in(self.namespace))
        self.network.configure_bridge(f"link delete {self._port}")
        self.is_on = False
        self._end_first_process()
        remove_namespace(self.namespace)

    def command(self, argv: Sequence[str | Path], cwd: str | Path = "/") -> list[str]:
        """The command line that runs ``argv`` in this host, for whoever starts processes in a way of their own."""
        self._need_power()
        assert self._first is not None
        enter = [_path_of("nsenter"), f"--target={self._first.pid}", "--net", "--uts", "--mount"]
        return [*enter, _path_of("env"), f"--chdir={cwd}", "--", *map(str, argv)]

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        out: Path | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a session of its own; stdout and stderr are added to ``out`` or dropped.

        The pid is that of ``argv`` itself. A command that is not there is an exit code of 127.
        """
        with contextlib.ExitStack() as opened:
            stdout = subprocess.DEVNULL if out is None else opened.enter_context(open(out, "ab"))
            streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                self.command(argv, cwd), **{"env": env, "start_new_session": True, **streams, **popen}
            )
        self.started.append(process)
        return process

    def start_warm(
        self, argv: Sequence[str | Path], *, warm: WarmLaunchers, env: Mapping[str, str], cwd: str | Path, out: Path
    ) -> WarmProcess:
        """Starts a command of the package under test as ``start`` does, as a fork of a process that has torch."""
        self._need_power()
        assert self._first is not None
        command = list(map(str, argv))
        with open(os.devnull, "rb") as null, open(out, "ab") as stdout:
            process = warm.start(
                command, env, Path(cwd), [null, stdout, stdout], forks_keeper=True, host=self._first.pid
            )
        self.started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        timeout_s: float = DEADLINE_S,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process to its end and returns its exit code and output."""
        return subprocess.run(
            self.command(argv, cwd),
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )

    def within(self, call: Callable[[], T]) -> T:
        """What ``call`` returns in a thread of this process that is in the host's network, and in nothing else of it.

        A socket made there stays in that network, so a test can be a peer itself. Names are those of the machine: use
        addresses.
        """
        self._need_power()
        with ThreadPoolExecutor(1, initializer=_enter_network, initargs=(self.namespace,)) as pool:
            return pool.submit(call).result()

    def pids(self) -> set[int]:
        """The processes that a test has started in this host, and all that came of them."""
        entering = {process.pid for process in self.started if process.poll() is None}  # they need not be in it yet
        return entering | pids_in(self.namespace) - ({self._first.pid} if self._first is not None else set())

    def kill_all(self) -> None:
        """Kills all processes of the host, which closes their connections as usual; the host stays on."""
        kill_all(self.pids)

    def cut(self) -> None:
        """Unplugs the host: nothing passes any more in either direction, and nobody is told but the host's own link."""
        self._need_power()
        self.network.configure_bridge(f"link set {self._port} down")

    def cut_out(self) -> None:
        """Drops all that the host sends; what is sent to it arrives."""
        self._is_cut_out = True
        self._shape()

    def cut_in(self) -> None:
        """Drops all that is sent to the host; what it sends arrives."""
        self._is_cut_in = True
        self._shape()

    def slow(self, delay_ms: float) -> None:
        """Delays all that the host sends, and with it every round trip; needs netem."""
        self._delay_ms = delay_ms
        self._shape()

    def lossy(self, percent: float) -> None:
        """Loses this share of the packets that the host sends; needs netem."""
        self._loss_percent = percent
        self._shape()

    def restore(self) -> None:
        """Takes back all faults of the link, and loses what a slow one has not sent yet; a partition stays."""
        self._is_cut_out = self._is_cut_in = False
        self._delay_ms = self._loss_percent = 0.0
        self._shape()
        self.network.configure_bridge(f"link set {self._port} up")
        self._wait_for_link()

    def collect(self) -> None:
        """Collects the ends of all that was started here."""
        for process in self.started:
            process.kill()
            with process:  # closes its pipes and waits
                pass
        self._end_first_process()

    def join(self, bridge: str) -> None:
        """Moves the host's link to another bridge of the network."""
        self.bridge = bridge
        if self.is_on:
            self.network.configure_bridge(f"link set {self._port} master {bridge}")

    def _need_power(self) -> None:
        """Raises if the host is off."""
        if not self.is_on:
            raise RuntimeError(f"{self.name} is off")

    def _shape(self) -> None:
        """Makes the queues at both ends of the link what the faults ask for."""
        self._need_power()
        netem = []
        if self._delay_ms:
            netem += ["delay", f"{self._delay_ms:g}ms"]
        if self._loss_percent:
            netem += ["loss", f"{self._loss_percent:g}%"]
        queue_out = ["blackhole"] if self._is_cut_out else ["netem", *netem] if netem else ["noqueue"]
        queue_in = ["blackhole"] if self._is_cut_in else ["noqueue"]
        run_tool("tc", "-netns", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *queue_out)
        run_tool("tc", "-netns", self.network.namespace, "qdisc", "replace", "dev", self._port, "root", *queue_in)

    def _wait_for_link(self) -> None:
        """Waits until both ends of the link send; the kernel drops what comes before that."""
        end = time.monotonic() + DEADLINE_S
        for namespace, device in ((self.namespace, "eth0"), (self.network.namespace, self._port)):
            while "state UP" not in run_tool("ip", "-netns", namespace, "link", "show", "dev", device):
                if time.monotonic() > end:
                    raise TimeoutError(f"the link of {self.name} does not come up")
                time.sleep(0.005)

    def _begin_first_process(self) -> None:
        """Starts the process that holds the host's names and mounts, and waits until they are there."""
        self._first = subprocess.Popen(
            [
                _path_of("nsenter"), f"--net={NAMESPACES / self.namespace}",
                _path_of("unshare"), "--uts", "--mount", "--propagation=private",
                _path_of("sh"), "-c", FIRST_PROCESS, "sh", self.name, self.network.folder, self.namespace,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        is_told = _is_readable(self._first.stdout.fileno(), time.monotonic() + DEADLINE_S)
        told = os.read(self._first.stdout.fileno(), 4096) if is_told else b"no answer"
        if told != b"ready\n":
            raise RuntimeError(f"cannot make the host {self.name}: {told.decode(errors='replace').strip()}")

    def _end_first_process(self) -> None:
        """Collects the first process, which has been killed."""
        if self._first is not None:
            with self._first:  # closes its pipes and waits
                self._first = None

    def _configure(self, *lines: str) -> None:
        """Runs commands of ``ip`` in this host's network."""
        run_tool("ip", "-netns", self.namespace, "-batch", "-", text="\n".join(lines))


class Network:
    """Hosts on one bridge, with the network 198.18.n.0/24, which is reserved for tests and leads nowhere else.

    ``folder`` takes the files that the hosts have instead of the machine's.
    """

    def __init__(self, folder: Path) -> None:
        self.serial = next(_serials)
        self.namespace = f"{PREFIX}-{os.getpid()}-{start_ticks(os.getpid())}-{self.serial}"
        self.folder = folder / f"network-{self.serial}"
        self.hosts: dict[str, Host] = {}
        self._bridges = 0

    def __enter__(self) -> Network:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Makes the bridge."""
        (self.folder / "cgroup").mkdir(parents=True)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        run_tool("ip", "netns", "add", self.namespace)
        self._add_bridges(1)

    def add(self, *names: str) -> list[Host]:
        """Adds hosts and switches them on."""
        return [self._add(name) for name in names]

    def partition(self, *groups: Iterable[Host]) -> None:
        """Splits the network: hosts hear those of their own group only; those in no group form one more."""
        group_of = {host.name: number for number, group in enumerate(groups, 1) for host in group}
        self._add_bridges(len(groups) + 1)
        for host in self.hosts.values():
            host.join(f"bridge{group_of.get(host.name, 0)}")

    def heal(self) -> None:
        """Takes back a partition."""
        self.partition()

    def close(self) -> None:
        """Kills all that runs in the hosts and removes every trace of them."""
        with contextlib.ExitStack() as closing:  # does each, also when another one fails
            closing.callback(self._forget_hosts)
            for name in namespaces():
                if name == self.namespace or name.startswith(f"{self.namespace}."):
                    closing.callback(remove_namespace, name)

    def address_of(self, number: int) -> str:
        """The address of the host with this number."""
        return f"198.18.{self.serial % 256}.{number}"

    def mac_of(self, number: int) -> str:
        """The hardware address of the host with this number."""
        return f"02:00:00:00:{self.serial % 256:02x}:{number:02x}"

    def configure_bridge(self, *lines: str) -> None:
        """Runs commands of ``ip`` in the namespace of the bridge."""
        run_tool("ip", "-netns", self.namespace, "-batch", "-", text="\n".join(lines))

    def _add(self, name: str) -> Host:
        number = len(self.hosts) + 1
        if number > HOSTS_MAX or name in self.hosts or not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
            raise ValueError(f"no room for a host {name!r}")
        host = self.hosts[name] = Host(self, number, name)
        with open(self.folder / "hosts", "a") as known:  # the same file is mounted in all hosts
            known.write(f"{host.address} {name}\n")
        host.power_on()
        return host

    def _forget_hosts(self) -> None:
        """Collects the processes of the hosts, whose namespaces are gone."""
        for host in self.hosts.values():
            host.collect()
        self.hosts.clear()

    def _add_bridges(self, count: int) -> None:
        """Makes bridges until there are this many, each of which is a network without a link to the others."""
        for number in range(self._bridges, count):
            bridge = f"bridge{number}"
            self.configure_bridge(
                f"link add {bridge} type bridge stp_state 0 mcast_snooping 0", f"link set {bridge} addrgenmode none up"
            )
            self._bridges = number + 1
