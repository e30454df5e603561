"""The command line by which a node runs its part of a planned job, and whether it can."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from unicron_elastic.compat.command_line import TorchMissing
from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.launcher.config.checks import of_local_rank_0
from unicron_elastic.launcher.config.forwarded import AGENT_VARIABLE, OF_SUBMISSION, PLANNED_JOB, without_options
from unicron_elastic.planning.model.best import configurations_of
from unicron_elastic.planning.model.configured import CONFIGURATIONS, configurations_text
from unicron_elastic.planning.model.jobs import JobSpec

MOST_NODES = 1_000_000
LAST_CALL_S = 10  # for all nodes that the plan gives a job to meet, before it begins with fewer
_LAUNCHERS = ("unicron-run", "torchrun")
_PLACED = ("cluster", "weight", "job-spec", "nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint",
    "master-addr", "master-port", "local-addr", "node-rank", "metrics-port", "metrics-address", "config",
)  # fmt: skip
_PLACED_FLAGS = ("detach", "standalone")
_OF_MEETING = ("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--node-rank", "--master-addr")
_OF_PLACE = ("PET_STANDALONE", "PET_NODE_RANK", "PET_LOCAL_ADDR")  # of the node where the job was submitted


def parsed(
    command: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The command's words as unicron-run understands them: parsed, its options, and the script with its arguments.

    The options are spelled in full. A leading ``unicron-run`` or ``torchrun`` is left out. ``environ`` has the PET_
    variables that count. Raises ValueError for what it would not take.
    """
    words = list(command[1:] if os.path.basename(command[0]) in _LAUNCHERS else command)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser = get_args_parser()
            _take_variables(parser, environ)
            args = parser.parse_args(words)
    except (SystemExit, ValueError):
        last = said.getvalue().strip().rpartition("\n")[2]
        raise ValueError(
            f"its command cannot be understood: {last or 'it must be a script and its arguments'}"
        ) from None
    except TorchMissing as error:
        raise ValueError(str(error)) from None
    options = _options(words, len(args.training_script_args))
    # What argparse takes for the end of options is no argument of the script's, unless another one stands before.
    end = ["--"] if "--" in args.training_script_args else []
    script = [*end, args.training_script, *args.training_script_args]
    return args, [_in_full(word, parser) for word in options], script


def _options(words: list[str], of_script: int) -> list[str]:
    """Those before the script, which has the last ``of_script`` words; ``--`` may stand on both of its sides."""
    found = words[: len(words) - of_script]
    script = -2 if found[-1] == "--" else -1
    found = found[:script]
    return found[:-1] if found[-1:] == ["--"] else found


def _take_variables(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """The defaults that torch's parser has from this process's environment, from another one. Raises ValueError."""
    for action in parser._actions:
        text = environ.get(f"PET_{action.dest.upper()}")
        if text is not None and action.option_strings:
            action.default = bool(int(text)) if isinstance(action.default, bool) else text


def _in_full(word: str, parser: argparse.ArgumentParser) -> str:
    """An option that was abbreviated, as argparse lets people do."""
    name, equals, value = word.partition("=")
    known = parser._option_string_actions
    if not name.startswith("--") or name == "--" or name in known:
        return word
    found = [option for option in known if option.startswith(name)]
    return f"{found[0]}{equals}{value}" if found else word


def shared_options(options: Sequence[str]) -> list[str]:
    """Without those that say where a job runs, or on how many nodes: the cluster decides that."""
    names = [f"--{spelled}" for name in _PLACED for spelled in (name, name.replace("-", "_"))]
    return without_options(options, names, [f"--{name}" for name in _PLACED_FLAGS])


def decided_elsewhere(options: Sequence[str]) -> str:
    """Return the first option, spelled in full, that says where nodes meet or which one this is; "" for none.

    A job that goes to a cluster cannot be told that, and who says it means another thing. How many workers and nodes
    there are to be is asked for by options, too, and the ports and addresses of one node harm nobody.
    """
    names = (word.partition("=")[0].replace("_", "-") for word in options if word.startswith("--"))
    return next((name for name in names if name in _OF_MEETING), "")


def why_not_here(spec: JobSpec | None, environ: Mapping[str, str] = os.environ) -> str:
    """Why this node cannot run the job, as a sentence; "" if nothing speaks against it."""
    if spec is None:
        return "there is no such job."
    if not os.path.isdir(spec.directory):
        return f"its folder {spec.directory} is not there."
    env = {**environ, **spec.env}
    try:
        args, _, _ = parsed(spec.command, env)
    except ValueError as error:
        return f"{error}."
    script = of_local_rank_0(args.training_script)
    path = os.path.join(spec.directory, script)
    if args.no_python and not args.run_path:
        is_bare = os.path.dirname(script) == ""  # such a one is looked for on PATH alone
        found = shutil.which(script if is_bare else path, path=env.get("PATH"))
        return "" if found else f"its program {script} is not there."
    if args.module or os.path.exists(path):
        return ""
    return f"its script {script} is not there."


def child_command(
    spec: JobSpec, *, start: int, nodes: int, endpoint: str, address: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The job's own options first, then those that make this node one of the job's. Raises ValueError.

    ``address`` is where other nodes find this one; "" leaves that to unicron-run.
    """
    args, options, script = parsed(spec.command, {**environ, **spec.env})
    most = MOST_NODES if spec.max_nodes is None else spec.max_nodes
    conf = [each for each in (args.rdzv_conf.strip(" ,"),) if each]
    conf += [f"start={start}", f"expected_nodes={max(spec.min_nodes, nodes)}", f"last_call_timeout={LAST_CALL_S}"]
    own = [
        f"--nnodes={spec.min_nodes}:{most}",
        f"--nproc-per-node={spec.nproc_per_node}",
        "--rdzv-backend=unicron",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={spec.name}",
        f"--rdzv-conf={','.join(conf)}",
        *([f"--local-addr={address}"] if address else []),
    ]
    return [sys.executable, "-m", "unicron_elastic.launcher.main", *shared_options(options), *own, *script]


def child_environment(
    spec: JobSpec, host: str, etcd: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """This agent's variables, then the job's, then what says which part of what job it is.

    Where etcd is, this node knows better than the one where the job was submitted.
    """
    kept_back = (*OF_SUBMISSION, *_OF_PLACE)
    told = {
        name: value
        for name, value in spec.env.items()
        if name not in kept_back and not name.startswith("UNICRON_ETCD_")
    }
    here = {name: value for name, value in environ.items() if name not in (*OF_SUBMISSION, "PET_STANDALONE")}
    own = {"UNICRON_NODE_NAME": host, PLANNED_JOB: spec.name, AGENT_VARIABLE: str(os.getpid())}
    if configurations := configurations_of(spec):
        own[CONFIGURATIONS] = configurations_text(configurations)
    return {**here, **told, **etcd, **own}
