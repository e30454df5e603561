"""``unicron chaos``: breaks things on purpose, in jobs that are about to start and in jobs that run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from typing import Annotated

import typer

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.tables import aligned
from unicron_elastic.launcher.config.answers import fail
from unicron_elastic.testing.chaos_plan import ChaosPlan
from unicron_elastic.testing.chaos_processes import LiveWorker, find_workers, send
from unicron_elastic.testing.explain_chaos import explain
from unicron_elastic.testing.parse_chaos import parse

VARIABLE = "UNICRON_CHAOS"  # as in unicron_elastic.testing.chaos
NOTHING_FOUND, BAD_USAGE = 1, 2

app = typer.Typer(
    help="Break things on purpose: in a job that is about to start (run, check) or in one that runs on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Rank = Annotated[int, typer.Option(metavar="N", min=0, help="The worker's global rank.")]
_RunId = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="Of this run; needed when several are here, and asks nothing."),
]


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="What is to break, such as kill:rank=1,step=50.")],
    arguments: Annotated[list[str], typer.Argument(metavar="ARGUMENTS", help="The arguments of unicron-run.")],
) -> None:
    """Start unicron-run with a plan of faults: the same as UNICRON_CHAOS=PLAN unicron-run ARGUMENTS."""
    _parse(plan)
    if arguments[0] == "--":
        del arguments[0]
    program = shutil.which("unicron-run", path=os.path.dirname(sys.executable)) or shutil.which("unicron-run")
    command = [program] if program else [sys.executable, "-m", "unicron_elastic.launcher.main"]
    typer.echo(f"{VARIABLE}={shlex.quote(plan)} unicron-run {shlex.join(arguments)}", err=True)
    sys.stdout.flush()
    os.execve(command[0], [*command, *arguments], {**os.environ, VARIABLE: plan})


@app.command()
def check(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="Such as kill:rank=1,step=50 [env: UNICRON_CHAOS].")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Also check the ranks against a job of this size.")
    ] = None,
) -> None:
    """Say in words what a plan does, or what is wrong with it.

    A plan has one or more parts, separated by semicolons: KIND:rank=N,NAME=VALUE,...

    \b
    kill segv abort hang   the process ends, or stops as a whole
    exit                   code=1
    exception              text=...
    sleep hang-gil         seconds=inf; Python's other threads run, or not
    skip                   one reduction of gradients is left out
    slow                   factor=2 how=sleep|cpu steps=all
    leak                   mb_per_step=64 limit_mb=1024
    disk                   folder=... limit_mb=1024
    xid ecc                xid=79; need the test library that stands in for NVML

    \b
    rank=N|all     who; needed
    step=1         in which optimizer step since the worker started
    phase=forward  at forward, backward, before-reduce, during-reduce,
                   after-reduce or optimizer
    nth=1          at which one of these in that step
    after=SECONDS  instead of step, phase and nth
    restart=0|any  in which generation of the workers

    \b
    random:mtbf=SECONDS,seed=0,kinds=kill|hang   at random, the same for a seed
    """
    text = os.environ.get(VARIABLE, "") if plan is None else plan
    parsed = _parse(text)
    for sentence in explain(parsed):
        typer.echo(sentence)
    missing = parsed.missing_ranks(world_size) if world_size is not None else []
    if missing:
        fail(BAD_USAGE, f"A job of {world_size} has no rank {', '.join(map(str, missing))}.")


@app.command("list")
def list_command(
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Of this run alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
) -> None:
    """List the workers of the runs of unicron-run on this machine."""
    found = [worker for worker in find_workers() if run_id in (None, worker.run_id)]
    if as_json:
        typer.echo(json.dumps([worker.to_json() for worker in found], indent=2))
    elif found:
        typer.echo(_table(found))
    if not found:
        fail(NOTHING_FOUND, _nothing(run_id))


@app.command()
def kill(rank: _Rank, run_id: _RunId = None) -> None:
    """Kill a worker (SIGKILL)."""
    _signal(signal.SIGKILL, ("Kill", "is killed"), rank, run_id)


@app.command()
def term(rank: _Rank, run_id: _RunId = None) -> None:
    """Ask a worker to end (SIGTERM)."""
    _signal(signal.SIGTERM, ("End", "is asked to end"), rank, run_id)


@app.command()
def stop(rank: _Rank, run_id: _RunId = None) -> None:
    """Make a worker hang (SIGSTOP)."""
    _signal(signal.SIGSTOP, ("Stop", "is stopped"), rank, run_id)


@app.command()
def cont(rank: _Rank, run_id: _RunId = None) -> None:
    """Let a stopped worker go on (SIGCONT)."""
    _signal(signal.SIGCONT, ("Continue", "goes on"), rank, run_id)


def _parse(text: str) -> ChaosPlan:
    try:
        return parse(text)
    except ValueError as error:
        fail(BAD_USAGE, f"This plan is not possible: {error}.")


def _signal(number: signal.Signals, what: tuple[str, str], rank: int, run_id: str | None) -> None:
    worker = the_one(find_workers(), rank, run_id)
    order, done = what
    if run_id is None and sys.stdin.isatty():  # whose run it is only a person can tell
        typer.confirm(f"{order} rank {rank} of run {called(worker)}?", abort=True)
    try:
        send(worker, number)
    except ProcessLookupError:
        fail(NOTHING_FOUND, f"Rank {rank} of run {worker.run_id} ended this moment.")
    except PermissionError:
        fail(NOTHING_FOUND, f"Rank {rank} of run {worker.run_id} belongs to another user.")
    typer.echo(f"Rank {rank} of run {worker.run_id} (pid {worker.pid}) {done}.")


def called(worker: LiveWorker) -> str:
    """Return the run of a worker, with what tells it from others."""
    return f"{one_line(worker.run_id)} (pid {worker.pid}: {one_line(worker.command)})"


def the_one(workers: list[LiveWorker], rank: int, run_id: str | None) -> LiveWorker:
    """Return the worker that is meant. Ends the command if none is, or if it is not said of which of several runs."""
    of_run = [worker for worker in workers if run_id in (None, worker.run_id)]
    one_of_each = {worker.run_id: worker for worker in reversed(of_run)}
    if len(one_of_each) > 1:
        runs = "; ".join(map(called, reversed(one_of_each.values())))
        fail(BAD_USAGE, f"{len(one_of_each)} runs are on this machine; choose with --run-id: {runs}.")
    found = [worker for worker in of_run if worker.rank == rank]
    if len(found) > 1:  # of jobs that chose the same ID
        runs = "; ".join(map(called, found))
        fail(BAD_USAGE, f"Rank {rank} is in several runs with this ID; signal one by its pid yourself: {runs}.")
    if not found:
        ranks = ", ".join(str(worker.rank) for worker in of_run)
        fail(NOTHING_FOUND, f"No rank {rank} runs here; there is rank {ranks}." if of_run else _nothing(run_id))
    return found[0]


def _nothing(run_id: str | None) -> str:
    of_run = "of unicron-run" if run_id is None else f"of run {run_id}"
    return f"No worker {of_run} runs on this machine."


def _table(workers: list[LiveWorker]) -> str:
    rows = [("run", "rank", "pid", "state", "command")]
    rows += [
        (one_line(each.run_id), str(each.rank), str(each.pid), each.state, one_line(each.command)) for each in workers
    ]
    return "\n".join(aligned(rows, None, (), numbers=(1, 2)))
