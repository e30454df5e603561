"""The stores that there are, by the scheme of an address: nobody else knows which one it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import Store


class _Opens(Protocol):
    def __call__(self, address: StoreAddress, *, timeout_s: float) -> Store: ...


def open_store(address: StoreAddress, *, timeout_s: float = 5.0) -> Store:
    """Return the store at ``address``, as ``store_opener`` would open it."""
    return store_opener(address, timeout_s=timeout_s)()


def store_opener(address: StoreAddress, *, timeout_s: float = 5.0) -> Callable[[], Store]:
    """Return what opens the store at ``address``, as often as it is called; nothing is connected before it is used.

    Calls of the store that name no limit of their own end within ``timeout_s`` seconds. Raises ImportError if its
    client is not installed.
    """
    return partial(_STORES[address.scheme](), address, timeout_s=timeout_s)


def _etcd() -> _Opens:
    from unicron_elastic.rendezvous.store.etcd import EtcdStore

    return EtcdStore


_STORES: dict[str, Callable[[], _Opens]] = {"http": _etcd, "https": _etcd}
