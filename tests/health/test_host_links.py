"""Interfaces and RDMA ports that lose their link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from health_lab import Findings, Tree, only, wait_until

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import LINK_DOWN, Level, ProbeNotes
from unicron_elastic.health.host.network import LinkProbe, Window
from unicron_elastic.health.host.port_probe import PortProbe


def make(tree: Tree, findings: Findings | None = None, only_these: tuple[str, ...] | None = None) -> LinkProbe:
    return LinkProbe(only=only_these, net=tree.net, notes=None if findings is None else ProbeNotes(findings.say))


def test_a_link_that_is_up(tree: Tree, findings: Findings) -> None:
    probe = make(tree, findings)
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert findings.said == []


def test_a_link_that_goes_down_and_comes_back(tree: Tree) -> None:
    probe = make(tree)
    assert probe.check(1.0) == []
    tree.interface("eth0", "down", changes=3)
    found = only(probe.check(6.0))
    assert (found.probe, found.level, found.status, found.severity) == (
        "link",
        Level.CRITICAL,
        LINK_DOWN,
        Severity.SEV3,
    )
    assert (found.subject, found.reason) == ("eth0", "eth0 has lost its link.")
    tree.interface("eth0", "up", changes=4)
    flapped = only(probe.check(11.0))
    assert (flapped.probe, flapped.level, flapped.status) == ("link.flapping", Level.WARN, Status.LINK_FLAPPING)
    assert flapped.reason == "The link of eth0 went down or came up 2 times within 60 s."
    assert probe.check(80.0) == []


def test_a_link_that_somebody_switched_off(tree: Tree) -> None:
    probe = make(tree)
    probe.check(1.0)
    tree.interface("eth0", "down", changes=3, flags="0x1002")
    assert only(probe.check(2.0)).reason == "eth0 was switched off."


def test_ports_that_nobody_uses_are_no_matter(tree: Tree) -> None:
    tree.interface("eth1", "down")
    probe = make(tree)
    assert probe.check(1.0) == []
    tree.interface("eth1", "up")
    assert probe.check(2.0) == []
    tree.interface("eth1", "lowerlayerdown")
    assert only(probe.check(3.0)).subject == "eth1"


@pytest.mark.parametrize("name", ["lo", "docker0", "veth12ab", "br-lan"])
def test_virtual_interfaces_are_left_out_unless_named(tree: Tree, name: str) -> None:
    tree.interface(name)
    tree.remove(f"sys/class/net/{name}/device")
    probe, named = make(tree), make(tree, only_these=(name,))
    assert probe.check(1.0) + named.check(1.0) == []
    tree.interface(name, "down")
    tree.remove(f"sys/class/net/{name}/device")
    assert probe.check(2.0) == []
    assert only(named.check(2.0)).subject == name


def test_a_bond_that_goes_on_with_one_link_less(tree: Tree) -> None:
    tree.set({"sys/class/net/bonding_masters": "bond0\n", "sys/class/net/bond0/bonding/slaves": "eth0\n"})
    tree.set({"sys/class/net/bond0/operstate": "up\n", "sys/class/net/bond0/carrier_changes": "1\n"})
    os.symlink("../bond0", tree.root / "sys/class/net/eth0/master")
    probe = make(tree)
    assert probe.check(1.0) == []
    tree.interface("eth0", "down")
    found = only(probe.check(2.0))
    assert (found.level, found.reason) == (Level.WARN, "eth0 has lost its link; its bond goes on without it.")
    tree.set({"sys/class/net/bond0/operstate": "down\n"})
    assert [found.subject for found in probe.check(3.0) if found.level is Level.CRITICAL] == ["bond0", "eth0"]


@pytest.mark.parametrize(("only_these", "level"), [(None, Level.WARN), (("eth0",), Level.CRITICAL)])
def test_an_interface_that_is_gone(tree: Tree, only_these: tuple[str, ...] | None, level: Level) -> None:
    probe = make(tree, only_these=only_these)
    probe.check(1.0)
    tree.remove("sys/class/net/eth0")
    for at in (2.0, 3.0):
        found = only(probe.check(at))
        assert (found.level, found.reason) == (level, "The network interface eth0 is gone.")
    tree.interface("eth0")
    assert probe.check(4.0) == []


def test_what_cannot_be_seen_is_said_once(tree: Tree, findings: Findings) -> None:
    tree.remove("sys/class/net/eth0/carrier_changes")
    probe = make(tree, findings, only_these=("eth0", "ib7"))
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert findings.said == [
        "There is no network interface ib7: it is watched once it has come.",
        "How often eth0 lost its link is not told: whether it flaps is not watched.",
    ]
    tree.remove("sys/class/net/eth0/operstate")
    assert probe.check(3.0) == []
    tree.remove("sys/class/net")
    assert [probe.check(at) for at in (4.0, 5.0)] == [[], []]
    assert len(findings.said) == 3


@pytest.mark.parametrize("text", ["", "\n", "unknown\n", "testing\n"])
def test_states_that_prove_nothing(tree: Tree, text: str) -> None:
    probe = make(tree)
    probe.check(1.0)
    tree.set({"sys/class/net/eth0/operstate": text, "sys/class/net/eth0/carrier_changes": text})
    assert probe.check(2.0) == []


def test_growth_within_a_window() -> None:
    window = Window(10.0)
    seen = [window.growth(at, value) for at, value in ((0.0, 5), (4.0, 6), (9.0, 8), (11.0, 8), (15.0, 8), (30.0, 8))]
    assert seen == [0, 1, 3, 3, 2, 0]
    assert window.growth(31.0, 2) == 0  # the driver was loaded anew
    assert window.growth(32.0, 3) == 1


def test_this_machine(findings: Findings) -> None:
    probe = LinkProbe(notes=ProbeNotes(findings.say))
    assert [found for at in (1.0, 2.0) for found in probe.check(at) if found.level is Level.CRITICAL] == []
    assert not [said for said in findings.said if "cannot be read" in said]
    assert PortProbe().check(1.0) == []


def port(tree: Tree, state: str, downed: int = 0) -> None:
    folder = "sys/class/infiniband/mlx5_0/ports/1"
    tree.set({f"{folder}/state": f"{state}\n", f"{folder}/counters/link_downed": f"{downed}\n"})


def test_a_port_that_is_no_longer_active(tree: Tree) -> None:
    probe = PortProbe(infiniband=tree.infiniband)
    assert probe.check(0.0) == []
    port(tree, "1: DOWN")
    assert probe.check(1.0) == []  # not in use so far
    port(tree, "4: ACTIVE")
    assert probe.check(2.0) == []
    port(tree, "2: INIT")
    found = only(probe.check(3.0))
    assert (found.probe, found.level, found.status) == ("link.rdma", Level.CRITICAL, LINK_DOWN)
    assert found.reason == "mlx5_0 port 1 is no longer active: its state is INIT."
    tree.remove("sys/class/infiniband/mlx5_0")
    assert only(probe.check(4.0)).reason == "mlx5_0 port 1 is no longer active: it is gone."


def test_a_port_that_lost_its_link_between_two_checks(tree: Tree) -> None:
    port(tree, "4: ACTIVE", 7)
    probe = PortProbe(infiniband=tree.infiniband)
    assert probe.check(1.0) == []
    port(tree, "4: ACTIVE", 9)
    found = only(probe.check(6.0))
    assert (found.level, found.status) == (Level.WARN, Status.LINK_FLAPPING)
    assert found.reason == "mlx5_0 port 1 lost its link 2 times within 60 s."
    assert probe.check(70.0) == []


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[tuple[list[str], str]]:
    """A network namespace with a pair of interfaces, near and far: how to run there, and its /sys/class/net."""
    folder = tmp_path / "sys"
    folder.mkdir()
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("no network namespace can be made here")
    script = (
        'mount -t sysfs none "$0" && ip link add name near type veth peer name far '
        "&& ip link set near up && ip link set far up && echo ready && read -r _"
    )
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            holder.kill()
            pytest.skip("no pair of interfaces can be made here")
        yield ["nsenter", "--net", "--target", str(holder.pid)], f"/proc/{holder.pid}/root{folder}/class/net"
        holder.kill()


def test_a_real_link_that_goes_down_and_flaps(namespace: tuple[list[str], str]) -> None:
    enter, net = namespace

    def switch_far(state: str) -> None:
        subprocess.run([*enter, "ip", "link", "set", "far", state], check=True)

    def operstate() -> str:
        return Path(net, "near/operstate").read_text(encoding="ascii").strip()

    wait_until(lambda: operstate() == "up")
    probe = LinkProbe(only=["near"], net=net)
    assert LinkProbe(net=net).check(1.0) == []
    assert probe.check(1.0) == []
    switch_far("down")
    wait_until(lambda: operstate() == "lowerlayerdown")
    found = [each for each in probe.check(2.0) if each.probe == "link"]
    assert only(found).reason == "near has lost its link."
    assert only(found).level is Level.CRITICAL
    switch_far("up")
    wait_until(lambda: operstate() == "up")
    flapped = only(probe.check(3.0))
    assert flapped.status is Status.LINK_FLAPPING
    assert "2 times" in flapped.reason
