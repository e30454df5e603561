"""Waits that are shorter than what they must outlast are told when a launcher starts."""

from __future__ import annotations

import pytest

from unicron_elastic.launcher.common.odd_patience import odd_patience


@pytest.mark.parametrize(
    ("conf", "nnodes", "told"),
    [
        ({}, "2:4", []),
        ({"blind_patience": "10", "lease_ttl": "1"}, "2", []),
        (
            {"join_timeout": "20"},
            "2:4",
            [
                (
                    "--rdzv-conf join_timeout 20 is no longer than last_call_timeout 30: a first round with fewer than "
                    "4 nodes never begins, as all give up before"
                )
            ],
        ),
        ({"join_timeout": "20"}, "2", []),
        ({"join_timeout": "20", "last_call_timeout": "5"}, "2:4", []),
        (
            {"lease_ttl": "20", "blind_patience": "20"},
            "2",
            [
                (
                    "--rdzv-conf blind_patience 20 does not outlast lease_ttl 20 and the 5 s in which etcd is seen "
                    "again: workers end although nobody has taken their node for lost"
                )
            ],
        ),
        (
            {"join_timeout": "5", "lease_ttl": "10", "last_call_timeout": "1"},
            "1:2",
            [
                (
                    "--rdzv-conf join_timeout 5 is no longer than lease_ttl 10: after the loss of a node the others "
                    "give up before it counts as lost"
                )
            ],
        ),
        ({"join_timeout": "soon"}, "2:4", []),  # which is refused elsewhere
    ],
)
def test_a_wait_that_is_too_short_is_told_in_a_sentence(conf: dict[str, str], nnodes: str, told: list[str]) -> None:
    assert list(odd_patience("unicron", nnodes, conf, hang_patience_s=30.0, acts_on_hangs=True)) == told
    assert list(odd_patience("c10d", nnodes, conf, hang_patience_s=30.0, acts_on_hangs=True)) == []


@pytest.mark.parametrize(
    ("seconds", "acts", "is_told"), [(599.0, True, False), (600.0, True, True), (900.0, False, False)]
)
def test_a_hang_is_to_end_before_the_time_out_of_nccl(seconds: float, acts: bool, is_told: bool) -> None:
    said = list(odd_patience("static", "2", {}, hang_patience_s=seconds, acts_on_hangs=acts))
    assert bool(said) is is_told
    assert all(each.startswith(f"--unicron-hang-patience {seconds:g} is no less than the 600 s") for each in said)
