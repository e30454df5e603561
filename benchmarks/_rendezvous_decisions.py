"""What the decisions of a large job take, without a store or a connection: who trains together, and who has come."""

from __future__ import annotations

import time
from collections.abc import Callable

from _rendezvous_groups import OURS
from _scenarios import Run

from unicron_elastic.membership.coordination import (
    CoordinationState,
    CoordinatorSeen,
    Leader,
    LinkOpened,
    Node,
    NodesSeen,
    handle,
)
from unicron_elastic.membership.rounds import Formed, JobMember, JobView, Round, Settings, next_round


def deciding(nodes: int, repetition: int) -> Run:
    """Decide on the first round of so many nodes and on the next one, and note in the coordinator that all came."""
    run = Run("deciding", OURS, nodes, repetition)
    first, run.values["first_round_ms"] = _timed(lambda: _round(nodes, None))
    _, run.values["next_round_ms"] = _timed(lambda: _round(nodes, first))
    _, run.values["connected_ms"] = _timed(lambda: _connect(nodes))
    return run


def _timed(do: Callable[[], Round | None]) -> tuple[Round | None, float]:
    began = time.perf_counter()
    found = do()
    return found, 1e3 * (time.perf_counter() - began)


def _round(nodes: int, before: Round | None) -> Round:
    waits_for = 1 if before is None else before.number + 1
    members = tuple(
        JobMember(node_id=f"id{each}", host=f"gpu-{each}", label=f"rack{each // 32}", joined=each, waits_for=waits_for)
        for each in range(nodes)
    )
    view = JobView(members=members, round=before)
    decided = next_round(view, Settings(min_nodes=nodes, max_nodes=nodes), enough_for_s=0.0)
    assert isinstance(decided, Formed), decided
    return decided.round


def _connect(nodes: int) -> None:
    state = CoordinationState(me="n0", host="h0")
    state, _ = handle(state, CoordinatorSeen(0.0, Leader("n0", "h0", "h0:1", 1)))
    known = tuple(Node(f"n{each}", f"h{each}", f"h{each}:1", "job", each + 1) for each in range(nodes))
    state, _ = handle(state, NodesSeen(0.1, known))
    for node in known[1:]:
        state, _ = handle(state, LinkOpened(0.2, node.node_id))
