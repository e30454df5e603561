"""The shared page: what the worker writes is what the agent reads, and nothing the worker does can hurt the agent."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.worker.pulse import BEATS_MAX, MAGIC, PAGE_BYTES, STEP_MAX, Pulse, PulsePage


@pytest.fixture
def page() -> Iterator[PulsePage]:
    made = PulsePage()
    yield made
    made.close()


def _words(page: PulsePage, words: list[int]) -> None:
    os.pwrite(page.fd, struct.pack(f"{len(words)}Q", *words), 0)


def test_a_new_page_says_that_nothing_happened(page: PulsePage) -> None:
    reading = page.read()
    assert reading is not None
    assert (reading.step, reading.step_time_s, reading.first_step_at, reading.at) == (0, None, None, None)


def test_steps_and_their_times_arrive(page: PulsePage, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse(os.dup(page.fd))
    start = time.monotonic_ns()
    for step, milliseconds in ((1, 100), (2, 350), (3, 400)):
        monkeypatch.setattr(time, "monotonic_ns", lambda at=start + milliseconds * 1_000_000: at)
        pulse.beat(step)
    reading = page.read()
    assert reading is not None
    assert reading.step == 3
    assert reading.step_time_s == pytest.approx(0.05)
    assert reading.first_step_at == pytest.approx(start / 1e9 + 0.1)
    assert reading.at == pytest.approx(start / 1e9 + 0.4)


def test_the_page_says_when_something_learned_was_saved_last(page: PulsePage) -> None:
    pulse = Pulse(os.dup(page.fd))
    pulse.count()
    pulse.saved()  # of a state that was only read
    reading = page.read()
    assert reading is not None
    assert (reading.has_saved, reading.saved_at) == (False, None)
    pulse.beat(1)
    before = time.monotonic()
    for _ in range(2):
        pulse.saved()
        reading = page.read()
        assert reading is not None
        assert reading.has_saved
        assert reading.saved_at is not None
        assert before <= reading.saved_at + 1e-6
        before = reading.saved_at


def test_the_page_keeps_when_the_latest_steps_ended(page: PulsePage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.beats() == (1, ())
    pulse = Pulse(os.dup(page.fd))
    for step in range(1, 1001):
        monkeypatch.setattr(time, "monotonic_ns", lambda at=step * 1_000_000: at)
        pulse.beat(step)
        if step == 3:
            assert page.beats() == (1, (0.001, 0.002, 0.003))
    first, at_s = page.beats()
    assert (len(at_s), first) == (BEATS_MAX - 1, 1000 - BEATS_MAX + 2)
    assert at_s[0] == pytest.approx(first / 1000)
    assert at_s[-1] == 1.0


def test_steps_that_a_script_has_overwritten_are_not_told(page: PulsePage) -> None:
    _words(page, [MAGIC, 5, *[7] * 30, 9, 5, 4, 3, 2, 1])
    assert page.beats() == (1, ())
    _words(page, [MAGIC, STEP_MAX + 1])
    assert page.beats() == (0, ())


def test_no_step_time_before_the_second_step(page: PulsePage) -> None:
    before = time.monotonic()
    Pulse(os.dup(page.fd)).beat(1)
    reading = page.read()
    assert reading is not None
    assert reading.step_time_s is None
    assert reading.at == reading.first_step_at
    assert before <= (reading.at or 0) <= time.monotonic()


def test_the_page_outlives_the_worker(page: PulsePage) -> None:
    child = os.fork()
    if child == 0:
        try:
            Pulse(page.fd).beat(1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    reading = page.read()
    assert reading is not None
    assert reading.step == 1


def test_the_worker_keeps_no_descriptor(page: PulsePage) -> None:
    fd = os.dup(page.fd)
    Pulse(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    "words",
    [
        [0, 1, 0, 0, 0, 0, 0, 0],
        [MAGIC + 1, 1, 0, 0, 0, 0, 0, 0],
        [MAGIC, STEP_MAX + 1, 0, 0, 0, 0, 0, 0],
        [MAGIC, 1, 0, 0, 2**64 - 1, 0, 0, 0],
        [MAGIC, 1, 0, 0, 0, 2**64 - 1, 0, 0],
        [2**64 - 1] * 8,
    ],
)
def test_a_corrupted_page_says_nothing(page: PulsePage, words: list[int]) -> None:
    _words(page, words)
    assert page.read() is None


@given(st.lists(st.integers(0, 2**64 - 1), min_size=7, max_size=7))
def test_no_content_breaks_the_reader(words: list[int]) -> None:
    page = PulsePage()
    try:
        _words(page, [MAGIC, *words])
        reading = page.read()
        assert reading is None or reading.step <= STEP_MAX
    finally:
        page.close()


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES * 2])
def test_the_size_is_sealed(page: PulsePage, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, size)
    assert page.read() is not None


def test_what_is_no_pulse_page_is_refused_and_closed() -> None:
    short = os.memfd_create("short")
    os.ftruncate(short, 100)
    blank = os.memfd_create("blank")
    os.ftruncate(blank, PAGE_BYTES)
    for fd, message in ((short, "must have 4096 bytes, has 100"), (blank, "not a pulse page of this version")):
        with pytest.raises(ValueError, match=message):
            Pulse(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
