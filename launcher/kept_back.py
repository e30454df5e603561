"""What a node's processes know of the cluster, and the training script is not told.

Scripts are trusted as the agent's user is, so this keeps nobody out who means harm. It keeps a script, and whatever
prints or sends its environment away, from acting on the cluster or telling its password by accident.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from unicron_elastic.worker.mark import MARK

AGENT_VARIABLE = "UNICRON_AGENT_PID"  # of the cluster's agent that started this unicron-run, and ends it
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
_OF_CLUSTER = ("UNICRON_ETCD_", "UNICRON_CLUSTER")  # whom to talk to, as whom, and with what


def is_kept_back(name: str) -> bool:
    """Whether the variable ``name`` is ours and about access to the cluster; a script's own secrets are its own."""
    if name.startswith(_OF_CLUSTER):
        return True
    return name.startswith("UNICRON_") and name != MARK and any(word in name for word in SECRET_WORDS)


def for_scripts(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process in which the user's code runs may have."""
    return {name: value for name, value in environ.items() if not is_kept_back(name)}


@contextmanager
def away_from(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """While somebody else starts a script's processes with this process's variables, what is kept back is not there."""
    held = {name: value for name, value in environ.items() if is_kept_back(name)}
    for name in held:
        del environ[name]
    try:
        yield
    finally:
        environ.update(held)
