"""Where a run's log files are: in the folder the user named, or in a temporary one that torch made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unicron_elastic.compat.workers import (
    DefaultLogsSpecs,
    LogsSpecs,
)


def run_folder(specs: LogsSpecs, error_file: str | None) -> Path | None:
    """The run's own folder under --log-dir; None without one, or where the layout is not torch's.

    ``error_file`` is any worker's: <log dir>/<run id>_<random>/attempt_<n>/<local rank>/error.json.
    """
    if not isinstance(specs, DefaultLogsSpecs) or temporary_folder(specs) is not None:
        return None
    return Path(error_file).parents[2] if error_file not in (None, "", os.devnull) else None


def temporary_folder(specs: LogsSpecs) -> str | None:
    """The folder that torch has made for want of a --log-dir; it is ours to remove when nobody wrote to it.

    torch makes it with the ``LogsSpecs``, long before there is a worker, and also for those that never start one.
    """
    if not isinstance(specs, DefaultLogsSpecs):
        return None
    folder = Path(specs.root_log_dir)
    was_made = folder.name.startswith("torchelastic_") and folder.parent == Path(tempfile.gettempdir())
    return str(folder) if was_made else None
