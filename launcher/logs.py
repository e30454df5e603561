"""Where a run's log files are: in the folder the user named, or in a temporary one that torch made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs

__all__ = ["run_folder", "temporary_folder"]


def run_folder(specs: LogsSpecs, error_file: str | None) -> Path | None:
    """The run's own folder under --log-dir; None without one, or where the layout is not torch's.

    ``error_file`` is any worker's: <log dir>/<run id>_<random>/attempt_<n>/<local rank>/error.json.
    """
    if not _is_torchs_layout(specs, error_file) or temporary_folder(specs, error_file) is not None:
        return None
    return Path(str(error_file)).parents[2]


def temporary_folder(specs: LogsSpecs, error_file: str | None) -> str | None:
    """The folder that torch has made for want of a --log-dir; it is ours to remove when nobody wrote to it."""
    if not _is_torchs_layout(specs, error_file):
        return None
    folder = Path(str(error_file)).parents[3]
    was_made = folder.name.startswith("torchelastic_") and folder.parent == Path(tempfile.gettempdir())
    return str(folder) if was_made else None


def _is_torchs_layout(specs: LogsSpecs, error_file: str | None) -> bool:
    return isinstance(specs, DefaultLogsSpecs) and isinstance(error_file, str) and error_file not in ("", os.devnull)
