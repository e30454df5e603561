"""What a node's processes know of the cluster, and the training script is not told.

Scripts are trusted as the agent's user is, so this keeps nobody out who means harm. It keeps a script, and whatever
prints or sends its environment away, from acting on the cluster or telling its password by accident.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

from unicron_elastic.worker.process.mark import MARK

PLANNED_JOB = "UNICRON_PLANNED_JOB"  # the job's name, in the environment of its agents
AGENT_VARIABLE = "UNICRON_AGENT_PID"  # of the cluster's agent that started this unicron-run, and ends it
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
_OF_CLUSTER = ("UNICRON_ETCD_", "UNICRON_CLUSTER")  # whom to talk to, as whom, and with what


def is_kept_back(name: str) -> bool:
    """Whether the variable ``name`` is ours and about access to the cluster; a script's own secrets are its own."""
    if name.startswith(_OF_CLUSTER):
        return True
    return name.startswith("UNICRON_") and name != MARK and any(word in name for word in SECRET_WORDS)


def for_scripts(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process in which the user's code runs may have."""
    return {name: value for name, value in environ.items() if not is_kept_back(name)}


@contextmanager
def away_from(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """While somebody else starts a script's processes with this process's variables, what is kept back is not there."""
    held = {name: value for name, value in environ.items() if is_kept_back(name)}
    for name in held:
        del environ[name]
    try:
        yield
    finally:
        environ.update(held)


# A job leaves in the store what a spare node needs to run its part. What tells libraries and launchers how to work goes
# along; everything else, such as a token, is not the store's.
PASSED_ON = ("PET_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "UNICRON_", "PYTHON", "TRITON_", "HF_HOME")
_PASSWORD = "UNICRON_ETCD_PASSWORD"  # of the store itself: whoever reads the store would have it
_KEPT_BACK = ("UNICRON_NODE_NAME", _PASSWORD, "UNICRON_ETCD_USER", "PET_LOCAL_ADDR", "PET_NODE_RANK")
# Of the process that submits, and of the agent itself: a job's part of a node has neither.
OF_SUBMISSION = ("UNICRON_CLUSTER", "UNICRON_DETACH", "UNICRON_WEIGHT", "UNICRON_JOB_SPEC", "UNICRON_METRICS_PORT",
    "UNICRON_METRICS_ADDRESS", "UNICRON_CONFIG",
)  # fmt: skip
SPEC_VARIABLE = "UNICRON_SPEC_ENV"  # names of further variables, with commas
_EVERYWHERE = frozenset({"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "TZ",
    "USER", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OF_ONE_NODE = tuple(
    f"--{spelled}"
    for name in ("local-addr", "node-rank", "metrics-port", "metrics-address")
    for spelled in (name, name.replace("-", "_"))
)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that its job needs on other nodes, without what may be a secret."""
    wanted = {name.strip() for name in environ.get(SPEC_VARIABLE, "").split(",")} - {_PASSWORD}
    return {name: value for name, value in environ.items() if name in wanted or _is_passed_on(name)}


def left_behind(environ: Mapping[str, str], taken: Collection[str], source: str) -> list[str]:
    """The variables of this process that the script with this ``source`` names, and that its nodes do not get.

    What every process has, and what the launcher gives to workers, is no loss.
    """
    names = (name for name in environ if name not in taken and name not in _EVERYWHERE and not is_kept_back(name))
    return sorted(name for name in names if f'"{name}"' in source or f"'{name}'" in source)


def _is_passed_on(name: str) -> bool:
    return (
        name.startswith(PASSED_ON)
        and name not in (*_KEPT_BACK, *OF_SUBMISSION)
        and not any(each in name for each in SECRET_WORDS)
    )


def shared_arguments(argv: Sequence[str], of_script: int) -> tuple[str, ...]:
    """The launcher's arguments without those of one node; the last ``of_script`` are the script's own."""
    own = len(argv) - of_script
    return (*without_options(argv[:own], _OF_ONE_NODE), *argv[own:])


def without_options(argv: Sequence[str], names: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The arguments without the options ``names`` and their values, and without ``flags``, which have none."""
    kept: list[str] = []
    skips = False
    for argument in argv:
        if skips:
            skips = False
        elif argument in names:
            skips = True
        elif argument not in flags and not argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
    return kept


def sets_threads(nproc_per_node: str) -> bool:
    """Whether torchrun sets OMP_NUM_THREADS to 1, where nobody has, for so many processes; not if that is open."""
    return nproc_per_node.isdecimal() and int(nproc_per_node) > 1
