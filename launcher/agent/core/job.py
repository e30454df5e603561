"""What the state machine is told of a job, and how its end is told to people."""

from __future__ import annotations

import os
import sys
import textwrap

from unicron_elastic.compat.agent import WorkerSpec
from unicron_elastic.launcher.config.options import Options
from unicron_elastic.planning.model.configured import CONFIGURATIONS, parse_configurations
from unicron_elastic.recovery.commands import FailJob, LeaveJob
from unicron_elastic.recovery.policy import Policy


def with_stack(command: FailJob | LeaveJob) -> str:
    """The reason, and under it the traceback of the root cause: what a user looks for first."""
    stack = command.cause.fault.failure.stack if command.cause is not None else None
    return command.reason if not stack else f"{command.reason}\n{textwrap.indent(stack.rstrip(), '    ')}"


def policy_of(spec: WorkerSpec, options: Options, stop_timeout_s: float) -> Policy:
    """The user's options as the decisions take them."""
    return Policy(
        max_restarts=spec.max_restarts,
        stop_timeout_s=float(stop_timeout_s),
        same_failure_limit=options.same_failure_limit,
        reset_after_steps=options.reset_restarts_after_steps,
        no_restart_exit_codes=options.no_restart_exit_codes,
        acts_on_hangs=options.on_hang == options.on_fault == "act",
        isolates=options.on_fault == "act",
        isolate_after=options.isolate_after,
        hang_patience_s=options.hang_patience,
        configurations=parse_configurations(os.environ.get(CONFIGURATIONS) or "{}"),
    )


def job_name(spec: WorkerSpec) -> str:
    """The script or module, else the program or function."""
    if spec.entrypoint == sys.executable:
        named = next((str(argument) for argument in spec.args if not str(argument).startswith("-")), None)
        if named is not None:
            return os.path.basename(named)
    return str(spec.get_entrypoint_name())
