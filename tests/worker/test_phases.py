"""Phases: what a worker says it is doing, by its own words or by what it calls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

import unicron_elastic
from unicron_elastic.worker import phases
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import PHASE_BYTES_MAX, TRAIN, Pulse, PulsePage


@pytest.fixture
def page() -> Iterator[PulsePage]:
    made = PulsePage()
    phases._announcer.pulse = Pulse(os.dup(made.fd))
    yield made
    phases._announcer.pulse, phases._announcer.present = None, TRAIN
    made.close()


def now_in(page: PulsePage) -> str:
    reading = page.read()
    assert reading is not None
    return reading.phase


def test_a_phase_lasts_as_long_as_its_block(page: PulsePage) -> None:
    assert now_in(page) == TRAIN
    with phase("evaluation"):
        assert now_in(page) == "evaluation"
        with phase("checkpoint"):
            assert now_in(page) == "checkpoint"
        assert now_in(page) == "evaluation"
    assert now_in(page) == TRAIN


def test_it_ends_with_an_exception(page: PulsePage) -> None:
    with pytest.raises(KeyError), phase("evaluation"):
        raise KeyError
    assert now_in(page) == TRAIN


def test_the_time_of_a_change_is_told(page: PulsePage) -> None:
    before = time.monotonic()
    with phase("evaluation"):
        inside = page.read()
    after = page.read()
    assert inside is not None
    assert after is not None
    assert before <= (inside.phase_since or 0) <= (after.phase_since or 0) <= time.monotonic()


def test_a_function_can_be_a_phase_and_call_itself(page: PulsePage) -> None:
    seen = []

    @phase("evaluation")
    def evaluate(depth: int) -> None:
        seen.append(now_in(page))
        if depth:
            evaluate(depth - 1)

    evaluate(2)
    assert seen == ["evaluation"] * 3
    assert now_in(page) == TRAIN


def test_other_threads_do_not_hold_up_steps(page: PulsePage) -> None:
    seen = []

    def save() -> None:
        with phase("checkpoint"):
            seen.append(now_in(page))

    with phase("evaluation"):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert seen == ["evaluation"]


def test_a_forked_child_is_not_this_worker(page: PulsePage) -> None:
    os.register_at_fork(after_in_child=phases._announcer.fall_silent)
    child = os.fork()
    if child == 0:
        with phase("evaluation"):
            os._exit(0)
    os.waitpid(child, 0)
    assert now_in(page) == TRAIN


def test_long_names_are_cut_and_foreign_ones_kept(page: PulsePage) -> None:
    with phase("é" * PHASE_BYTES_MAX):
        assert now_in(page) == "é" * (PHASE_BYTES_MAX // 2)
    with phase("  über alles "):
        assert now_in(page) == "über alles"


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (" ", ValueError), ("a\0b", ValueError), (3, TypeError)])
def test_a_name_must_say_something(name: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="name of a phase"):
        phase(name)  # type: ignore[arg-type]


def test_under_another_launcher_it_does_nothing() -> None:
    assert phases._announcer.pulse is None
    with unicron_elastic.phase("evaluation"):
        pass


SAVES = """
    import inspect, io, os, sys
    from unicron_elastic.worker import phases
    from unicron_elastic.worker.pulse import Pulse, PulsePage
    page = PulsePage()
    {first}
    phases.announce_phases(Pulse(os.dup(page.fd)))
    {then}
    import torch
    from torch import save
    import torch.distributed.checkpoint as dcp

    class Spy(io.BytesIO):
        seen = None
        def write(self, data):
            self.seen = self.seen or page.read().phase
            return super().write(data)
        def read(self, *args):
            self.seen = self.seen or page.read().phase
            return super().read(*args)

    file = Spy()
    save({{"a": torch.ones(2)}}, file)
    print(file.seen, torch.save is save, list(inspect.signature(torch.save).parameters)[:2], torch.save.__module__)
    file = Spy(file.getvalue())
    torch.load(file)
    print(file.seen, page.read().phase, dcp.save.__wrapped__.__name__, dcp.load.__wrapped__.__name__)
    with phases.phase("export"):
        file = Spy()
        torch.save(1, file)
        print(file.seen)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_torchs_checkpoints_name_themselves(when: str) -> None:
    imports = "import torch, torch.distributed.checkpoint"
    code = SAVES.format(first=imports if when == "before" else "pass", then=imports if when == "after" else "pass")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "checkpoint True ['obj', 'f'] torch.serialization",
        f"restore {TRAIN} save load",
        "export",
    ]
