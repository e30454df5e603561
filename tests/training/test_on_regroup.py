"""What befalls a script's on_regroup: the loss of a member is no mistake of the script, and all else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.training.group.assembly import Assembly, OnRegroupError
from unicron_elastic.training.group.reports import Reports


def _assembly(error: Exception) -> Assembly:
    def make_groups() -> None:
        raise error

    membership: Any = SimpleNamespace(is_left=lambda: False)
    assembly = Assembly(membership, Mock(), Mock(), Reports(), signs=Mock(), timeout_s=1.0)
    assembly.world = World(number=1, members=(Member(name="0", node="n", local_rank=0),), store="h:1")
    assembly.on_connect = make_groups
    return assembly


def test_a_group_that_is_given_up_as_a_newer_world_has_come_is_made_again_there() -> None:
    with pytest.raises(Superseded):
        _assembly(Superseded())._call_script()


def test_a_mistake_of_the_script_is_named() -> None:
    with pytest.raises(OnRegroupError, match=r"make_groups.*, which is this script's on_regroup, raised KeyError"):
        _assembly(KeyError("no"))._call_script()
