from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.launcher.api as torch_api

from unicron_elastic.compat.launch import lend_agent


def test_the_launch_that_asked_for_a_rendezvous_gets_the_lent_agent_and_torch_its_class_back() -> None:
    theirs, handler = torch_api.LocalElasticAgent, object()
    made: list[Any] = []

    def make(own: Any, **options: Any) -> str:
        made.append((own, options["spec"].rdzv_handler))
        return "lent"

    lend_agent(handler, make)
    assert torch_api.LocalElasticAgent(spec=SimpleNamespace(rdzv_handler=handler)) == "lent"
    assert torch_api.LocalElasticAgent is theirs
    assert made == [(theirs, handler)]


def test_another_launch_gets_torchs_own_and_the_loan_is_over() -> None:
    theirs, made = torch_api.LocalElasticAgent, list[Any]()

    class Own:
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append((args, options))

    torch_api.LocalElasticAgent = Own
    try:
        lend_agent(object(), pytest.fail)
        other = SimpleNamespace(rdzv_handler=object())
        assert isinstance(torch_api.LocalElasticAgent(spec=other), Own)
        assert torch_api.LocalElasticAgent is Own
        assert made == [((), {"spec": other})]
    finally:
        torch_api.LocalElasticAgent = theirs
