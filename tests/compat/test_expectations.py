"""The installed torch is as the table says. Needs nothing but torch and pytest:

PYTHONPATH=. python -m pytest -c /dev/null --noconftest tests/compat/test_expectations.py
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from unicron_elastic.compat.expectations import EXPECTATIONS, Expectation, Feature, why_missing


@pytest.mark.parametrize("expected", EXPECTATIONS, ids=lambda each: f"{each.part.name}-{each.path}")
def test_torch_is_as_expected(expected: Expectation) -> None:
    assert why_missing(expected) == ""


class Changed:
    """Stands for a class of torch that is written in Python."""

    def __init__(self, spec: Any, *, timeout: int = 30) -> None:
        self.spec, self.timeout = spec, timeout

    def run(self) -> None:
        def inner() -> None:
            self.stop()  # type: ignore[attr-defined]

        inner()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of torch that nobody knows."""
    module = ModuleType("torch_of_tomorrow")
    module.Changed = Changed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize(
    ("path", "like", "why"),
    [
        ("Changed.__init__", {"takes": ("spec", "old|timeout"), "sets": ("spec",)}, ""),
        ("Changed.run", {"uses": ("stop",)}, ""),
        ("Changed", {"takes": ("timeout",), "says": ("Stands for",)}, ""),
        ("Changed.start", {}, "Changed.start is not there"),
        ("Changed.start", {"orelse": "torch_of_tomorrow:Changed.run"}, ""),
        ("Changed.start", {"orelse": "torch_of_tomorrow:Changed.begin"}, "Changed.start is not there"),
        ("Changed.__init__", {"takes": ("wait|patience",)}, "Changed.__init__ does not take wait or patience"),
        ("Changed.__init__", {"sets": ("store",)}, "Changed.__init__ does not set store"),
        ("Changed.run", {"uses": ("_shutdown",)}, "Changed.run does not use _shutdown"),
        ("Changed", {"says": ("listen_fd",)}, "Changed does not know listen_fd"),
    ],
)
def test_what_is_missing_is_named(path: str, like: dict[str, Any], why: str) -> None:
    expected = Expectation(part=Feature.AGENT, path=f"torch_of_tomorrow:{path}", **like)
    assert why_missing(expected) == (why and f"torch_of_tomorrow.{why}")


def test_a_module_that_is_gone_is_missing() -> None:
    assert (
        why_missing(Expectation(part=Feature.NUMA, path="torch.of.the.past:name"))
        == "torch.of.the.past.name is not there"
    )
