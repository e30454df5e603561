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

from unicron_elastic.compat.expectations import Part, lacks

__all__ = ["meeting_state", "read_no_code"]

_KNOWN = {
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
    ("builtins", "set"): set,
}
_OF_TORCH = ("_NodeDesc", "_RendezvousState")


def read_no_code() -> None:
    """Have torch's dynamic rendezvous, in this process, read its state by `meeting_state`, where its state is known."""
    if not lacks(Part.STATE) and not isinstance(dynamic_rendezvous.pickle, SimpleNamespace):
        dynamic_rendezvous.pickle = SimpleNamespace(
            loads=meeting_state, dumps=pickle.dumps, PickleError=pickle.PickleError
        )


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
    """Raises ValueError for an object that torch would stumble over later."""
    usual = vars(dynamic_rendezvous._RendezvousState())
    if type(state) is not dynamic_rendezvous._RendezvousState or vars(state).keys() != usual.keys():
        raise ValueError(f"it is a {type(state).__name__}")
    nodes: list[Any] = []
    for name, value in vars(state).items():
        if usual[name] is not None and type(value) is not type(usual[name]):
            raise ValueError(f"its {name} is a {type(value).__name__}")
        nodes += value if isinstance(value, dict | set) else []
    if not all(type(node) is dynamic_rendezvous._NodeDesc for node in nodes):
        raise ValueError("a node of it is none")
