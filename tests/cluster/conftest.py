"""Networks of hosts for the tests, which are skipped where there can be none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hosts import Network, remove_leftovers, why_no_hosts, why_no_netem, why_no_one_way_cut
from jobs import Cluster, Etcd, Training
from warm_launcher import WarmLaunchers


def need(why_not: str) -> None:
    """Skips the test if there is a reason why it cannot be run."""
    if why_not:
        pytest.skip(why_not)


@pytest.fixture(scope="session", autouse=True)
def clear_machine() -> None:
    """Hosts can be made here, and none of an earlier run that was killed are left."""
    need(why_no_hosts())
    remove_leftovers()


@pytest.fixture
def make_network(tmp_path: Path) -> Iterator[Callable[[], Network]]:
    """Makes networks; in the end nothing is left of them."""
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(Network(tmp_path))


@pytest.fixture
def network(make_network: Callable[[], Network]) -> Network:
    """A network without hosts so far."""
    return make_network()


@pytest.fixture
def one_way_cut() -> None:
    """For tests that cut a link in one direction."""
    need(why_no_one_way_cut())


@pytest.fixture
def netem() -> None:
    """For tests that make a link slow or lossy."""
    need(why_no_netem())


@pytest.fixture
def etcd(network: Network, tmp_path: Path, warm_launchers: WarmLaunchers) -> Etcd:
    """An etcd on a host of its own, "store"."""
    made = Etcd(network.add("store")[0], tmp_path, warm_launchers)
    made.start()
    return made


@pytest.fixture
def training(etcd: Etcd, tmp_path: Path) -> Training:
    """A job without agents so far."""
    return Training(etcd, tmp_path)


@pytest.fixture
def cluster(network: Network, training: Training) -> Callable[..., Cluster]:
    """A job that trains on hosts a, b and c, of which it needs two."""
    return partial(Cluster, network, training)
