"""A launch is the same as an earlier one, or one clause says how it differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unicron_elastic.worker.helper_tasks import Launch
from unicron_elastic.worker.start.why_another import why_another

BEGAN = Launch(
    argv=("python", "-u", "train.py", "--lr", "1"),
    env={"HOME": "/root", "SHLVL": "1"},
    preload="torch",
    streams=("20000", "10000", "10000"),
    standing={"umask": "0022", "limits": "many", "pid namespace": "pid:[1]"},
)


def test_the_same_launch_is_no_other() -> None:
    assert why_another(BEGAN, replace(BEGAN), 3) is None


def test_the_arguments_of_the_script_may_be_others() -> None:
    assert why_another(BEGAN, replace(BEGAN, argv=("python", "-u", "train.py", "--lr", "2", "--more")), 3) is None
    assert why_another(BEGAN, replace(BEGAN, argv=("python", "-u", "train.py")), 3) is None


def test_what_a_shell_counts_makes_no_difference() -> None:
    assert (
        why_another(BEGAN, replace(BEGAN, env={"HOME": "/root", "_": "/bin/x", "SHLVL": "2", "OLDPWD": "/"}), 3) is None
    )


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (replace(BEGAN, argv=("python", "-u", "other.py", "--lr", "1")), "it was held for another command"),
        (replace(BEGAN, argv=("python3", *BEGAN.argv[1:])), "it was held for another command"),
        (replace(BEGAN, env={**BEGAN.env, "NEW": "1"}), "the environment has another NEW"),
        (replace(BEGAN, env={"HOME": "/"}), "the environment has another HOME"),
        (replace(BEGAN, env={}), "the environment has another HOME"),
        (
            replace(BEGAN, env=BEGAN.env | dict.fromkeys("ABCDE", "1")),
            "the environment has another A, B, C and 2 more",
        ),
        (replace(BEGAN, preload="torch,numpy"), "other modules are to be preloaded"),
        (replace(BEGAN, streams=("20000 terminal", "10000", "10000")), "a standard stream is of another kind"),
        (replace(BEGAN, standing={**BEGAN.standing, "umask": "0077"}), "this launch has another umask"),
        (replace(BEGAN, standing={"umask": "0022", "limits": "many"}), "this launch has another pid namespace"),
        (replace(BEGAN, standing={**BEGAN.standing, "login": "5"}), "this launch has another login"),
    ],
)
def test_one_clause_says_how_another_differs(now: Launch, why: str) -> None:
    assert why_another(BEGAN, now, 3) == why
