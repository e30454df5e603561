"""What a job leaves in the cluster's store so that a spare node can run its part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from unicron_elastic.launcher.kept_back import SECRET_WORDS

# What tells libraries and launchers how to work goes along; everything else, such as a token, is not the store's.
PASSED_ON = ("PET_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "UNICRON_", "PYTHON", "TRITON_", "HF_HOME")
_PASSWORD = "UNICRON_ETCD_PASSWORD"  # of the store itself: whoever reads the store would have it
_KEPT_BACK = ("UNICRON_NODE_NAME", _PASSWORD, "UNICRON_ETCD_USER", "PET_LOCAL_ADDR", "PET_NODE_RANK")
# Of the process that submits, and of the agent itself: a job's part of a node has neither.
OF_SUBMISSION = ("UNICRON_CLUSTER", "UNICRON_DETACH", "UNICRON_WEIGHT", "UNICRON_JOB_SPEC", "UNICRON_METRICS_PORT",
    "UNICRON_METRICS_ADDRESS", "UNICRON_CONFIG",
)  # fmt: skip
SPEC_VARIABLE = "UNICRON_SPEC_ENV"  # names of further variables, with commas
_OF_ONE_NODE = tuple(
    f"--{spelled}"
    for name in ("local-addr", "node-rank", "metrics-port", "metrics-address")
    for spelled in (name, name.replace("-", "_"))
)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that its job needs on other nodes, without what may be a secret."""
    wanted = {name.strip() for name in environ.get(SPEC_VARIABLE, "").split(",")} - {_PASSWORD}
    return {name: value for name, value in environ.items() if name in wanted or _is_passed_on(name)}


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
