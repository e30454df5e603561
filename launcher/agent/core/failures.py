"""What torch's callers are told of failed workers: ProcessFailure objects and error files, root cause first."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

from unicron_elastic.compat.errors import ProcessFailure
from unicron_elastic.faults import Failure, RootCause

_FILE_BYTES_MAX = 16 * 1024 * 1024  # that are read of what a script wrote


def write_error_file(path: str, failure: Failure) -> None:
    """Writes the file that ``@record`` would have written, for a script that does not use it.

    Same format (torch.distributed.elastic.multiprocessing.errors, ErrorHandler), so torch's report, and every tool
    that reads it, shows the traceback. Leaves an existing file alone; an unwritable folder loses only the file.
    """
    if failure.exception_type is not None:
        name = failure.exception_type.rpartition(".")[2]
        _write(path, f"{name}: {failure.message or ''}", failure.stack or "")


def write_reason(path: str, reason: str, name: str = "NodeLeft") -> None:
    """Write what ``write_error_file`` does, for a job that ended on this node for what is no worker's exception."""
    _write(path, f"{name}: {reason}", f"{name}: {reason}")  # torch shows the stack alone


def _write(path: str, message: str, stack: str) -> None:
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": extra}}
    try:
        with open(path, "w") as file:
            json.dump(content, file)
    except OSError:
        pass


def recorded_exception(path: str) -> dict[str, str] | None:
    """What ``@record`` wrote to an error file: ``type``, ``message``, ``stack``; None without a readable one."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _FILE_BYTES_MAX:
                return None
            content = json.load(file)["message"]
        if isinstance(content, str):
            content = {"message": content}
        kind, _, message = str(content["message"]).partition(": ")
        stack = str(content.get("extraInfo", {}).get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {"type": kind, "message": message, "stack": stack}


def process_failures(
    exit_codes: Mapping[int, int],
    pids: Mapping[int, int],
    error_files: Mapping[int, str],
    cause: RootCause | None,
) -> dict[int, ProcessFailure]:
    """One ProcessFailure per worker (by local rank) that ended badly, the root cause first and earliest.

    torch takes the failure with the least timestamp for the first one, and its timestamps have whole seconds. It
    reports no failed job without a failed worker: if the job failed on another node, every worker is named.
    """
    root = cause.fault.failure.local_rank if cause is not None else None
    named = [rank for rank, code in exit_codes.items() if code != 0 or rank == root] or list(exit_codes)
    order = sorted(named, key=lambda rank: (rank != root, rank))
    found = {rank: _process_failure(rank, pids[rank], exit_codes[rank], error_files.get(rank) or "") for rank in order}
    first = found.get(root) if root is not None else None
    if first is not None:
        for failure in found.values():
            failure.timestamp = max(failure.timestamp, first.timestamp)
    return found


def _process_failure(local_rank: int, pid: int, exit_code: int, error_file: str) -> ProcessFailure:
    """torch cannot read the file of a worker that was killed while it wrote it: then it is as if there were none."""
    try:
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exit_code, error_file=error_file)
    except Exception:
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exit_code, error_file="")
