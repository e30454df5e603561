"""Checks values of torchrun's options before anything starts, so that a mistake is one sentence and not a traceback."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from unicron_elastic.base.in_place import is_forced
from unicron_elastic.base.node_name import node_name

_CHECKED = ("nnodes", "nproc_per_node", "max_restarts", "monitor_interval", "shutdown_timeout", "redirects", "tee",
    "local_ranks_filter",
)  # fmt: skip

# Keys of --rdzv-conf. Ours are those that `rendezvous.torch.create_handler` and `launcher.plugin` read.
CONF_OF_ETCD = frozenset({"last_call_timeout", "join_timeout", "connect_timeout", "lease_ttl", "label", "start",
    "target_nodes", "expected_nodes", "blind_patience", "nodes", "agent",
})  # fmt: skip
_CONF_OF_TORCH = frozenset({"join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "timeout",
    "rank", "keep_alive_interval", "keep_alive_max_attempt", "read_timeout", "is_host", "store_type", "protocol",
    "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix",
})  # fmt: skip
_BACKENDS = ("unicron", "static", "c10d", "etcd", "etcd-v2")  # of others nobody here knows the keys
_LIKE = 0.8  # how alike two keys are of which one is a mistyped other

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
    for sentence in odd_conf(args.rdzv_backend, args.rdzv_conf):
        warn(sentence)
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


def pairs_of(conf: str) -> dict[str, str]:
    """Return the keys and values of --rdzv-conf."""
    pairs = (pair.partition("=") for pair in conf.split(",") if "=" in pair)
    return {key.strip(): value.strip() for key, _, value in pairs}


def odd_conf(backend: str, conf: str) -> Iterator[str]:
    """Say of each key of --rdzv-conf that nobody reads, and which one may be meant. All of torch's are known."""
    pairs = pairs_of(conf)
    keys = list(pairs)
    if backend not in _BACKENDS or "start" in keys:  # which a cluster's agent adds to what was told already
        return
    if not keys:
        return
    if pairs.get("agent", "unicron") != "unicron":
        yield (
            f"--rdzv-conf: agent={pairs['agent'][:80]} has no effect under unicron-run, whose agent is its own; it is "
            "for torchrun --rdzv-backend=unicron"
        )
    from unicron_elastic.rendezvous.store.options import OPTIONS  # in the time of those alone who have such keys

    every = {*OPTIONS, *CONF_OF_ETCD, *_CONF_OF_TORCH}
    known = every if backend == "unicron" else _CONF_OF_TORCH
    for key in dict.fromkeys(keys):
        if key in every or _is_read_by_torch(key):
            continue
        like = difflib.get_close_matches(key, sorted(known), 1, _LIKE)
        if like or backend == "unicron":
            perhaps = f"; perhaps {like[0]} is meant" if like else ""
            yield f"--rdzv-conf: {key[:80]!a} is no setting of {backend}, and has no effect{perhaps}"


def _is_read_by_torch(key: str) -> bool:
    """Whether the installed torch, which may be newer than this list, has such a key in its rendezvous; no import."""
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder, "distributed/elastic/rendezvous").glob("*.py")]
    try:
        return any(f'"{key}"' in path.read_text("utf-8", "replace") for path in files)
    except OSError:
        return True  # nobody can say


def _bad(flag: str, value: object, right: str) -> BadArgument:
    return BadArgument(f"{flag}: {value!r} is not valid; give {right}")


def _drop_unknown_signals(args: argparse.Namespace, warn: Callable[[str], object]) -> None:
    names = [name.strip() for name in args.signals_to_handle.split(",")]
    known = [name for name in names if isinstance(getattr(signal, name, None), signal.Signals)]
    for name in names:
        if name not in known:
            warn(f"--signals-to-handle: {name!r} is no signal of this system and is left out")
    args.signals_to_handle = ",".join(known) or args.signals_to_handle  # torch goes on without any, too


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
