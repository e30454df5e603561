"""The state in which the nodes of torch's dynamic rendezvous meet, read without running what is in it. Imports torch.

torch unpickles it from a store that has no password, so everybody who reaches the port of a `c10d` rendezvous could
have each agent run any code. A pickle needs few names to be this state: those are found, and no others.
"""

from __future__ import annotations

import io
import pickle
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous

from unicron_elastic.compat.expectations import Feature, lacks

__all__ = ["meeting_state", "read_no_code"]

_KNOWN = {
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
    ("builtins", "set"): set,
}
_ADDRESS_CHARACTERS = 1000
_OF_TORCH = ("_NodeDesc", "_RendezvousState")


def read_no_code() -> None:
    """Have torch's dynamic rendezvous, in this process, read its state by `meeting_state`, where its state is known."""
    if lacks(Feature.STATE) or isinstance(dynamic_rendezvous.pickle, SimpleNamespace):
        return
    try:
        meeting_state(pickle.dumps(_sample()))
    except RendezvousStateError:  # another torch keeps more in it: better read as torch does than not at all
        return
    dynamic_rendezvous.pickle = SimpleNamespace(loads=meeting_state, dumps=pickle.dumps, PickleError=pickle.PickleError)


def meeting_state(text: bytes) -> Any:
    """Return the state in ``text``. Raises RendezvousStateError, with what to do, for all else."""
    try:
        state = _Unpickler(io.BytesIO(text)).load()
        _check(state)
    except Exception as error:
        raise RendezvousStateError(
            f"the store of the rendezvous holds what no agent wrote ({str(error)[:200]!a}): everybody who reaches its "
            "port can write there; keep others from it by a firewall, or use --rdzv-backend unicron"
        ) from None
    return state


class _Unpickler(pickle.Unpickler):
    """Knows few names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dynamic_rendezvous.__name__ and name in _OF_TORCH:
            return getattr(dynamic_rendezvous, name)
        if (found := _KNOWN.get((module, name))) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def _check(state: Any) -> None:
    """Raises ValueError for what torch would stumble over later."""
    if type(state) is not dynamic_rendezvous._RendezvousState:
        raise ValueError(f"it is a {type(state).__name__}")
    told = vars(state)
    for name, usual in vars(_sample()).items():
        value = told.get(name)
        if type(value) is not type(usual) and not (name == "deadline" and value is None):
            raise ValueError(f"its {name} is a {type(value).__name__}")
    nodes = [*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats]
    if not all(type(node) is dynamic_rendezvous._NodeDesc and _is_name(node.addr) for node in nodes):
        raise ValueError("a node of it is none")
    if not all(type(rank) is int for rank in state.participants.values()):
        raise ValueError("a rank of it is none")
    moments = [*state.last_heartbeats.values(), *([] if state.deadline is None else [state.deadline])]
    if not all(type(moment) is datetime and moment.tzinfo is not None for moment in moments):
        raise ValueError("a moment of it is none")


def _is_name(addr: Any) -> bool:
    return isinstance(addr, str) and addr.isprintable() and len(addr) <= _ADDRESS_CHARACTERS


def _sample() -> Any:
    """Return a state with all that one can have."""
    state, node = dynamic_rendezvous._RendezvousState(), dynamic_rendezvous._NodeDesc("a", 1, 0)
    state.deadline = datetime.now(timezone.utc)
    state.participants, state.last_heartbeats = {node: 0}, {node: state.deadline}
    state.wait_list, state.redundancy_list = {node}, {node}
    return state
