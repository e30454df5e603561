"""Watchers are told as long as they live, whoever else is added meanwhile."""

from __future__ import annotations

import threading

from unicron_elastic.compat.watching.watchers import Watchers


class Ear:
    """`Ear` hears nothing; it can be weakly referred to."""


def test_each_is_there_once_and_no_longer_than_it_lives() -> None:
    watchers = Watchers[Ear]()
    first, second = Ear(), Ear()
    for each in (first, second, first):
        watchers.add(each)
    assert set(watchers) == {first, second}
    assert len(list(watchers)) == 2
    del second
    assert list(watchers) == [first]


def test_some_may_be_added_while_others_are_told() -> None:
    watchers = Watchers[Ear]()
    ears = [Ear() for _ in range(2000)]
    errors: list[Exception] = []
    is_over = threading.Event()

    def tell() -> None:
        try:
            while not is_over.is_set():
                list(watchers)
        except Exception as error:
            errors.append(error)

    teller = threading.Thread(target=tell)
    teller.start()
    for each in ears:
        watchers.add(each)
    is_over.set()
    teller.join(10.0)
    assert not errors
    assert len(list(watchers)) == len(ears)
