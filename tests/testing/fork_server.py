"""Runs scripts as forks of a process that has imported torch: each costs milliseconds, and is a real process.

Reads one JSON object a line and answers each with one: ``{"script", "output", "env"}`` starts a script and gives its
pid, ``{"wait", "seconds"}`` gives the exit code of a pid, or null at the deadline. At the end of its input it kills
what still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import sys
import traceback

import torch._dynamo  # the first optimizer would import it
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.nn.parallel  # noqa: F401

import unicron_elastic.testing.chaos  # noqa: F401


def _run(script: str, output: str, env: dict[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code of ``pid``, which stays a child that can be asked for again only if it has not ended."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)


def main() -> None:
    """Serves until the input ends."""
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": _wait(request["wait"], request["seconds"])}
            if answer["code"] is not None:
                running.discard(request["wait"])
        else:
            pid = os.fork()
            if pid == 0:
                _run(**request)
            running.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
