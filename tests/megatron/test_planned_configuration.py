"""What a Megatron-Core script is told of the configuration that the cluster's plan has in mind."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from unicron_elastic.megatron import groups as alone
from unicron_elastic.megatron import workload as configured
from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.planning.model.configured import CONFIGURATION, configuration_text

TOLD = Configuration(replicas=2, tensor=2, pipeline=2, micro_batch=4, recompute=True)


@pytest.fixture(autouse=True)
def _of_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("UNICRON_TAKES_PLACE", raising=False)


def test_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIGURATION, configuration_text(TOLD))
    assert configured.configuration() == TOLD


@pytest.mark.parametrize("text", [None, ""])
def test_nobody_has_planned(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv(CONFIGURATION, raising=False)
    if text is not None:
        monkeypatch.setenv(CONFIGURATION, text)
    assert configured.configuration() is None


def test_it_must_be_for_as_many_ranks_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIGURATION, configuration_text(TOLD))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"PP 2, micro-batch 4, recomputed activations, for 8 ranks: there are 4$"):
        configured.configuration()
    monkeypatch.setenv("UNICRON_TAKES_PLACE", "1")  # others are gone
    assert alone.takes_place()
    assert configured.configuration() == TOLD


def test_what_is_no_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIGURATION, "tensor 2")
    with pytest.raises(ValueError, match=r"^UNICRON_CONFIGURATION is 'tensor 2': it must be a JSON object"):
        configured.configuration()
