"""Ctrl-C while torch is imported waits for the end of that, and a second one does not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from unicron_elastic.launcher.main import interrupts_held


def test_it_is_raised_at_the_end() -> None:
    done = []

    def importing() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("imported")

    with pytest.raises(KeyboardInterrupt):
        importing()
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_one_nothing_is_raised() -> None:
    with interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exception_of_the_import_goes_before() -> None:
    with pytest.raises(ImportError), interrupts_held():
        raise ImportError


def test_a_second_one_ends_the_process_at_once() -> None:
    code = (
        "import signal, sys\nfrom unicron_elastic.launcher.main import interrupts_held\nwith interrupts_held():\n"
        "    for _ in range(2):\n        signal.raise_signal(signal.SIGINT)\n    print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")
