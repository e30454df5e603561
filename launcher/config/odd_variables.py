"""Variables of the environment whose names look like those of settings, and are none: somebody has mistyped them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from unicron_elastic.launcher.config.origin import CONFIG_VARIABLE
from unicron_elastic.launcher.config.table import SettingsTable, declare_commands, run_uses

# By these the parts of unicron-run find each other. Nobody sets them by hand.
INNER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "UNICRON_AGENT_PID": "to a job's part: the agent of the cluster that began it",
        "UNICRON_CONFIGURATION": "to workers: DP, TP, PP with which the job was started",
        "UNICRON_CONFIGURATIONS": "to a job's part: the best of these by the number of nodes",
        "UNICRON_CONTROL_FD": "to workers: the control channel",
        "UNICRON_METRICS_FD": "to a job's part: where it tells its metrics",
        "UNICRON_PLANNED_JOB": "to a job's part: the job that the plan knows",
        "UNICRON_PULSE_FD": "to workers: the pulse page",
        "UNICRON_PYTHONPATH": "to workers: the `PYTHONPATH` that the user had set",
        "UNICRON_RUN_TOKEN": "to workers: marks what a run and each worker has started, so that none of it is missed",
        "UNICRON_SNAPSHOTS_FD": "to a job's part: where it gives snapshots that are to outlive it",
        "UNICRON_TAKES_PLACE": "to workers: this one takes the place of a lost rank",
        "UNICRON_VERDICT": "to a job's part: a file for how the job has ended",
        "UNICRON_WARM_FD": "to the warm process: its channel",
    }
)
_PREFIX = "UNICRON_"
_LIKE = 0.85  # how alike two names are of which one is a mistyped other


def odd_variables(environ: Collection[str], commands: Any) -> Iterator[str]:
    """Say of each variable that is like a setting, and none, which one may be meant; ``commands`` are unicron's.

    Others that begin so may be a script's own. Raises arguments.TorchMissing.
    """
    known = {CONFIG_VARIABLE, *INNER_VARIABLES, *(name for use in run_uses() for name in use.setting.variables)}
    odd = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)
    if not odd:
        return  # so that the commands need not be imported
    declare_commands(commands)
    table = SettingsTable()
    known |= {name for section in table for setting in table[section].values() for name in setting.variables}
    by_ending = {name.partition("_")[2]: name for name in sorted(known - {*INNER_VARIABLES}, reverse=True)}
    for name in odd:
        if name not in known and (like := difflib.get_close_matches(name.removeprefix(_PREFIX), by_ending, 1, _LIKE)):
            yield f"{name} is no setting, and has no effect; perhaps {by_ending[like[0]]} is meant"
