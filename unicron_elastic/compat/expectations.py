"""What is expected of torch beside its documented interface, as a table, and what goes without each thing.

``lacks()`` asks the installed torch; nothing is read from its version number. What is missing costs a part of what we
do, never a job: see ``launcher/stepping_aside.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from functools import cache
from types import CodeType
from typing import Any

__all__ = ["EXPECTATIONS", "Expectation", "Feature", "lacks", "why_missing"]


class Feature(Enum):
    """A part of what we do; its value says what happens without it."""

    AGENT = "torch's own agent runs the job, as torchrun would"
    NUMA = "a job with --numa-binding is run by torch's own agent"
    IN_PLACE = "nobody goes on in place: after a loss all workers restart"
    WARM = "workers start plainly, not as forks"
    LEAVE = "no node leaves a c10d rendezvous before its job ends"
    REDUCED = "a snapshot that DistributedDataParallel was not built for is used like any other"
    RECORDER = "slow and late ranks are not named by their collectives"
    BIND = "stores listen on all addresses of their node"
    STATE = "who reaches the store of a c10d rendezvous can run code in its agents"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """That there is ``path``, "module:name.name", and what it is like.

    ``takes``: its parameters or fields; "a|b" is one of two. ``uses``: names that its code looks up, so that others can
    be put in their places, or its parts be overridden. ``sets``: attributes that its code sets on ``self``.
    ``says``: words of its docstring, which for what is written in C++ has the signature. ``orelse``: another path that
    does as well.
    """

    part: Feature
    path: str
    takes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    orelse: str = ""


_SERVER = "torch.distributed.elastic.agent.server.api"
_LOCAL = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_SIMPLE = f"{_SERVER}:SimpleElasticAgent"
_PROCESSES = "torch.distributed.elastic.multiprocessing"
_MEETING = "torch.distributed.elastic.rendezvous"
_DYNAMIC = f"{_MEETING}.dynamic_rendezvous"
_C10D = "torch.distributed.distributed_c10d"


def _of(part: Feature, *rows: Any) -> Iterator[Expectation]:
    """Read rows: a path, or a path and what it is like."""
    for row in rows:
        path, like = row if isinstance(row, tuple) else (row, {})
        yield Expectation(part=part, path=path, **like)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


EXPECTATIONS: tuple[Expectation, ...] = (
    # The launchers, which run with names of ours in the places of theirs.
    *_of(
        Feature.AGENT,
        ("torch.distributed.run:run", {"takes": ("args",), "uses": ("elastic_launch",)}),
        "torch.distributed.run:get_args_parser",
        "torch.distributed.launcher.api:LaunchConfig",
        (
            "torch.distributed.launcher.api:launch_agent",
            {"takes": _words("config entrypoint args"), "uses": _words("LocalElasticAgent rdzv_registry")},
        ),
    ),
    # The agent of a node, from which ours inherits.
    *_of(
        Feature.AGENT,
        (f"{_LOCAL}.__init__", {"takes": _words("spec logs_specs"), "sets": _words("_pcontext _logs_specs")}),
        (f"{_LOCAL}.__init__", {"takes": ("log_line_prefix_template",), "sets": ("_log_line_prefix_template",)}),
        (f"{_LOCAL}._start_workers", {"takes": ("worker_group",), "sets": ("_pcontext",)}),
        (f"{_LOCAL}._stop_workers", {"takes": ("worker_group",)}),
        (f"{_LOCAL}._monitor_workers", {"takes": ("worker_group",)}),
        (f"{_LOCAL}._shutdown", {"takes": ("death_sig",), "uses": ("_pcontext", "close")}),
        (f"{_LOCAL}._setup_local_watchdog", {"takes": ("envs",)}),
        f"{_LOCAL}._setup_healthcheck",
        (f"{_LOCAL}._set_local_rank_env", {"takes": _words("worker_env local_rank spec")}),
        (f"{_SIMPLE}.__init__", {"sets": _words("_worker_group _remaining_restarts _store")}),
        (f"{_SIMPLE}.run", {"takes": ("role",), "uses": _words("_invoke_run _shutdown")}),
        (f"{_SIMPLE}._invoke_run", {"takes": ("role",)}),
        (f"{_SIMPLE}._initialize_workers", {"takes": ("worker_group",), "uses": _words("_rendezvous _start_workers")}),
        (
            f"{_SIMPLE}._restart_workers",
            {"takes": ("worker_group",), "uses": _words("_stop_workers _initialize_workers")},
        ),
        (f"{_SIMPLE}._rendezvous", {"takes": ("worker_group",), "uses": ("next_rendezvous",), "sets": ("_store",)}),
        f"{_SIMPLE}._exit_barrier",
        f"{_SERVER}:DEFAULT_ROLE",
        (f"{_SERVER}:RunResult", {"takes": _words("state return_values failures")}),
        *((f"{_SERVER}:WorkerState.{state}", {}) for state in _words("HEALTHY SUCCEEDED FAILED")),
        (
            f"{_SERVER}:WorkerSpec",
            {
                "takes": _words(
                    "role local_world_size rdzv_handler entrypoint args max_restarts monitor_interval numa_options "
                    "duplicate_stdout_filters duplicate_stderr_filters"
                )
            },
        ),
        (
            f"{_SERVER}:WorkerGroup.__init__",
            {"sets": _words("spec workers store group_rank group_world_size master_addr master_port state")},
        ),
        (
            f"{_SERVER}:Worker.__init__",
            {"sets": _words("id local_rank global_rank role_rank world_size role_world_size")},
        ),
        "torch.distributed.elastic.metrics:prof",
        ("torch.distributed.elastic.metrics:put_metric", {"takes": _words("metric_name metric_value")}),
        ("torch.distributed.elastic.utils:macros.substitute", {"takes": _words("args local_rank")}),
    ),
    # The processes of a generation, and what is told of them.
    *_of(
        Feature.AGENT,
        (
            f"{_PROCESSES}:SubprocessContext.__init__",
            {
                "takes": _words(
                    "name entrypoint args envs logs_specs log_line_prefixes numa_options "
                    "duplicate_stdout_filters duplicate_stderr_filters"
                ),
                "sets": _words("subprocess_handlers _numa_options"),
            },
        ),
        (
            f"{_PROCESSES}:PContext.__init__",
            {"sets": _words("entrypoint args envs stdouts stderrs error_files nprocs")},
        ),
        (f"{_PROCESSES}:PContext.start", {"uses": ("_start",)}),
        (f"{_PROCESSES}:PContext.close", {"takes": _words("death_sig timeout"), "uses": ("_close",)}),
        (f"{_PROCESSES}:SubprocessContext._close", {"takes": _words("death_sig timeout")}),
        f"{_PROCESSES}:SubprocessContext.pids",
        f"{_PROCESSES}:LogsSpecs",
        f"{_PROCESSES}:DefaultLogsSpecs",
        (f"{_PROCESSES}.api:_terminate_process_handler", {"takes": _words("signum frame")}),
        (f"{_PROCESSES}:SignalException", {"takes": _words("msg sigval")}),
        (f"{_PROCESSES}.errors:ChildFailedError", {"takes": _words("name failures")}),
        (f"{_PROCESSES}.errors:ProcessFailure", {"takes": _words("local_rank pid exitcode error_file")}),
        f"{_PROCESSES}.errors:record",
    ),
    # How nodes meet.
    *_of(
        Feature.AGENT,
        *(
            f"{_MEETING}:Rendezvous{name}"
            for name in _words("Handler Parameters Error ClosedError ConnectionError GracefulExitError TimeoutError")
        ),
        (f"{_MEETING}:RendezvousInfo", {"takes": _words("store rank world_size bootstrap_store_info")}),
        (f"{_MEETING}:RendezvousStoreInfo", {"takes": _words("master_addr master_port")}),
        (f"{_MEETING}:RendezvousStoreInfo.build", {"takes": _words("rank store local_addr server_port")}),
        *(
            f"{_MEETING}:RendezvousHandler.{method}"
            for method in _words(
                "next_rendezvous get_backend is_closed set_closed num_nodes_waiting get_run_id shutdown use_agent_store"
            )
        ),
        f"{_MEETING}.registry:get_rendezvous_handler",
        (f"{_MEETING}.utils:parse_rendezvous_endpoint", {"takes": _words("endpoint default_port")}),
        *(f"torch.distributed:{name}" for name in _words("Store PrefixStore HashStore DistError DistNetworkError")),
        "torch.distributed:TCPStore",
    ),
    *_of(Feature.BIND, ("torch.distributed:TCPStore.__init__", {"says": ("master_listen_fd",)})),
    *_of(
        Feature.STATE,
        (f"{_DYNAMIC}:_BackendRendezvousStateHolder.sync", {"uses": _words("pickle loads dumps PickleError")}),
        (
            f"{_DYNAMIC}:_RendezvousState.__init__",
            {"sets": _words("participants wait_list redundancy_list last_heartbeats")},
        ),
        (f"{_DYNAMIC}:_NodeDesc", {"takes": _words("addr pid local_id")}),
    ),
    *_of(
        Feature.LEAVE,
        f"{_DYNAMIC}:_RendezvousExitOp",
        f"{_DYNAMIC}:DynamicRendezvousHandler._stop_heartbeats",
        (f"{_DYNAMIC}:DynamicRendezvousHandler.__init__", {"sets": _words("_op_executor _state_holder")}),
        f"{_DYNAMIC}:DynamicRendezvousHandler.settings",
    ),
    *_of(
        Feature.NUMA,
        (
            "torch.numa.binding:_maybe_wrap_command_args_with_numa_binding",
            {
                "takes": _words("command_args device_index|gpu_index numa_options"),
                "orelse": "torch.numa.binding:maybe_wrap_command_args_with_numa_binding",
            },
        ),
    ),
    *_of(Feature.WARM, "torch.cuda:_is_in_bad_fork"),
    # Process groups: how they are made, broken off and made anew.
    *_of(
        Feature.IN_PLACE,
        (f"{_C10D}:init_process_group", {"takes": _words("backend store rank world_size timeout device_id")}),
        *(f"{_C10D}:_world.{name}" for name in _words("group_count pg_map default_pg")),
        (
            f"{_C10D}:_new_process_group_helper",
            {"uses": ("ProcessGroupGloo",), "orelse": f"{_C10D}:_create_gloo_process_group"},
        ),
        (f"{_C10D}:_register_pg_in_world", {"orelse": f"{_C10D}:_register_process_group"}),
        *(f"torch.distributed:ProcessGroup.{name}" for name in _words("abort _get_backend _device_types group_name")),
        ("torch.distributed:Work.wait", {"says": ("timeout",)}),
        "torch.distributed:Work.is_completed",
        *(f"torch.distributed:Store.{name}" for name in _words("set get add check wait multi_get")),
        "torch.distributed:DistStoreError",
        "torch:Tensor.register_post_accumulate_grad_hook",
        *(f"torch.optim.optimizer:register_optimizer_step_{when}_hook" for when in ("pre", "post")),
        "torch.testing._internal.distributed.fake_pg:FakeStore",
    ),
    *_of(
        Feature.REDUCED,
        "torch.distributed:Reducer._get_zeros_like_grad_buckets",
        "torch.distributed:GradBucket.parameters",
        (
            "torch.nn.parallel:DistributedDataParallel.__init__",
            {"sets": _words("_module_parameters find_unused_parameters static_graph process_group")},
        ),
        ("torch.nn.parallel:DistributedDataParallel._ddp_init_helper", {"sets": ("reducer",)}),
    ),
    *_of(
        Feature.RECORDER,
        *(f"torch._C._distributed_c10d:{name}" for name in _words("_dump_fr_trace _dump_fr_trace_json")),
        "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    ),
)


@cache
def lacks(part: Feature) -> tuple[str, ...]:
    """Return what the installed torch lacks for ``part``, as words; imports what is asked of."""
    return tuple(why for each in EXPECTATIONS if each.part is part and (why := why_missing(each)))


def why_missing(expected: Expectation) -> str:
    """Return what of this is not so, "torch.cuda._is_in_bad_fork is not there"; "" if all of it is."""
    why = _why_not(expected, expected.path)
    return "" if not why or (expected.orelse and not _why_not(expected, expected.orelse)) else why


def _why_not(expected: Expectation, path: str) -> str:
    name = path.replace(":", ".")
    try:
        thing = _at(path)
    except (ImportError, AttributeError):
        return f"{name} is not there"
    parameters = _parameters(thing) if expected.takes else frozenset()
    for one_of in expected.takes:
        if parameters.isdisjoint(one_of.split("|")):
            return f"{name} does not take {' or '.join(one_of.split('|'))}"
    for what, wanted, has in (
        ("use", expected.uses, _names(thing)),
        ("set", expected.sets, _names(thing)),
        ("know", expected.says, _said(thing)),
    ):
        for each in wanted:
            if each not in has:
                return f"{name} does not {what} {each}"
    return ""


def _at(path: str) -> Any:
    module, _, names = path.partition(":")
    thing: Any = importlib.import_module(module)
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


def _parameters(thing: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _names(thing: Any) -> frozenset[str]:
    """All names that its code and that of the functions inside looks up or sets."""
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    return frozenset(_names_of(code)) if isinstance(code, CodeType) else frozenset()


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _said(thing: Any) -> str:
    return thing.__doc__ or ""
