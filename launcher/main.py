"""``unicron-run``: torchrun's command line, run by our agent.

The module has the functions of ``torch.distributed.run``, for programs that call those. It imports torch only when a
job starts, by which time the keeper and the warm process are under way.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from unicron_elastic.base.extras import why_missing
from unicron_elastic.base.text import set_apart
from unicron_elastic.compat.command_line import TorchMissing
from unicron_elastic.launcher import stepping_aside
from unicron_elastic.launcher.agent.process.processes import KeeperLost
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.common.kept_snapshots import take_shelf
from unicron_elastic.launcher.common.odd_patience import odd_patience
from unicron_elastic.launcher.common.open_streams import hold_closed
from unicron_elastic.launcher.config import arguments, options
from unicron_elastic.launcher.config.arguments import warm_command
from unicron_elastic.launcher.config.checks import STDIN, BadArgument, check, pairs_of
from unicron_elastic.launcher.config.forwarded import AGENT_VARIABLE, PLANNED_JOB, sets_threads, shared_arguments
from unicron_elastic.launcher.config.origin import CONFIG_VARIABLE, BadConfig, located
from unicron_elastic.launcher.export.metrics.link import take_teller
from unicron_elastic.worker.process.collector_paused import collector_paused
from unicron_elastic.worker.process.ignored_signals import ignore_instead, ignored_signals
from unicron_elastic.worker.process.prctl import die_with_parent

if TYPE_CHECKING:
    config_from_args: Any

__all__ = ["config_from_args", "console_script", "get_args_parser", "main", "parse_args", "run"]


_TORCHS_OWN = (
    "config_from_args",
    "determine_local_world_size",
    "get_rdzv_endpoint",
    "get_use_env",
    "parse_min_max_nnodes",
    "run_script_path",
)

get_args_parser = arguments.get_args_parser


def __getattr__(name: str) -> Any:
    """The functions of torch.distributed.run that are torch's own here, too."""
    if name in _TORCHS_OWN:
        from unicron_elastic.compat.launch import torch_run

        return getattr(torch_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line; exits with code 2 on a bad flag, as argparse does.

    Settings of the file that --config or UNICRON_CONFIG names are in what is returned, or become variables of this
    process.
    """
    return _parse(sys.argv[1:] if args is None else args)[0]


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    """The arguments, and the command line with what a file adds to it."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    path = os.environ.get(CONFIG_VARIABLE, "").strip() if args.config is None else args.config
    if path or args.config is not None:
        from unicron_elastic.launcher.config.run import with_file
        from unicron_elastic.launcher.config.table import declare_commands

        declare_commands(_commands)
        argv = with_file(argv, len(args.training_script_args), path)
        args = parser.parse_args(argv)
    arguments.take_variables(args)
    args.signals_are_named = arguments.names_signals(parser, args)
    return args, argv


def _commands() -> Any:
    from unicron_elastic.launcher.cli import app

    return app


def run(args: argparse.Namespace, runtime: Runtime | None = None) -> None:
    """Runs parsed arguments to the job's end. Raises what torch.distributed.run.run raises."""
    from unicron_elastic.compat.launch import run_with
    from unicron_elastic.launcher import api

    if runtime is None:
        runtime = _runtime_for(args, options.from_arguments(args))

    run_id = args.rdzv_id

    def launch(config: Any, entrypoint: Any) -> api.elastic_launch:
        if run_id != options.UNNAMED:  # for a job of one node torch makes up another one, whatever it is called
            config.run_id = run_id
        return api.elastic_launch(config, entrypoint, runtime=runtime)

    stepping_aside.tell()
    try:
        run_with(launch, args)
    finally:
        runtime.end()


def main(args: Sequence[str] | None = None) -> None:
    """Run as ``torch.distributed.run.main``: raises ChildFailedError and copies the first failure's error file."""
    from unicron_elastic.compat.errors import record

    record(lambda: run(parse_args(args)))()


def console_script() -> NoReturn:
    """The command ``unicron-run``."""
    if agent := os.environ.pop(AGENT_VARIABLE, ""):
        die_with_parent(int(agent))
        ignore_instead(ignored_signals(), [])  # which ends it by signals, whatever it ignores itself
    hold_closed()
    try:
        code = _run_command(sys.argv[1:])
    except KeyboardInterrupt:  # before torch's handlers stand: end as any program does, so that a shell loop ends too
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 128 + signal.SIGINT  # where the signal is blocked
    _end(code)


def _run_command(argv: Sequence[str]) -> int:
    try:
        return _run_ours(argv)
    except ImportError as error:
        why = why_missing(error)
        if why is not None:
            return _complain(why, 1)
        if not stepping_aside.may_step_aside():
            raise
        strange: Exception = error
    except stepping_aside.STRANGE as error:
        if not stepping_aside.may_step_aside():
            raise
        strange = error
    stepping_aside.run_as_torchrun(argv, strange)
    return 0


def _run_ours(argv: Sequence[str]) -> int:
    teller, shelf = take_teller(), take_shelf()
    is_planned = bool(os.environ.get(PLANNED_JOB))
    try:
        args, argv = _parse(argv)
        _check_folder()
        chosen = options.from_arguments(args)
        if chosen.chaos:
            os.environ["UNICRON_CHAOS"] = chosen.chaos  # for the workers, which inherit it
            if not chosen.in_band:
                _say("no fault will be injected: --unicron-chaos needs --unicron-in-band on")
        _hand_on_attach(chosen)
        check(args, warn=_say)
        _tell_or_was_told(args, chosen, is_planned=is_planned)
        if cluster := _cluster_of(args):
            return _submit(args, argv, cluster)
        _check_is_for_here(args)
        if not _may_join(args, chosen):
            return 1
    except options.BadOption as error:
        return _complain(str(error), 2)
    except TorchMissing as error:
        return _complain(str(error), 1)
    except BadConfig as error:
        return _complain(str(error), 2)
    except BadArgument as error:
        return _complain(str(error), 1)  # where torchrun raises, it exits with 1
    runtime = _runtime_for(args, chosen)
    runtime.is_alone = True
    runtime.is_planned = is_planned
    runtime.metrics_teller, runtime.shelf = teller, shelf
    if args.training_script != STDIN:  # of which another node has none
        runtime.shared_arguments = shared_arguments(argv, len(args.training_script_args))
    try:
        runtime.begin(warm_command(args), _early_environment(args))
        return _run_job(args, runtime)
    except KeeperLost:
        return _complain("its keeper process, which starts the workers, was killed from outside", 1)
    finally:
        runtime.end()


def _hand_on_attach(chosen: options.Options) -> None:
    """Have workers find what was chosen, which inherit it, and take it out of their environment."""
    if chosen.attach != "off" or "UNICRON_ATTACH" in os.environ:
        os.environ["UNICRON_ATTACH"] = chosen.attach
    if chosen.attach != "off" and not chosen.in_band:
        _say("nothing is attached to: --attach needs --unicron-in-band on")


def _check_folder() -> None:
    """Raises BadOption where the current folder was removed: torch cannot be loaded there, which ends it with 2."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise options.BadOption("the folder in which it was started is gone; start it in one that is there") from None


def _tell_or_was_told(args: argparse.Namespace, chosen: options.Options, *, is_planned: bool) -> None:
    """Says what is odd about this launch. Of a planned job that, and its threads, were told where it was submitted."""
    if not is_planned:
        _tell_odd_variables(os.environ)
        _tell_odd_patience(args, chosen)
    elif sets_threads(args.nproc_per_node):  # which torch would say at length, on each node
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _tell_odd_patience(args: argparse.Namespace, chosen: options.Options) -> None:
    for sentence in odd_patience(
        args.rdzv_backend,
        args.nnodes,
        pairs_of(args.rdzv_conf),
        hang_patience_s=chosen.hang_patience,
        acts_on_hangs=chosen.on_hang == chosen.on_fault == "act",
    ):
        _say(sentence)


def _runtime_for(args: argparse.Namespace, chosen: options.Options) -> Runtime:
    runtime = Runtime(chosen)
    runtime.signals_are_named = getattr(args, "signals_are_named", False)
    return runtime


def _tell_odd_variables(environ: Mapping[str, str]) -> None:
    if any(name.startswith("UNICRON_") for name in environ):  # else there is no time for it
        from unicron_elastic.launcher.config.odd_variables import odd_variables

        for sentence in odd_variables(environ, _commands):
            _say(f"{sentence}.")


def _cluster_of(args: argparse.Namespace) -> str:
    """Where the job is to go; "" if it runs here. What the command line says of this node goes before a variable."""
    if args.cluster is not None:
        return str(args.cluster)
    is_here = args.standalone or args.rdzv_endpoint or args.rdzv_backend != "static"
    return "" if is_here else os.environ.get("UNICRON_CLUSTER", "").strip()


def _check_is_for_here(args: argparse.Namespace) -> None:
    """Raises BadArgument for what is said of a job that goes to a cluster, and would be without effect."""
    for flag, value in (("--detach", args.detach), ("--weight", args.weight), ("--job-spec", args.job_spec)):
        if value:
            raise BadArgument(f"{flag}: it is for a job that runs on a cluster; give --cluster ENDPOINT as well")


def _submit(args: argparse.Namespace, argv: Sequence[str], cluster: str) -> int:
    from unicron_elastic.launcher.node import submission

    environ = os.environ
    detach = (
        args.detach
        if args.detach is not None
        else environ.get("UNICRON_DETACH", "").strip().lower() in ("1", "on", "true", "yes")
    )
    weight = environ.get("UNICRON_WEIGHT", "") if args.weight is None else args.weight
    spec_file = environ.get("UNICRON_JOB_SPEC", "") if args.job_spec is None else args.job_spec
    try:
        spec = submission.spec_of(args, argv, weight=weight, spec_file=spec_file)
        for told in (submission.not_taken(args, spec), submission.threads_told(args.nproc_per_node, spec)):
            if told:
                _say(f"{told}.")
        return submission.submit(spec, cluster, detach=detach)
    except submission.CannotSubmit as error:
        return _complain(str(error), 1)


def _may_join(args: argparse.Namespace, chosen: options.Options) -> bool:
    """Whether this node may take part. One that has its job to itself harms nobody, and nobody could replace it."""
    from unicron_elastic.base.node_name import node_name
    from unicron_elastic.launcher.agent.core.isolation import why_kept_out

    why = why_kept_out(node_name(), _say)
    if why:
        _say(why)
    return not why or chosen.on_fault == "observe" or args.nnodes.rpartition(":")[2] == "1"


def _early_environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment workers will have, as far as libraries read it while they are imported.

    torchrun sets OMP_NUM_THREADS to 1 for several workers on a node, after it has imported torch.
    """
    env = dict(os.environ)
    if args.nproc_per_node != "1":
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back the exception of Ctrl-C while torch is imported, whose C++ would end this process by SIGABRT for it.

    It is raised at the end. Who presses Ctrl-C twice does not wait for that.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # such as one that nohup made ignored
        yield
        return
    came = False

    def hold(number: int, _frame: Any) -> None:
        nonlocal came
        if came:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        came = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _run_job(args: argparse.Namespace, runtime: Runtime) -> int:
    with interrupts_held(), collector_paused():
        from torch.distributed import DistError

        from unicron_elastic.compat import launch  # noqa: F401
        from unicron_elastic.compat.errors import ChildFailedError, SignalException, record
        from unicron_elastic.compat.rendezvous import RendezvousError
        from unicron_elastic.launcher import api  # noqa: F401

    def run_to_its_end() -> None:
        try:
            run(args, runtime)
        except ChildFailedError:
            if runtime.why_drained:  # no worker has failed
                raise NodeLeft(runtime.why_drained) from None
            raise

    try:
        record(run_to_its_end)()
    except NodeLeft:
        return 1  # which has been said
    except ChildFailedError as error:
        # The line that tools look for, as a traceback of torchrun ends with it.
        print(f"{ChildFailedError.__module__}.{ChildFailedError.__qualname__}: {error}", file=sys.stderr)
        return 1
    except SignalException as error:
        return _complain(f"stopped: {error}", 1)
    except (RendezvousError, DistError, OSError, ValueError) as error:
        if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
            raise
        return _complain(_words(error), 1)
    return 0


class NodeLeft(Exception):
    """`NodeLeft` says that this node has left a job that goes on, as somebody drains it."""


def _words(error: Exception) -> str:
    """Some of torch's errors have no text; their class's docstring then says what they mean."""
    text = str(error) or (type(error).__doc__ or "").strip().partition("\n")[0].removeprefix("Raised when ")
    return f"{type(error).__name__}: {text}"


def _complain(text: str, code: int) -> int:
    _say(located(text))
    return code


def _say(text: str) -> None:
    try:
        print(f"unicron-run: {set_apart(text)}", file=sys.stderr)
    except OSError:
        pass


def _end(code: int) -> NoReturn:
    """Ends as Python does after ``sys.exit``, but for that it leaves daemon threads alone.

    Python would end each that comes back to it where it is. One that copies a neighbour's snapshot is in torch, where
    that is an abort of the process: a job that ended well would have failed.
    """
    try:
        for finish in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):  # as torch's handler of a signal raises, and the job has ended
                finish()
    finally:
        os._exit(code)


def _flush() -> None:
    """A reader that went away (``| head``) must not turn the exit into a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


if __name__ == "__main__":
    console_script()
