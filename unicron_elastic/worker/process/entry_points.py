"""Where trainers of other libraries begin: once a script has imported one, ours is told, and not before.

Asked for by ``unicron-run --attach auto``. What is imported then is named here and not imported, as most scripts have
none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType

from unicron_elastic.worker.process.after_import import after_import

# The module that has an entry point, and which of ours attaches itself to it.
ENTRY_POINTS: Mapping[str, str] = {
    "transformers.trainer": "unicron_elastic.attach.attached_trainer",
}


def watch_entry_points(entry_points: Mapping[str, str] = ENTRY_POINTS) -> None:
    """Have each entry point attached to once it is imported."""
    for name, ours in entry_points.items():
        after_import(name, partial(_attach, ours))


def _attach(ours: str, module: ModuleType) -> None:
    """Attach to it; whatever goes wrong is said, and the script goes on without."""
    try:
        importlib.import_module(ours).attach(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"unicron: {module.__name__} is as it is without us, and keeps no state in memory: {why}\n")
