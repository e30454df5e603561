"""No interleaving breaks the protocol: all of them within these bounds, each with what is to hold in it.

Every step that is applied has each micro-batch once, on all, and none is applied twice or left out; a state is given
as it was in one span of the script; nobody whose state is wrong has a share in what is applied; seats go on together;
no script is told an error, except one that has missed a step whose gradients nobody has any more, and those whose state
is wrong; all who live are given the same mean, or their own share if nobody whom they meet has it; and from every state
all come to their end without one more fault.
"""

from __future__ import annotations

import pytest
from exploration import Found, explore
from interleavings import Bounds

SHORT = (
    Bounds(1, (1, 2), newcomers=1, grows=True),
    Bounds(2, (2,), breaks=2),
    Bounds(2, (2,), losses=1, newcomers=1),
    Bounds(2, (2,), losses=2, newcomers=1),
    Bounds(2, (1, 2), micro_batches=1, newcomers=1, grows=True, loses_newcomers=True),
    Bounds(2, (1,), seats=2, losses=1),
    Bounds(2, (1,), seats=2, breaks=1),
    Bounds(1, (1,), breaks=1, newcomers=1, grows=True),
    Bounds(2, (1,), micro_batches=3, buckets=3, losses=1, breaks=1),
    Bounds(3, (1,), micro_batches=3, losses=1),
    Bounds(2, (2,), breaks=1, means=("before", "behind")),
    Bounds(2, (1, 2), losses=1, means=("end",)),
    Bounds(1, (1, 2), newcomers=1, grows=True, means=("before", "end")),
    Bounds(2, (2,), trains_other_from=1, breaks=1),
    Bounds(1, (2,), trains_other_from=1, newcomers=1, grows=True),
    Bounds(3, (1,), micro_batches=1, flips=1),
    Bounds(2, (1,), losses=1, newcomers=1, flips=1),
    Bounds(1, (2,), micro_batches=1, newcomers=1, grows=True, refusals=1),
    Bounds(2, (1,), buckets=3, overlaps=True, breaks=1, additions=1),
    Bounds(2, (1,), micro_batches=1, buckets=3, overlaps=True, losses=1, newcomers=1),
)
DEEP = (
    Bounds(2, (1, 2), losses=1, breaks=1),
    Bounds(2, (1,), seats=2, losses=1, breaks=1),
    Bounds(2, (1,), micro_batches=3, buckets=3, overlaps=True, losses=1, breaks=1, additions=1),
    Bounds(2, (2,), buckets=3, overlaps=True, breaks=1, additions=1),
    Bounds(2, (2,), losses=1, breaks=1, means=("before", "behind")),
    Bounds(2, (1, 2), losses=1, breaks=1, means=("end",)),
    Bounds(2, (2,), losses=1, newcomers=1, means=("before", "behind")),
    Bounds(3, (1,), micro_batches=3, losses=1, means=("behind",)),
    Bounds(2, (2,), losses=2, newcomers=2),
    Bounds(2, (2,), losses=1, breaks=1, newcomers=1),
    Bounds(2, (1, 2), losses=1, newcomers=1),
    Bounds(2, (1, 2), losses=1, newcomers=1, grows=True),
    Bounds(2, (2,), micro_batches=3, seats=2, losses=1, breaks=1),
    Bounds(2, (2,), seats=2, losses=1, newcomers=1),
    Bounds(3, (2,), losses=2),
    Bounds(3, (1,), losses=1, breaks=1),
    Bounds(3, (1,), losses=1, newcomers=1),
    Bounds(2, (2,), trains_other_from=1, losses=1, breaks=1, newcomers=1),
    Bounds(2, (2,), micro_batches=1, newcomers=1, grows=True, flips=1),
    Bounds(3, (1,), micro_batches=1, losses=1, flips=1),
    Bounds(3, (1,), micro_batches=1, breaks=1, flips=1),
    Bounds(2, (2,), micro_batches=1, losses=1, newcomers=1, refusals=1),
    Bounds(2, (2,), buckets=4, overlaps=True, losses=1, breaks=1, additions=2),
    Bounds(2, (1,), buckets=3, overlaps=True, flips=1, losses=1, newcomers=1, additions=1),
)
WIDE = (Bounds(2, (1,), breaks=1, newcomers=1, grows=True),)  # of which nobody has seen the end
WIDE_STATES = 1_000_000


def _check(bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> Found:
    found = explore(bounds)
    with capsys.disabled():
        print(f"\n{bounds}: {found}")
    assert found.is_whole
    assert not found.wrong
    assert found.ends
    return found


@pytest.mark.timeout(600)  # of a loaded machine; a few seconds of a processor
@pytest.mark.parametrize("bounds", SHORT, ids=str)
def test_no_interleaving_breaks_the_protocol(bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> None:
    _check(bounds, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bounds", DEEP, ids=str)
def test_no_interleaving_of_more_breaks_the_protocol(bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> None:
    _check(bounds, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bounds", WIDE, ids=str)
def test_nothing_is_wrong_as_far_as_is_seen_of_wider_ones(bounds: Bounds) -> None:
    assert not explore(bounds, most_states=WIDE_STATES).wrong
