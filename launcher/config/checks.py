"""Checks values of torchrun's options before anything starts, so that a mistake is one sentence and not a traceback."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from unicron_elastic.base.in_place import is_forced
from unicron_elastic.base.node_name import node_name

_CHECKED = ("nnodes", "nproc_per_node", "max_restarts", "monitor_interval", "shutdown_timeout", "redirects", "tee",
    "local_ranks_filter",
)  # fmt: skip

STDIN = "-"  # as a script, for Python: each worker reads it from the standard input of the launcher


class BadArgument(ValueError):
    """The text names the option, the value and what would be right."""


def check(args: argparse.Namespace, warn: Callable[[str], object]) -> None:
    """Raises BadArgument for the first value with which the job could not start.

    What torchrun runs without is taken out of ``args`` and told to ``warn``.
    """
    for name in filter(partial(hasattr, args), _CHECKED):  # not every torch has each of them
        check_value(name, getattr(args, name))
    _drop_unknown_signals(args, warn)
    check_value("rdzv_conf", args.rdzv_conf)
    _check_script(args)
    _check_log_dir(args.log_dir)
    try:
        node_name()
        is_forced()
    except ValueError as error:
        raise BadArgument(str(error)) from None


def check_value(name: str, value: Any) -> None:
    """Raises BadArgument if torchrun's option ``name`` cannot have ``value`` on any machine."""
    flag = f"--{name.replace('_', '-')}"
    if name == "nnodes":
        _check_nodes(value)
    elif name == "nproc_per_node":
        _check_processes(value)
    elif name == "max_restarts" and value < 0:
        raise _bad(flag, value, "a whole number, 0 or more")
    elif name == "monitor_interval" and value <= 0:
        raise _bad(flag, value, "a number of seconds above 0")
    elif name == "shutdown_timeout" and value is not None and value < 0:
        raise _bad(flag, value, "a whole number of seconds, 0 or more")
    elif name in ("redirects", "tee") and not re.fullmatch(r"[0-3]|\d:[0-3](,\d:[0-3])*", value):
        raise _bad(flag, value, "0, 1, 2 or 3, or a list RANK:0-3,RANK:0-3 with local ranks of one digit")
    elif name == "local_ranks_filter" and value and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value):
        raise _bad(flag, value, "a comma-separated list of local ranks")
    elif name == "rdzv_conf":
        for pair in filter(None, value.split(",")):
            if not re.fullmatch(r"\s*[^=]+=.+", pair):
                raise _bad(flag, value, f"key=value pairs with commas between; {pair!r} is none")


def _bad(flag: str, value: object, right: str) -> BadArgument:
    return BadArgument(f"{flag}: {value!r} is not valid; give {right}")


def _drop_unknown_signals(args: argparse.Namespace, warn: Callable[[str], object]) -> None:
    names = [name.strip() for name in args.signals_to_handle.split(",")]
    known = [name for name in names if isinstance(getattr(signal, name, None), signal.Signals)]
    if not known:
        raise _bad("--signals-to-handle", args.signals_to_handle, "signal names such as SIGTERM,SIGINT")
    for name in names:
        if name not in known:
            warn(f"--signals-to-handle: {name!r} is no signal of this system and is left out")
    args.signals_to_handle = ",".join(known)


def _check_nodes(nnodes: str) -> None:
    right = "N or MIN:MAX with 0 < MIN <= MAX"
    if not re.fullmatch(r"\s*\d+\s*(:\s*\d+\s*)?", nnodes):
        raise _bad("--nnodes", nnodes, right)
    bounds = [int(bound) for bound in nnodes.split(":")]
    if not 0 < bounds[0] <= bounds[-1]:
        raise _bad("--nnodes", nnodes, right)


def _check_processes(nproc_per_node: str) -> None:
    if re.fullmatch(r"\s*-?\d+\s*", nproc_per_node):
        if int(nproc_per_node) < 1:
            raise _bad("--nproc-per-node", nproc_per_node, "a number above 0, auto, cpu or gpu")
    elif not re.fullmatch(r"[a-z]\w*", nproc_per_node):
        raise _bad("--nproc-per-node", nproc_per_node, "a number above 0, auto, cpu or gpu")


def _check_script(args: argparse.Namespace) -> None:
    script = of_local_rank_0(args.training_script)
    if args.no_python and args.module:
        raise BadArgument("--no-python and --module exclude one another: a module needs Python to run it")
    if args.no_python:
        if shutil.which(script) is None:
            what = "is not executable" if os.path.exists(script) else "does not exist, here or on PATH"
            raise BadArgument(f"the program {script!r} {what}")
    elif script == STDIN and not args.run_path:
        return
    elif not args.module and not os.path.exists(script):
        raise BadArgument(f"the script {script!r} does not exist (looked in {os.getcwd()})")
    elif not args.module and not os.access(script, os.R_OK):
        raise BadArgument(f"the script {script!r} cannot be read: permission denied")


def of_local_rank_0(word: str) -> str:
    """A word of the workers' command as that of local rank 0 has it; torch replaces ``${local_rank}`` in all words."""
    return Template(word).safe_substitute(local_rank="0")


def _check_log_dir(log_dir: str | None) -> None:
    if log_dir is None or log_dir == os.devnull:
        return
    folder = Path(log_dir)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise _bad("--log-dir", log_dir, f"a directory; {str(folder)!r} is a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _bad("--log-dir", log_dir, f"a directory that can be written; {str(folder)!r} cannot")
