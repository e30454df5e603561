"""A call that gets no answer is left to itself; else what comes of it is the caller's."""

from __future__ import annotations

import threading

import pytest

from unicron_elastic.rendezvous.job.answer_in_time import answer_in_time


def test_a_call_that_gets_no_answer_is_given_up() -> None:
    comes = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"the round's store did not answer within 0\.05 s"):
            answer_in_time(comes.wait, 0.05)
    finally:
        comes.set()


def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        answer_in_time(fail, 20)
    answer_in_time(lambda: None, 20)
