"""A mistyped name of a variable is told, with the one that may be meant; a script's own variables are not."""

from __future__ import annotations

import pytest

from unicron_elastic.launcher.config.odd_variables import INNER_VARIABLES, odd_variables
from unicron_elastic.launcher.main import _commands


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("UNICRON_ON_HNAG", "UNICRON_ON_HANG"),
        ("UNICRON_MAX_RESTRATS", "PET_MAX_RESTARTS"),
        ("UNICRON_MAX_RESTARTS", "PET_MAX_RESTARTS"),
        ("UNICRON_ETCD_PASWORD_FILE", "UNICRON_ETCD_PASSWORD_FILE"),
        ("UNICRON_AGENT_LABLE", "UNICRON_AGENT_LABEL"),
    ],
)
def test_a_mistyped_name_is_told_with_the_one_that_is_meant(name: str, meant: str) -> None:
    assert list(odd_variables([name, "PATH"], _commands)) == [
        f"{name} is no setting, and has no effect; perhaps {meant} is meant"
    ]


def test_what_is_right_or_of_a_script_is_not_told() -> None:
    names = [*INNER_VARIABLES, "UNICRON_ON_HANG", "UNICRON_AGENT_LABEL", "UNICRON_CONFIG", "UNICRON_HORN", "PET_X"]
    assert list(odd_variables(names, _commands)) == []
