"""What is in the store of a c10d rendezvous runs no code in the agents that meet there."""

from __future__ import annotations

import base64
import os
import pickle
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError, dynamic_rendezvous

from unicron_elastic.compat.meeting_state import meeting_state
from unicron_elastic.rendezvous.torch.choose import rendezvous_handler

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def _state() -> Any:
    state, nodes = (
        dynamic_rendezvous._RendezvousState(),
        [dynamic_rendezvous._NodeDesc(f"n{n}", n, 0) for n in range(3)],
    )
    state.round, state.complete, state.deadline = 3, True, NOW + timedelta(seconds=30)
    state.participants = {nodes[0]: 0, nodes[1]: 1}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[1]}
    state.last_heartbeats = dict.fromkeys(nodes, NOW)
    return state


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_the_state_is_read_as_torch_reads_it(protocol: int) -> None:
    for state in (_state(), dynamic_rendezvous._RendezvousState()):
        assert vars(meeting_state(pickle.dumps(state, protocol))) == vars(state)


class _Runs:
    def __init__(self, call: Any, *args: Any) -> None:
        self._call, self._args = call, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call, self._args


def _with(**odd: Any) -> bytes:
    state = _state()
    for name, value in odd.items():
        setattr(state, name, value)
    return pickle.dumps(state)


def _hostile(mark: Path) -> dict[str, bytes]:
    node = dynamic_rendezvous._NodeDesc("n0", 0, 0)
    make = f"open({str(mark)!r}, 'w')"
    return {
        "a command": pickle.dumps(_Runs(os.system, f"touch {mark}")),
        "an expression": pickle.dumps(_Runs(eval, make)),
        "within the state": _with(participants={"a": _Runs(os.mkdir, str(mark))}),
        "by an attribute of what is known": b"cdatetime\ndatetime.__class__\n.",
        "by a dotted name": "\x80\x04\x8c\x08datetime\x8c\x0csys.modules\x93.".encode(),
        "through torch": b"ctorch.distributed.elastic.rendezvous.dynamic_rendezvous\npickle.loads\n.",
        "another object": pickle.dumps({"a": 1}),
        "nobody": pickle.dumps(None),
        "no nodes": _with(participants=None),
        "nodes that are none": _with(wait_list={"a"}),
        "a heartbeat of no time zone": _with(last_heartbeats={node: datetime(2026, 1, 1)}),
        "a rank that is none": _with(participants={node: "0"}),
        "a name that clears the screen": _with(wait_list={dynamic_rendezvous._NodeDesc("\x1b[2J", 1, 0)}),
        "garbage": b"garbage",
        "nothing": b"",
        "cut short": pickle.dumps(_state())[:-9],
        "deep": b"(" * 100_000,
    }


@pytest.mark.parametrize("what", _hostile(Path("x")))
def test_all_else_is_refused_and_runs_nothing(what: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(RendezvousStateError, match="what no agent wrote") as raised:
        meeting_state(_hostile(mark)[what])
    assert not mark.exists()
    assert "--rdzv-backend unicron" in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_stranger_at_the_store_runs_no_code_in_the_agent(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    parameters = RendezvousParameters("c10d", "localhost:0", "job", 1, 2, local_addr="localhost", last_call_timeout="1")
    handler = rendezvous_handler(parameters)
    try:
        handler.next_rendezvous()
        stranger = TCPStore("localhost", handler._handler._state_holder._backend._store.port, None, False)
        attack = pickle.dumps(_Runs(os.system, f"touch {mark}"))
        stranger.set("torch.rendezvous.job", base64.b64encode(attack).decode())
        handler._handler._state_holder._last_sync_time = -1
        with pytest.raises(RendezvousStateError, match=r"posix\.system"):
            handler.num_nodes_waiting()
        assert not mark.exists()
    finally:
        handler._handler._stop_heartbeats()
