"""A real etcd for the tests of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_lab import BINARY

from unicron_elastic.rendezvous.embedded_etcd import EmbeddedEtcd


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """One server for many tests, each with a namespace of its own."""
    with EmbeddedEtcd(binary=BINARY) as server:
        yield server
