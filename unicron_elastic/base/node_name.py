"""What a node is called, in incidents, in the quarantine and in the cluster's store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from urllib.parse import quote

from unicron_elastic.base.text import one_line, shown

VARIABLE = "UNICRON_NODE_NAME"
NAME_CHARACTERS = 180  # as a part of a key, where a letter that is not ASCII has six or more


def node_name(given: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """``given``, else what ``UNICRON_NODE_NAME`` says, else the host name.

    Raises ValueError, with what would be right, for a name that could not be shown or kept.
    """
    name = given or environ.get(VARIABLE, "").strip()
    if not name:  # which the system gives, and a job runs whatever that is
        return one_line(socket.gethostname().encode(errors="backslashreplace"), NAME_CHARACTERS)
    if not name.isprintable() or len(quote(name, safe="")) > NAME_CHARACTERS:
        what = "--name" if given else VARIABLE
        right = f"at most {NAME_CHARACTERS} printable characters, where one that is not ASCII counts several times"
        raise ValueError(f"{what}: {shown(name)} is not valid; give a name of {right}")
    return name


def node_label(given: str, spelled: str) -> str:
    """``given``, where a node stands. Raises ValueError as ``node_name`` does; ``spelled`` is the option's name."""
    if not given.isprintable() or len(given) > NAME_CHARACTERS:
        right = f"at most {NAME_CHARACTERS} printable characters, such as the name of a rack"
        raise ValueError(f"{spelled}: {shown(given)} is not valid; give {right}")
    return given
