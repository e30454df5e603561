"""The hosts of a test are apart from each other and from the machine, fail as real ones do, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import hosts
import pytest
from hosts import Host, Network

DEADLINE_S = 15.0
PORT = 7000  # every host has ports of its own
TCP_ESTABLISHED, TCP_CLOSE_WAIT = 1, 8  # tcpi_state of TCP_INFO

HOLD = """
import os, socket, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", os.getpid(), flush=True)
        while True: os.read(os.pipe()[0], 1)
    os._exit(0)
server = socket.create_server(("", 7000))
print("serving", flush=True)
held, _ = server.accept()
print("holding", flush=True)
os.read(os.pipe()[0], 1)
"""

OWNER = """
import sys, time
from pathlib import Path
from hosts import Network
network = Network(Path(sys.argv[1]))
network.open()
(host,) = network.add("one")
started = host.start(["sleep", "1000"])  # in a session of its own
while Path(f"/proc/{started.pid}/comm").read_text() != "sleep\\n":
    time.sleep(0.01)  # it is on its way into the host
print(network.namespace, started.pid, flush=True)
sys.stdin.read()
"""

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://one:29500", rank=int(sys.argv[1]), world_size=2)
total = torch.tensor([float(sys.argv[1]) + 1])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits for something that is bound to happen; fails the test at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.005)


def wait_for_death(pid: int) -> None:
    """Waits for the end of a process that need not be a child."""
    wait_until(lambda: not hosts.start_ticks(pid), f"end of {pid}")


def python(code: str, *arguments: str) -> list[str]:
    """The command for a short program, without the time that ``site`` takes."""
    return [sys.executable, "-S", "-c", code, *arguments]


def connect(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    """A connection between two hosts; this process is at both ends."""
    with server.within(lambda: socket.create_server(("", PORT))) as listener:
        near = client.within(lambda: socket.create_connection((server.address, PORT), DEADLINE_S))
        far, _ = listener.accept()
    far.settimeout(DEADLINE_S)
    return near, far


def datagrams(host: Host) -> socket.socket:
    """A socket for datagrams to and from this host."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((host.address, PORT))
        made.settimeout(DEADLINE_S)
        return made

    return host.within(make)


def can_connect(client: Host, to: str) -> bool:
    """Whether a process of ``client`` gets a connection to this name or address."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 5)"
    return client.run(python(code, to)).returncode == 0


def tcp_info(connection: socket.socket) -> tuple[int, int]:
    """The kernel's state of a connection and how often it has sent the same again without an answer."""
    state, _, retransmits = struct.unpack_from("BBB", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8))
    return state, retransmits


def arrived(receiver: socket.socket, last: bytes) -> list[bytes]:
    """All datagrams before this one, which is known to arrive."""
    return list(iter(lambda: receiver.recv(64), last))


def is_silent(connections: Iterable[socket.socket]) -> bool:
    """Whether there is nothing to read, not even an end, on any of these."""
    return not select.select(list(connections), [], [], 0)[0]


def machine() -> tuple[list[str], list[str], list[str]]:
    """What hosts could leave behind: names of namespaces, network links, mounts. Not those of another run of tests."""
    names = [line.split()[0] for line in hosts.run_tool("ip", "netns", "list").splitlines()]
    links = [line.split(": ")[1] for line in hosts.run_tool("ip", "-oneline", "link").splitlines()]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if hosts.PREFIX in line]
    return (
        [name for name in names if not is_of_another_run(name)],
        links,
        [line for line in mounts if not is_of_another_run(Path(line.split()[1]).name)],
    )


def is_of_another_run(name: str) -> bool:
    """Whether a namespace was made by another process, such as tests that are run at the same time."""
    made = re.match(rf"{hosts.PREFIX}-(\d+)-", name)
    return made is not None and int(made[1]) != os.getpid()


def test_hosts_reach_each_other(network: Network) -> None:
    """By name and by address, each to each."""
    three = network.add("one", "two", "three")

    listeners = [host.within(lambda: socket.create_server(("", PORT))) for host in three]

    for client in three:
        assert all(can_connect(client, other.name) for other in three)
    assert can_connect(three[0], three[1].address)
    for listener in listeners:
        listener.close()


def test_the_machine_is_out_of_reach(network: Network) -> None:
    """A host hears nothing of the machine's own ports, nor the machine of the host's."""
    (one,) = network.add("one")

    with socket.create_server(("127.0.0.1", PORT)):
        assert not can_connect(one, "127.0.0.1")
    with one.within(lambda: socket.create_server(("", PORT))), socket.socket() as probe:
        assert can_connect(one, "localhost")
        assert probe.connect_ex(("127.0.0.1", PORT)) != 0


def test_each_host_has_its_name(network: Network) -> None:
    """``gethostname`` differs, and the machine keeps its own."""
    own = socket.gethostname()
    names = ["one", "two-2"]

    told = [host.run(python("import socket; print(socket.gethostname())")).stdout for host in network.add(*names)]

    assert [f"{name}\n" for name in names] == told
    assert own == socket.gethostname()


def test_each_host_has_its_shared_memory_and_devices(network: Network) -> None:
    """What one host puts into /dev/shm is not in another's; /sys shows the host's own link."""
    one, two = network.add("one", "two")

    assert one.run(["touch", "/dev/shm/from-one"]).returncode == 0
    assert one.run(["ls", "/dev/shm"]).stdout == "from-one\n"
    assert two.run(["ls", "/dev/shm"]).stdout == ""
    assert sorted(two.run(["ls", "/sys/class/net"]).stdout.split()) == ["eth0", "lo"]


def test_start(network: Network, tmp_path: Path) -> None:
    """A process has the pid that we see, a session of its own, and the folder and environment that it is given."""
    (one,) = network.add("one")
    code = "import os; print(os.getpid() == os.getsid(0), os.getpid(), os.getcwd(), dict(os.environ)['MARK'])"

    process = one.start(python(code), env={"MARK": "a b=c"}, cwd=tmp_path, out=tmp_path / "out")

    assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "out").read_text() == f"True {process.pid} {tmp_path} a b=c\n"
    assert one.run(["no-such-command"]).returncode == 127


def test_run_ends_at_its_time_limit(network: Network) -> None:
    """A command that goes on is ended."""
    (one,) = network.add("one")

    with pytest.raises(subprocess.TimeoutExpired):
        one.run(["sleep", "1000"], timeout_s=0.1)

    assert not one.pids()


def test_a_cut_link_is_silent_and_goes_on_after(network: Network) -> None:
    """What is sent over a cut link is sent again and again, and arrives when the link is back."""
    one, two = network.add("one", "two")
    near, far = connect(one, two)

    with near, far:
        two.cut()
        near.sendall(b"late")
        wait_until(lambda: tcp_info(near)[1] >= 2, "the kernel sends again")
        assert tcp_info(near)[0] == tcp_info(far)[0] == TCP_ESTABLISHED
        assert is_silent([near, far])

        two.restore()
        assert far.recv(16) == b"late"
        far.sendall(b"answer")
        assert near.recv(16) == b"answer"


def test_only_the_host_itself_sees_its_link_down(network: Network) -> None:
    """As with a cable that is pulled: the host's device has no carrier, the others' have."""
    one, two = network.add("one", "two")
    carrier = ["cat", "/sys/class/net/eth0/carrier"]

    two.cut()

    wait_until(lambda: two.run(carrier).stdout == "0\n", "carrier lost")
    assert one.run(carrier).stdout == "1\n"
    two.restore()
    wait_until(lambda: two.run(carrier).stdout == "1\n", "carrier back")


def test_nobody_hears_a_power_off(network: Network, tmp_path: Path) -> None:
    """Processes and daemons are gone at once, and the peer's connection stands as if they were there."""
    one, two = network.add("one", "two")
    process, daemon, near = hold(one, two, tmp_path / "out")

    with near:
        two.power_off()

        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        assert not hosts.start_ticks(daemon)
        assert not two.pids()
        assert tcp_info(near)[0] == TCP_ESTABLISHED
        near.sendall(b"anybody?")
        wait_until(lambda: tcp_info(near)[1] >= 1, "the kernel sends again")
        assert is_silent([near])
        with pytest.raises(RuntimeError, match="two is off"):
            two.start(["true"])

        two.power_on()  # it knows nothing of the connection
        with pytest.raises(ConnectionResetError):
            near.recv(1)
    assert two.run(["hostname"]).stdout == "two\n"


def test_a_power_off_ends_what_has_only_begun(network: Network) -> None:
    """A process that is not yet in the host when the power goes does not live on outside."""
    (one,) = network.add("one")

    process = one.start(["sleep", "1000"])
    one.power_off()

    assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_killing_alone_is_heard(network: Network, tmp_path: Path) -> None:
    """The counter-proof: without the cut, the peer gets the end of the connection."""
    one, two = network.add("one", "two")
    process, _, near = hold(one, two, tmp_path / "out")

    with near:
        two.kill_all()

        assert near.recv(1) == b""
        assert tcp_info(near)[0] == TCP_CLOSE_WAIT
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert two.run(["hostname"]).stdout == "two\n"


def hold(client: Host, server: Host, out: Path) -> tuple[subprocess.Popen[bytes], int, socket.socket]:
    """A process that holds a connection, its daemon's pid, and our end of the connection."""
    process = server.start(python(HOLD), out=out)
    wait_until(lambda: {"daemon", "serving"} <= set(out.read_text().split()), "the server and its daemon")
    near = client.within(lambda: socket.create_connection((server.address, PORT), DEADLINE_S))
    wait_until(lambda: "holding" in out.read_text(), "the server has the connection")
    words = out.read_text().split()
    daemon = int(words[words.index("daemon") + 1])
    assert {process.pid, daemon} <= server.pids()
    return process, daemon, near


@pytest.mark.usefixtures("one_way_cut")
@pytest.mark.parametrize("direction", ["out", "in"])
def test_one_direction_alone_is_cut(network: Network, direction: str) -> None:
    """Datagrams of the cut direction are lost for good, those of the other one arrive."""
    one, two = network.add("one", "two")
    cut, other = (one, two) if direction == "out" else (two, one)  # what ``cut`` sends to ``other`` is lost

    with datagrams(cut) as lost_side, datagrams(other) as heard_side:
        one.cut_out() if direction == "out" else one.cut_in()
        lost_side.sendto(b"lost", (other.address, PORT))
        heard_side.sendto(b"heard", (cut.address, PORT))
        assert lost_side.recv(64) == b"heard"

        one.restore()
        lost_side.sendto(b"last", (other.address, PORT))
        assert arrived(heard_side, b"last") == []


def test_datagrams_pass_as_soon_as_a_link_is_back(network: Network) -> None:
    """``restore`` returns when nothing more is lost."""
    one, two = network.add("one", "two")

    with datagrams(one) as sender, datagrams(two) as receiver:
        two.cut()
        sender.sendto(b"lost", (two.address, PORT))
        two.restore()
        sender.sendto(b"last", (two.address, PORT))
        assert arrived(receiver, b"last") == []


@pytest.mark.usefixtures("one_way_cut")
def test_a_connection_outlives_a_one_way_cut(network: Network) -> None:
    """Data arrives while its acknowledgement does not; neither side is told."""
    one, two = network.add("one", "two")
    near, far = connect(one, two)

    with near, far:
        two.cut_out()
        near.sendall(b"heard")
        assert far.recv(16) == b"heard"
        wait_until(lambda: tcp_info(near)[1] >= 1, "the kernel sends again")
        assert is_silent([near, far])

        two.restore()
        wait_until(lambda: tcp_info(near)[1] == 0, "the acknowledgement")


@pytest.mark.usefixtures("netem")
def test_a_slow_host_answers_no_sooner(network: Network) -> None:
    """Each round trip takes at least the delay, on top of nothing else that was there."""
    one, two = network.add("one", "two")
    near, far = connect(one, two)

    with near, far:
        two.slow(80.0)
        for _ in range(3):
            began = time.monotonic()
            near.sendall(b"?")
            far.sendall(far.recv(1))
            near.recv(1)
            assert time.monotonic() - began >= 0.08


@pytest.mark.usefixtures("netem")
def test_a_lossy_host_loses_its_share(network: Network) -> None:
    """Half of 200 datagrams, give or take seven standard deviations."""
    one, two = network.add("one", "two")

    with datagrams(one) as sender, datagrams(two) as receiver:
        one.lossy(50.0)
        for _ in range(200):
            sender.sendto(b"maybe", (two.address, PORT))
        one.restore()
        sender.sendto(b"last", (two.address, PORT))
        assert 50 <= len(arrived(receiver, b"last")) <= 150


def test_partition(network: Network) -> None:
    """Each group hears its own; all hear each other again after."""
    one, two, three = network.add("one", "two", "three")

    with datagrams(one) as first, datagrams(two) as second, datagrams(three) as third:
        network.partition([one, two], [three])
        for peer in (two, three):
            first.sendto(b"early", (peer.address, PORT))
        assert second.recv(64) == b"early"

        network.heal()
        first.sendto(b"last", (three.address, PORT))
        assert arrived(third, b"last") == []


def test_two_networks_are_apart(make_network: Callable[[], Network]) -> None:
    """The same names and ports, and a fault or the end of one that the other does not notice."""
    left, right = make_network(), make_network()
    one, two = left.add("one", "two")
    same, other = right.add("one", "two")
    near, far = connect(same, other)

    with near, far, one.within(lambda: socket.create_server(("", PORT))):
        assert can_connect(two, "one")
        assert not can_connect(other, "one")

        two.cut()
        one.power_off()
        left.close()
        near.sendall(b"undisturbed")
        assert far.recv(64) == b"undisturbed"
    assert can_connect_both_ways(same, other)


def can_connect_both_ways(one: Host, two: Host) -> bool:
    """Whether new connections can be made."""
    for client, server in ((one, two), (two, one)):
        for connection in connect(client, server):
            connection.close()
    return True


def test_nothing_is_left(tmp_path: Path) -> None:
    """Also of a test that fails with a daemon running, a link cut, and a host switched off."""
    before = machine()

    with contextlib.suppress(ZeroDivisionError), Network(tmp_path) as network:
        one, two, three = network.add("one", "two", "three")
        process = one.start(python(HOLD), out=tmp_path / "out")
        wait_until(lambda: "daemon" in (tmp_path / "out").read_text(), "the daemon")
        left = one.pids()
        two.cut()
        three.power_off()
        raise ZeroDivisionError

    assert before == machine()
    assert len(left) >= 2
    assert not any(hosts.start_ticks(pid) for pid in left)
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_left_of_hosts_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of making a host is told, and what was made goes away."""
    before = machine()
    monkeypatch.setattr(hosts, "FIRST_PROCESS", "echo no mounts here; exit 1")

    with pytest.raises(RuntimeError, match="cannot make the host one: no mounts here"), Network(tmp_path) as network:
        network.add("one")

    assert before == machine()


def test_leftovers_of_a_killed_run(tmp_path: Path) -> None:
    """Its processes end with it; its names are removed by the next run, and only those of runs that are gone."""
    before = machine()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}

    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name, pid = owner.stdout.readline().split()
        assert hosts.start_ticks(int(pid))
        hosts.remove_leftovers()
        assert {name, f"{name}.one"} <= set(hosts.namespaces())
        owner.kill()
        wait_for_death(int(pid))

    hosts.remove_leftovers()
    assert not {name, f"{name}.one"} & set(hosts.namespaces())
    assert before == machine()


def test_leftovers_are_told_from_those_of_a_later_process(network: Network) -> None:
    """A pid that is in use again does not keep them."""
    name = f"{hosts.PREFIX}-{os.getpid()}-1-1"
    hosts.run_tool("ip", "netns", "add", name)

    hosts.remove_leftovers()
    assert name not in hosts.namespaces()
    assert network.namespace in hosts.namespaces()


def test_why_there_can_be_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence for whoever sees the tests skipped."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.why_no_hosts.__wrapped__() == "hosts of a test are namespaces, which only root may make"

    monkeypatch.setenv("PATH", "/nowhere")
    assert hosts.why_no_hosts.__wrapped__().startswith("hosts of a test need the commands env, ip, mount")


def test_gloo_between_hosts(network: Network, tmp_path: Path) -> None:
    """Two processes of one training job, one on each host, find each other by name and add up."""
    pair = network.add("one", "two")
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}

    started = [
        host.start(
            [sys.executable, "-c", ALL_REDUCE, str(rank)], env=environ, cwd=tmp_path, out=tmp_path / f"out{rank}"
        )
        for rank, host in enumerate(pair)
    ]

    ends = [process.wait(3 * DEADLINE_S) for process in started]
    outputs = [(tmp_path / f"out{rank}").read_text() for rank in range(2)]
    assert ends == [0, 0], outputs
    assert all("sum 3.0" in output for output in outputs)
