"""What the user says about going on in place, where it was never tried."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unicron_elastic.base.text import shown

FORCE = "UNICRON_IN_PLACE"


def is_forced(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks are to go on in place over any back end. Raises ValueError for a wrong value."""
    wish = environ.get(FORCE, "").strip().lower()
    if wish not in ("", "force"):
        raise ValueError(f"{FORCE} must be unset, or force, not {shown(wish)}")
    return wish == "force"
