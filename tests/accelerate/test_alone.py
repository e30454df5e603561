from __future__ import annotations

import os

import accelerate
import pytest
from accelerate.state import AcceleratorState, PartialState

from unicron_elastic.accelerate.alone import alone, has_begun, hide_rank, missing_parts, show_rank, shown_ranks


def test_this_version_has_all_that_is_used() -> None:
    assert missing_parts() == ""


def test_a_version_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialState, "_known_attrs", ["device"])
    assert missing_parts() == "accelerate's PartialState._shared_state"


def test_what_the_launcher_says_is_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not has_begun()
    with alone():
        assert "RANK" not in os.environ
        made = accelerate.Accelerator(cpu=True)
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("1", "1")
    assert has_begun()
    assert made.num_processes == 1


def test_ranks_are_shown_to_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with alone():
        made = accelerate.Accelerator(cpu=True)
    show_rank(3)
    assert (made.process_index, made.local_process_index, made.is_main_process) == (3, 1, False)
    show_rank(0)
    assert (made.is_main_process, made.is_local_main_process) == (True, True)
    with shown_ranks(4):
        assert AcceleratorState().num_processes == PartialState().num_processes == 4
    assert AcceleratorState().num_processes == 1


def test_who_takes_a_place_is_not_the_first_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    made = accelerate.Accelerator(cpu=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "UNICRON_TAKES_PLACE": "1"}.items():
        monkeypatch.setenv(name, value)
    hide_rank()
    assert not made.is_main_process
