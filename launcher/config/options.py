"""unicron-run's own options: one prefix, and for each an environment variable of the same name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from unicron_elastic.recovery.policy import DO_NOT_RESTART_EXIT_CODE

UNNAMED = "none"  # the --rdzv-id of who gives none

# torch._dynamo is imported by the first optimizer a script creates: 0.7 s of each start otherwise.
PRELOAD_DEFAULT = "?numpy,torch,torch.distributed,torch.nn.parallel,torch.utils.data,?torch._dynamo"


class BadOption(ValueError):
    """A value that an option cannot take; the text names the option, the value and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What unicron-run adds to torchrun's options."""

    warm: bool = True
    preload: str = PRELOAD_DEFAULT
    learn: bool = True
    warm_for_next: float = 0.0
    in_band: bool = True
    console: str = "auto"
    ledger: str = ""
    same_failure_limit: int = 3
    reset_restarts_after_steps: int = 0
    no_restart_exit_codes: frozenset[int] = frozenset({DO_NOT_RESTART_EXIT_CODE})
    on_fault: str = "act"
    isolate_after: int = 3
    health: bool = True
    health_command: str = ""
    on_hang: str = "act"
    hang_patience: float = 30.0
    attach: str = "off"
    chaos: str = ""
    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"


def _switch(text: str) -> bool:
    words = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError("on or off") from None


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def port(text: str) -> int:
    """A TCP port, or 0 for none. Raises ValueError that says what would be right."""
    if not (text.strip().isdecimal() and int(text) < 65536):
        raise ValueError("a port from 1 to 65535, or 0 for none")
    return int(text)


def _exit_codes(text: str) -> frozenset[int]:
    codes = [part.strip() for part in text.split(",") if part.strip()]
    if not all(code.isdecimal() and 0 < int(code) < 256 for code in codes):
        raise ValueError("a comma-separated list of exit codes from 1 to 255, or nothing")
    return frozenset(map(int, codes))


def _one_of(*words: str) -> Callable[[str], str]:
    """Return what takes one of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{', '.join(words[:-1])} or {words[-1]}")
        return text

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError("a number of seconds, 0 or more")
    return seconds


def _chaos(text: str) -> str:
    from unicron_elastic.testing.parse_chaos import parse

    if text.strip():
        try:
            parse(text)
        except ValueError as error:
            raise ValueError(f"a plan of faults, and {error}") from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    name: str  # the field of Options
    parse: Callable[[str], Any]  # raises ValueError whose text says what would be right
    metavar: str
    help: str
    is_short: bool = False  # its flag has no prefix

    @property
    def flag(self) -> str:
        return ("--" if self.is_short else "--unicron-") + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags with dashes and, as torchrun's own, with underscores."""
        return self.flag, self.flag[:2] + self.flag[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        return "UNICRON_" + self.name.upper()

    def value(self, text: str, source: str) -> Any:
        try:
            return self.parse(text)
        except ValueError as error:
            raise BadOption(f"{source}: {text!r} is not valid; give {error}") from None


OPTIONS = (
    _Option(
        name="warm",
        parse=_switch,
        metavar="on|off",
        help="start workers as forks of a process that has already imported torch (default: on)",
    ),
    _Option(
        name="preload",
        parse=str,
        metavar="MODULES",
        help="comma-separated modules the warm process imports; a leading ? marks one that may be absent "
        f"(default: {PRELOAD_DEFAULT})",
    ),
    _Option(
        name="learn",
        parse=_switch,
        metavar="on|off",
        help="once the job trains, import for the workers of the next start what these have imported (default: on)",
    ),
    _Option(
        name="warm_for_next",
        parse=_seconds,
        metavar="SECONDS",
        help="once the job has ended, hold its warm process for so long: the next launch of the same script starts "
        "its workers from it; 0: no (default: 0)",
    ),
    _Option(
        name="in_band",
        parse=_switch,
        metavar="on|off",
        help="attach exception propagation, step counting and the control channel to Python workers (default: on)",
    ),
    _Option(
        name="console",
        parse=_one_of("auto", "panel", "plain", "off"),
        metavar="auto|panel|plain|off",
        help="what to show while the job runs; auto: a live panel on a terminal, else plain lines (default: auto)",
    ),
    _Option(
        name="ledger",
        parse=str,
        metavar="FILE",
        help="where incidents are recorded, JSON Lines (default: incidents.jsonl in the run's folder under --log-dir, "
        "or under the user's state folder without one)",
    ),
    _Option(
        name="same_failure_limit",
        parse=_count,
        metavar="N",
        help="end the job when the same mistake of the script came N times in a row at the same step; 0: never "
        "(default: 3)",
    ),
    _Option(
        name="reset_restarts_after_steps",
        parse=_count,
        metavar="N",
        help="forget used restarts once workers have done N steps since they started; 0: never (default: 0)",
    ),
    _Option(
        name="no_restart_exit_codes",
        parse=_exit_codes,
        metavar="CODES",
        help=f"worker exit codes after which the job is not restarted (default: {DO_NOT_RESTART_EXIT_CODE})",
    ),
    _Option(
        name="on_fault",
        parse=_one_of("act", "observe"),
        metavar="act|observe",
        help="observe: tell and record what torchrun would not have noticed, hangs and sick nodes, and do nothing "
        "about it; workers that fail are restarted in any case (default: act)",
    ),
    _Option(
        name="isolate_after",
        parse=_count,
        metavar="N",
        help="isolate this node after N failures of one worker, or 2N of all, within an hour that are not the "
        "script's own, if the job can go on without it; 0: only for a broken GPU (default: 3)",
    ),
    _Option(
        name="health",
        parse=_switch,
        metavar="on|off",
        help="watch GPUs, memory, disks, network links and the clock of this node (default: on)",
    ),
    _Option(
        name="health_command",
        parse=str,
        metavar="COMMAND",
        help="the site's own check, run every minute: exit code 0 is well, 1 a warning, 2 critical; its first line is "
        "told (default: none)",
    ),
    _Option(
        name="on_hang",
        parse=_one_of("act", "observe", "off"),
        metavar="act|observe|off",
        help="when workers hang: restart them, or only tell and record it, or do not watch for it (default: act)",
    ),
    _Option(
        name="hang_patience",
        parse=_seconds,
        metavar="SECONDS",
        help="how long workers may hang in a deadlock before they are restarted; ten times as long if they may wait "
        "for data; a stopped process is not waited for (default: 30)",
    ),
    _Option(
        name="attach",
        parse=_one_of("auto", "off"),
        metavar="auto|off",
        help="auto: in scripts that import nothing of ours, transformers' Trainer keeps its state in memory, and goes "
        "on from there after a restart (default: off)",
        is_short=True,
    ),
    _Option(
        name="chaos",
        parse=_chaos,
        metavar="PLAN",
        help="break workers on purpose, such as kill:rank=1,step=50; `unicron chaos check` says what a plan does",
    ),
    _Option(
        name="metrics_port",
        parse=port,
        metavar="PORT",
        help="serve metrics for Prometheus at /metrics, and /healthz and /readyz, on this port; 0: no (default: 0)",
        is_short=True,
    ),
    _Option(
        name="metrics_address",
        parse=str,
        metavar="HOST",
        help="the address to serve metrics on; 0.0.0.0 for all (default: 127.0.0.1)",
        is_short=True,
    ),
)
assert {option.name for option in OPTIONS} == {field.name for field in fields(Options)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group of own options to torch's parser."""
    group = parser.add_argument_group("unicron-run", "Options of unicron-run itself; UNICRON_<NAME> sets each as well.")
    for option in OPTIONS:
        group.add_argument(
            *option.flags,
            dest=f"unicron_{option.name}",
            default=None,
            metavar=option.metavar,
            help=option.help,
        )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options by which a job goes to a cluster."""
    group = parser.add_argument_group("cluster", "Run the job on the nodes of a cluster instead of this one.")
    group.add_argument(
        "--cluster",
        default=None,
        metavar="ENDPOINT",
        help="where the cluster's etcd is, HOST:PORT; its output comes here, and its exit code is this command's "
        "[env: UNICRON_CLUSTER]",
    )
    group.add_argument(
        "--detach", action="store_true", default=None, help="leave the job running and return [env: UNICRON_DETACH=1]"
    )
    group.add_argument(
        "--weight",
        default=None,
        metavar="W",
        help="what a FLOP of this job is worth beside one of others (default: 1) [env: UNICRON_WEIGHT]",
    )
    group.add_argument(
        "--job-spec",
        default=None,
        metavar="FILE",
        help="JSON with what else there is to say of the job: unit_nodes, pinned_nodes, throughput "
        "[env: UNICRON_JOB_SPEC]",
    )


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Options as the environment sets them. Raises BadOption."""
    return from_arguments(argparse.Namespace(), environ)


def from_arguments(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Options:
    """Options from parsed arguments, else the environment, else the defaults. Raises BadOption."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = getattr(arguments, f"unicron_{option.name}", None)
        if given is not None:
            values[option.name] = option.value(given, option.flag)
        elif option.variable in environ:
            values[option.name] = option.value(environ[option.variable], option.variable)
    return Options(**values)
