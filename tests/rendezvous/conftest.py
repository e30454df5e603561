"""A real etcd for the tests of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_lab import BINARY

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """One server for many tests, each with a namespace of its own."""
    with EmbeddedEtcd(binary=BINARY) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A server for one test, with data that outlives it."""
    with EmbeddedEtcd(data_dir=tmp_path / "etcd", binary=BINARY) as started:
        yield started
