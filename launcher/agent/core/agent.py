"""The agent of one node: torch's LocalElasticAgent with an event loop, warm workers and a recovery state machine.

What torch's agent does around the workers is inherited: rendezvous, ranks, events, metrics, the exit barrier, the
file timer. What it did by polling and restarting everything is decided here by ``unicron_elastic.recovery`` and done
in the loop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections import deque
from functools import partial
from typing import Any

from torch.distributed import DistError

from unicron_elastic.base.node_name import node_name
from unicron_elastic.base.text import counted
from unicron_elastic.base.world import World
from unicron_elastic.compat.agent import (
    DEFAULT_ROLE,
    RunResult,
    TorchAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    prof,
    put_metric,
)
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.compat.expectations import Feature, lacks
from unicron_elastic.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)
from unicron_elastic.compat.workers import LogsSpecs, PContext, keep_in_log_folder
from unicron_elastic.faults import RootCause
from unicron_elastic.launcher.agent.core import failures, isolation
from unicron_elastic.launcher.agent.core.description import describe_workers
from unicron_elastic.launcher.agent.core.job import job_name, policy_of, with_stack
from unicron_elastic.launcher.agent.core.job_teller import JobTeller, news_of
from unicron_elastic.launcher.agent.core.last_barrier import wait_at_last_barrier
from unicron_elastic.launcher.agent.core.node import NodeWatch
from unicron_elastic.launcher.agent.core.pace_report import PaceReport, seen_of
from unicron_elastic.launcher.agent.core.peers import PeerWatch, tell_peers
from unicron_elastic.launcher.agent.core.recalls import Recalls
from unicron_elastic.launcher.agent.core.reporter import Reporter, job_view
from unicron_elastic.launcher.agent.core.worker_messages import WorkerMessages
from unicron_elastic.launcher.agent.hangs.remote_ranks import RemoteRanks
from unicron_elastic.launcher.agent.hangs.watch import HangWatch
from unicron_elastic.launcher.agent.process.function_watch import FunctionWatch
from unicron_elastic.launcher.agent.process.processes import KeeperLost
from unicron_elastic.launcher.agent.process.run_folder import run_folder, temporary_folder
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.agent.process.supervisor import remove_if_empty
from unicron_elastic.launcher.agent.process.workers import WorkersContext, ignore_again
from unicron_elastic.launcher.agent.worlds.snapshots import Snapshots
from unicron_elastic.launcher.agent.worlds.worlds import AgentMeeting, Worlds, nodes_of
from unicron_elastic.launcher.common.few_descriptors import few_descriptors
from unicron_elastic.launcher.config.forwarded import away_from
from unicron_elastic.launcher.config.options import Options, from_environment
from unicron_elastic.launcher.view.incidents.state_moves import StateMove, StateMoves
from unicron_elastic.launcher.view.job.view import LocalJobView
from unicron_elastic.recovery import commands, events
from unicron_elastic.recovery.machine import handle
from unicron_elastic.recovery.state import (
    JobState,
    first_members,
    has_anyone_a_part,
    is_anyone_elsewhere,
    is_newcomer,
    living_members,
    trains_here,
)
from unicron_elastic.rendezvous.job.agree_on_restarts import agree_on_restarts
from unicron_elastic.rendezvous.job.job_rendezvous import job_rendezvous
from unicron_elastic.rendezvous.job.round_watch import RoundListener
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.process.mark import MARK

KILL_NOW_TIMEOUT_S = 5
PEERS_TIMEOUT_S = 1.0

_WAITING = (  # for processes to end, or for other nodes: a signal is to end that wait
    commands.StopWorkers,
    commands.KillWorkers,
    commands.StartWorkers,
    commands.MeetNodes,
    commands.FailJob,
    commands.LeaveJob,
    commands.DepartWell,
)


class Agent(TorchAgent):
    """Drop-in for ``torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent``."""

    _pcontext: PContext | None

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, *args: Any, **kwargs: Any) -> None:
        """Takes torch's arguments, and ``runtime`` and ``options``; without them the environment's options hold."""
        runtime: Runtime | None = kwargs.pop("runtime", None)
        options: Options | None = kwargs.pop("options", None)
        super().__init__(spec, logs_specs, *args, **kwargs)
        keep_in_log_folder(self._logs_specs)
        self._options = options or (runtime.options if runtime else from_environment())
        self._owns_runtime = runtime is None
        self._runtime = runtime or Runtime(self._options)
        self._events: deque[events.Event] = deque()
        self._error: BaseException | None = None
        self._result: RunResult | None = None
        self._return_values: dict[int, Any] = {}
        self._peers: PeerWatch | None = None
        self._functions: FunctionWatch | None = None
        self._remote_ranks_of_round: RemoteRanks | None = None
        self._has_lost_nodes = False  # of the present round
        self._told_restarts: int | None = None  # how many count, as this node has told last
        self._do_others_train = False  # workers of other nodes, in place, when this round began
        self._unheard_loss = ""  # of which the loop has not heard yet
        # None of these holds the agent: it holds the rendezvous, whose port must be free when run's caller goes on.
        self._nodes = spec.rdzv_handler = job_rendezvous(spec.rdzv_handler)
        self._reporter = Reporter(self._options, self._runtime.loop, self._nodes.get_run_id())
        say = self._reporter.say
        self._node = NodeWatch(self._runtime.loop, say, self._events.append)
        keep = self._reporter.keep_evidence
        self._hangs = HangWatch(self._runtime.loop, say, keep, self._events.append, self._node.gpu_lines)
        secret = self._nodes.cluster_secret if self._nodes.is_of_cluster else str  # which holds no rendezvous
        self._snapshots = Snapshots(self._runtime.loop, say, secret, self._runtime.shelf)
        self._worlds = Worlds(self._runtime.loop, self._events.append, say, self._nodes.patience_s)
        self._pace = PaceReport(self._runtime.loop, self._nodes)
        self._moves = StateMoves()
        self._teller = JobTeller(self._runtime.loop, self._nodes)
        self._recalls = Recalls(self._runtime.loop, self._events.append)
        self._said_elsewhere: set[str] = set()  # of faults in this round, by the nodes that have told of them
        self._state = JobState(
            policy=policy_of(spec, self._options, self._shutdown_timeout),
            run_id=self._nodes.get_run_id(),
            job=job_name(spec),
            host=node_name(),
        )

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Runs the job on this node to its end; see torch's ElasticAgent.run."""
        try:
            result: RunResult | None = super().run(role)
            return result or RunResult(state=WorkerState.SUCCEEDED)  # torch has none for who left while it waited
        except SignalException as told:
            # torch leaves its rendezvous open then, as the job may go on elsewhere: so be it, but not with this node.
            if self._nodes.outlives_stores:
                self._nodes.leave()
            elif self._nodes.needs_all_nodes:
                with self._runtime.loop.signals_held():  # each takes a second at the most
                    name = told.sigval.name
                    self._tell_peers(f"the launcher of node {self._worker_group.group_rank} got {name}, and ends.")
                    self._nodes.leave()
            raise
        finally:
            if (folder := temporary_folder(self._logs_specs)) is not None:
                remove_if_empty(folder)
            self._stop_watches()
            self._pace.close()
            self._teller.close()
            self._worlds.close()
            self._snapshots.close()
            self._node.stop()
            self._reporter.close()
            if self._owns_runtime:
                self._runtime.end()

    # -- torch's hooks ---------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature
        self._begin_runtime()
        self._reporter.show_while_running(self._view)
        self._serve_metrics()
        if self._may_thread():
            self._teller.start(lambda: news_of(self._view(), self._state, self._worker_group))
        if self._runtime.is_alone:  # else it is the caller's business what is logged, and how
            self._reporter.speak_for_library()
        isolation.offer_job(self._nodes, self._worker_group.spec, self._runtime.shared_arguments, self._reporter.say)
        self._start_generation(restarts_used=0)
        with self._runtime.loop.signals_held():
            self._start_node_watch()
        while self._result is None:
            self._runtime.loop.run_until(lambda: bool(self._events) or self._error is not None)
            if self._error is not None:
                raise self._error
            self._handle(self._events.popleft())
        if self._result.state is WorkerState.SUCCEEDED:
            self._exit_barrier()
        return self._result

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not isinstance(worker_group.spec.entrypoint, str):
            return self._start_functions(worker_group)
        self._begin_runtime()
        args, envs, prefixes = describe_workers(
            worker_group,
            restarts_used=worker_group.spec.max_restarts - self._remaining_restarts,
            log_line_prefix_template=self._log_line_prefix_template,
            set_local_rank=self._set_local_rank_env,
            configuration=self._state.policy.configurations.get(worker_group.group_world_size),
        )
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        spec = worker_group.spec
        messages = self._worker_messages(worker_group)
        context = WorkersContext(
            runtime=self._runtime,
            on_exit=messages.exited,
            on_message=messages.said,
            on_ending=messages.ending,
            on_replaced=messages.replaced,
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        messages.error_files = context.error_files
        if self._pcontext is not None:  # what the last generation held has to be free
            self._node.wait_until_gpus_are_free(self._pcontext.pids().values(), self._runtime.processes.token)
        self._pcontext = context
        store = self._store if self._nodes.has_store_of_each_round else None
        others = store if worker_group.group_world_size > 1 else None
        generation, is_fixed = self._state.generation + 1, not self._can_agree()
        self._worlds.begin(generation, context, others, worker_group.group_rank, is_fixed=is_fixed)
        messages.on_served = self._worlds.served
        messages.on_snapshot, messages.on_saving = self._snapshots.made, self._snapshots.saving
        messages.on_snapshots_wanted = self._snapshots.wanted
        self._snapshots.begin(store, worker_group.group_rank, worker_group.group_world_size, worker_group.master_addr)
        messages.may_enter = self._worlds.may_enter
        messages.on_moved = partial(_state_moved, self._moves, self._reporter, self._teller)
        self._reporter.folder = run_folder(self._logs_specs, self._error_file())
        self._tell_keeper()
        context.start()
        pids: dict[int, Any] = context.pids()
        return pids

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        # torch waits its default of 30 s here, whatever --shutdown-timeout says. A signal meanwhile is the first.
        self._save_first()
        super()._shutdown(timeout=self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        # torch's run stops the workers with the first signal, once more when a second comes meanwhile, and leaves them
        # behind at a third.
        is_at_first = death_sig is not None
        try:
            self._save_first()
            super()._shutdown(death_sig or signal.SIGTERM, timeout)
        except SignalException as another:
            self._after_another_signal(another.sigval, is_at_first)
            raise

    def _after_another_signal(self, heard: signal.Signals, is_at_first: bool) -> None:
        """A signal came while the workers were being stopped."""
        if is_at_first:
            seconds = counted(self._shutdown_timeout, "second", "seconds")
            self._reporter.say(
                f"A second signal ({heard.name}) came: the workers get SIGTERM, and are killed in {seconds}, "
                "or at once at a third signal."
            )
            return
        self._reporter.say(f"One more signal ({heard.name}) came: the workers are killed now.")
        super()._shutdown(signal.SIGKILL, KILL_NOW_TIMEOUT_S)

    def _save_first(self) -> None:
        """The job is to wait for nodes, if this is so: what it has trained is kept."""
        context = self._pcontext
        if isinstance(context, WorkersContext) and self._snapshots.is_to_save():
            said = self._snapshots.save(context.workers.values())
            if self._worker_group.group_rank == 0:
                self._reporter.say(said)

    # -- generations -----------------------------------------------------------------------------------------------

    def _start_generation(self, restarts_used: int) -> None:
        """Meets the other nodes and starts workers; the state machine then hears of them."""
        group = self._worker_group
        self._remaining_restarts = group.spec.max_restarts - restarts_used
        if self._pcontext is None:
            self._initialize_workers(group)
        else:
            self._restart_workers(group)
        self._say_why_plain()
        if self._runtime.word_of_held:
            self._reporter.say_once("held", self._runtime.word_of_held)
        started = tuple(
            events.StartedWorker(local_rank=w.local_rank, rank=w.global_rank, pid=w.id) for w in group.workers
        )
        used = group.spec.max_restarts - self._remaining_restarts
        why_stay = isolation.why_stay(self._nodes, group.group_world_size)
        node = self._node_in_world()
        self._has_lost_nodes = self._recalls.does_anyone_depart = False
        begun = events.WorkersStarted(
            at=time.monotonic(),
            restarts_used=used,
            workers=started,
            why_stay=why_stay,
            node=node,
            nodes=group.group_world_size,
            do_others_train=self._do_others_train,
            why_lost=self._nodes.why_lost_before(),
        )
        Runtime.workers_began = True
        self._handle(begun)
        self._watch_round(node)

    def _watch_round(self, node: str) -> None:
        """Begin all that goes on beside the workers of a round."""
        with self._runtime.loop.signals_held():
            self._join_worlds(node)
            self._start_watches()

    def _node_in_world(self) -> str:
        """What this node is called in the worlds of this generation, and no other ever."""
        return f"{self._nodes.node_id or self._state.host}#{secrets.token_hex(4)}"

    def _meet_nodes(self, command: commands.MeetNodes) -> None:
        """Meets the nodes of another round; the workers do not notice."""
        self._reporter.say(command.reason)
        group = self._worker_group
        pids = {worker.local_rank: worker.id for worker in group.workers}
        self._stop_watches()
        self._remaining_restarts = group.spec.max_restarts - self._state.restarts_used
        self._nodes.trains_on = True
        try:
            self._rendezvous(group)
        except RendezvousClosedError as closed:
            self._go_on_alone(closed)
            return
        finally:
            self._nodes.trains_on = False
        for worker in group.workers:
            worker.id = pids[worker.local_rank]
        assert isinstance(self._pcontext, WorkersContext)
        _, envs, _ = describe_workers(
            group,
            restarts_used=self._state.restarts_used,
            log_line_prefix_template=None,
            set_local_rank=self._set_local_rank_env,
            configuration=self._state.policy.configurations.get(self._state.started_on),
        )
        for local_rank, env in envs.items():  # for those who take the place of others
            self._pcontext.envs[local_rank].update(env)
        self._has_lost_nodes = self._recalls.does_anyone_depart = False
        store = self._store if self._nodes.has_store_of_each_round else None
        self._snapshots.meet(store, group.group_rank, group.group_world_size, group.master_addr)
        self._watch_round(self._state.node)

    def _go_on_alone(self, closed: RendezvousClosedError) -> None:
        """The others have ended well while this node waited to meet them: its workers do so, too."""
        if not self._nodes.has_ended_well():
            raise closed
        if not has_anyone_a_part(self._state):
            self._leave_after_the_end(closed)
        self._reporter.say(f"{closed} The workers here go on to their own end.")
        alone = AgentMeeting(rank=0, size=1, node=self._state.node, store=None, others_ended=True)
        self._worlds.join(alone, (), living_members(self._state))
        self._watch_hangs()

    def _leave_after_the_end(self, closed: RendezvousClosedError) -> None:
        self._reporter.say(f"{closed} This node is not needed any more, and ends well.")
        self._nodes.leave()
        raise RendezvousGracefulExitError(str(closed)) from closed

    def _can_agree(self) -> bool:
        """Tell whether the agents of this round can agree on worlds."""
        is_alone = self._worker_group.group_world_size == 1
        return (is_alone or self._nodes.has_store_of_each_round) and not lacks(Feature.IN_PLACE)

    def _join_worlds(self, node: str) -> None:
        group = self._worker_group
        this_round = None
        if self._can_agree():
            this_round = AgentMeeting(
                rank=group.group_rank,
                size=group.group_world_size,
                node=node,
                store=None if group.group_world_size == 1 else self._store,
                log=self._nodes.world_log(),
                master=group.master_addr,
                nodes=self._nodes.node_ids,
            )
        self._worlds.join(this_round, first_members(self._state), living_members(self._state))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            # The old store must be let go before a new one can bind the same port.
            self._store = worker_group.store = None
            try:
                with self._reporter.meeting():
                    super()._rendezvous(worker_group)
                if (place := self._nodes.store_of_workers) is not None:
                    worker_group.master_addr, worker_group.master_port = place
                most = worker_group.spec.max_restarts
                used = max(most - self._remaining_restarts, min(self._nodes.restarts_taken_over(), most))
                size = worker_group.group_world_size
                agreed = agree_on_restarts(
                    worker_group.store, worker_group.group_rank, size, used, trains_on=self._nodes.trains_on
                )
            except RendezvousGracefulExitError as left:
                self._reporter.say(f"{left} It has left the job, in which it waited.")
                raise
            except RendezvousClosedError as closed:
                comes_late = self._pcontext is None or self._state.is_left_out  # nothing of its own is unfinished
                if comes_late and self._nodes.has_ended_well():
                    self._leave_after_the_end(closed)
                raise
            except DistError as error:
                if not self._nodes.outlives_stores:
                    if self._pcontext is None:  # they have never met: it may be the port, or the host's name
                        raise
                    raise _without_store(error) from None
                self._reporter.say(f"The nodes meet again: {str(error).partition(chr(10))[0]}")
                continue
            self._remaining_restarts = worker_group.spec.max_restarts - agreed.restarts_used
            self._do_others_train = agreed.do_others_train
            if worker_group.group_rank == 0:  # before workers begin with it
                self._tell_restarts(agreed.restarts_used)
            return

    def _start_functions(self, group: WorkerGroup) -> dict[int, Any]:
        # torch starts these as its own children; the mark lets the keeper find them if the agent is killed.
        messages = self._worker_messages(group)
        token = self._runtime.processes.token
        self._runtime.processes.remember(token=token)
        os.environ[MARK] = token
        try:
            with away_from():
                pids: dict[int, Any] = super()._start_workers(group)
            ignore_again(self._runtime)
        finally:
            del os.environ[MARK]
        assert self._pcontext is not None
        messages.error_files = self._pcontext.error_files
        self._reporter.folder = run_folder(self._logs_specs, self._error_file())
        self._functions = FunctionWatch(
            self._runtime.loop,
            pids.values(),
            group.spec.monitor_interval,
            ask=lambda: self._monitor_workers(group),
            on_result=partial(self._functions_ended, messages),
        )
        return pids

    def _begin_runtime(self) -> None:
        """Starts the keeper, and the warm process if the command line did not already."""
        spec = self._worker_group.spec
        if lacks(Feature.WARM):
            self._runtime.stay_plain("torch does not say whether a fork may use CUDA")
        self._runtime.on_word = self._reporter.say
        if few := few_descriptors(spec.local_world_size):
            self._reporter.say_once("few descriptors", few)
        can_be_warm = isinstance(spec.entrypoint, str) and spec.numa_options is None
        self._runtime.begin([spec.entrypoint, *map(str, spec.args)] if can_be_warm else None, os.environ)

    def _tell_keeper(self) -> None:
        """What is to be cleared away if this agent is killed."""
        folder = temporary_folder(self._logs_specs)
        self._runtime.processes.remember(paths=[folder] if folder else [], farewell=self._reporter.farewell)

    # -- what happened ---------------------------------------------------------------------------------------------

    def _worker_messages(self, group: WorkerGroup) -> WorkerMessages:
        """Read what workers that are about to start say, in the generation that they will be counted to."""
        return WorkerMessages(
            self._state.generation + 1,
            group,
            self._state.host,
            post=self._events.append,
            say=self._reporter.say,
            say_once=self._reporter.say_once,
            why_killed=self._node.why_killed,
        )

    def _functions_ended(self, messages: WorkerMessages, result: RunResult) -> None:
        self._return_values = result.return_values
        messages.functions_ended(result)

    def _peer_failed(self, generation: int, reason: str) -> None:
        event = events.PeerFailed(at=time.monotonic(), reason=reason, generation=generation)
        self._runtime.loop.call_soon(lambda: self._events.append(event))

    def _peer_told(self, generation: int, reason: str) -> None:
        self._said_elsewhere.add(reason)
        self._peer_failed(generation, reason)

    def _exit_barrier(self) -> None:
        barrier = super()._exit_barrier

        def wait() -> None:
            self._worlds.await_end()
            barrier()

        wait_at_last_barrier(self._is_nobody_awaited, wait, self._runtime.loop.signals_held)
        if self._unheard_loss:
            self._reporter.say(f"{self._unheard_loss} This node has ended well and waits for nobody.")

    def _is_nobody_awaited(self) -> bool:
        """Tell whether nobody is awaited: nobody needs this round's store when the last step is made."""
        if self._has_lost_nodes or self._state.gone or self._recalls.does_anyone_depart:
            return True
        return self._nodes.is_nobody_awaited()

    def _nodes_lost(self, generation: int, nodes: tuple[str, ...], reason: str) -> None:
        self._unheard_loss = reason
        self._has_lost_nodes = True
        if next((node for node in self._nodes.node_ids if node not in nodes), "") != self._nodes.node_id:
            self._said_elsewhere.add(reason)  # all who are left see it, and the first of them says it
        self._runtime.loop.call_soon(lambda: self._worlds.gone(nodes))
        event = events.OtherNodesLost(at=time.monotonic(), nodes=nodes, reason=reason, generation=generation)
        self._runtime.loop.call_soon(lambda: self._events.append(event))

    def _nodes_silent(self, generation: int, store: Any, ranks: tuple[int, ...]) -> None:
        event = events.NodesSilent(at=time.monotonic(), nodes=nodes_of(store, ranks), generation=generation)
        self._runtime.loop.call_soon(lambda: self._events.append(event))

    def _taken_out(self, generation: int, reason: str) -> None:
        event = events.TakenForLost(at=time.monotonic(), reason=reason, generation=generation)
        self._runtime.loop.call_soon(lambda: self._events.append(event))

    def _others_depart(self, generation: int, nodes: tuple[str, ...], reason: str) -> None:
        self._runtime.loop.call_soon(lambda: self._worlds.gone(nodes))
        self._runtime.loop.call_soon(self._expect_breaks)
        self._recalls.others_depart(generation, nodes, reason)

    def _expect_breaks(self) -> None:
        """Let the workers know that connections will break, which is no fault."""
        if isinstance(self._pcontext, WorkersContext):
            self._pcontext.expect_breaks()

    def _nodes_wait(self, generation: int, nodes_waiting: int) -> None:
        now = time.monotonic()
        event = events.MembershipChanged(at=now, nodes_waiting=nodes_waiting, generation=generation)
        self._runtime.loop.call_soon(lambda: self._events.append(event))

    def _cancelled(self, error: Exception) -> None:
        def end() -> None:
            self._error = error

        self._runtime.loop.call_soon(end)

    def _rendezvous_failed(self, generation: int, error: Exception) -> None:
        if self._worlds.log_outlives_store or self._recalls.does_anyone_depart:
            return  # the members meet in other stores, and the loss of its node is told otherwise
        if self._nodes.outlives_stores:
            self._peer_failed(generation, f"the node that hosts this round's store is gone: {error}".split("\n")[0])
            return

        def fail() -> None:
            if generation == self._state.generation:
                self._error = _without_store(error) if isinstance(error, DistError) else error

        self._runtime.loop.call_soon(fail)

    # -- what to do ------------------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        before = self._state.world
        if isinstance(event, events.OtherNodesLost):
            self._unheard_loss = ""
        self._state, todo = handle(self._state, event)
        self._reporter.phase_is(self._state.phase.value)
        for command in todo:
            self._do_whole(command)
        world = self._state.world
        if world is not None and world.number > (1 if before is None else before.number):
            if before is not None and world.reason and self._speaks_for(world) and not self._is_told(world.reason):
                self._reporter.say(world.reason)  # when its members have been told
            self._watch_hangs()
        self._watch_newcomers()
        self._pace.look()
        self._keep_count()

    def _keep_count(self) -> None:
        """One node keeps with the job how many restarts count: a node that takes over from all goes on with that."""
        world, used = self._state.world, self._state.restarts_used
        is_first = self._worker_group.group_rank == 0 if world is None else world.members[0].node == self._state.node
        if is_first:
            self._tell_restarts(used)

    def _tell_restarts(self, used: int) -> None:
        if used != self._told_restarts:
            self._told_restarts = used
            self._nodes.tell_restarts(used)

    def _is_told(self, sentence: str) -> bool:
        """Whether people know of it, or of what departs: the nodes of a planned job speak in one place."""
        is_told = sentence in self._said_elsewhere or self._recalls.is_told_there(sentence)
        return self._runtime.is_planned and is_told

    def _speaks_for(self, world: World) -> bool:
        """Whether this node is the one that says why a world came, as all of them know it."""
        return not self._runtime.is_planned or world.members[0].node == self._state.node

    def _do_whole(self, command: commands.Command) -> None:
        """Do what does not wait for others to its end, whatever signal comes: its handler raises wherever it strikes.

        Inside of `Thread.start` that is a KeyError of Python's, and what takes errors for a broken probe loses it.
        """
        does_wait = isinstance(command, _WAITING)
        with contextlib.nullcontext() if does_wait else self._runtime.loop.signals_held():
            self._do(command)

    def _do(self, command: commands.Command) -> None:
        match command:
            case commands.StopWorkers() | commands.KillWorkers():
                self._end_workers(command)
            case commands.GatherEvidence():
                self._hangs.gather(command)
            case commands.Tell():
                self._reporter.say(command.reason)
            case commands.TellPeers():
                self._tell_peers(command.reason)
            case commands.WakeAt():
                self._wake_at(command.at)
            case commands.RecordIncident():
                incident = self._moves.recorded(command.incident)
                self._teller.recorded(self._reporter.record(incident, is_told=self._is_told(incident.reason)))
            case commands.StartWorkers():
                is_known = command.reason == self._reporter.last_said  # as the reason for the stop, usually
                if not (is_known or self._is_told(command.reason)):
                    self._reporter.say(command.reason)
                self._stop_watches()
                self._put_metrics(WorkerState.FAILED)
                self._start_generation(command.restarts_used)
            case commands.FinishJob():
                self._finish(WorkerState.SUCCEEDED, self._succeeded())
            case (
                commands.ChangeWorld()
                | commands.TellWorld()
                | commands.InviteMember()
                | commands.ReplaceWorker()
                | commands.HoldJoins()
                | commands.MeetNodes()
            ):
                self._about_world(command)
            case commands.AwaitStep() | commands.AskToLeave():
                self._find_out_when_to_leave(command)
            case commands.FailJob() | commands.LeaveJob() | commands.DepartWell():
                self._leave_or_fail(command)

    def _about_world(
        self,
        command: commands.ChangeWorld
        | commands.TellWorld
        | commands.InviteMember
        | commands.ReplaceWorker
        | commands.HoldJoins
        | commands.MeetNodes,
    ) -> None:
        match command:
            case commands.ReplaceWorker():
                self._replace_worker(command)
            case commands.ChangeWorld():
                self._worlds.change(command)
            case commands.MeetNodes():
                self._meet_nodes(command)
            case commands.HoldJoins():
                self._hold_joins(command.reason)
            case _:
                self._worlds.do(command)

    def _say_why_plain(self) -> None:
        if (why_plain := self._runtime.why_plain) is not None:
            self._reporter.say_once("plain", f"Workers start without the warm process: {why_plain}.")

    def _replace_worker(self, command: commands.ReplaceWorker) -> None:
        """Starts a process in the place of a lost one. Raises what forbids to start it, also with a new keeper."""
        self._reporter.say(command.reason)
        assert isinstance(self._pcontext, WorkersContext)
        worker = self._worker_group.workers[command.local_rank]
        self._remaining_restarts = self._worker_group.spec.max_restarts - command.restarts_used
        env = {"TORCHELASTIC_RESTART_COUNT": str(command.restarts_used), "UNICRON_TAKES_PLACE": "1"}
        self._snapshots.replaced(command.local_rank)
        try:
            process = self._pcontext.replace(command.local_rank, env)
        except (KeeperLost, ChannelClosed, OSError) as error:  # with the keeper, say, the workers were lost
            self._reporter.say(f"Worker {command.local_rank} could not be started, and is once more: {error}.")
            self._begin_runtime()
            process = self._pcontext.replace(command.local_rank, env)
        self._say_why_plain()
        self._begin_runtime()  # for the next one, should the warm process not have served this one
        worker.id = process.pid
        started = events.StartedWorker(local_rank=command.local_rank, rank=worker.global_rank, pid=process.pid)
        self._handle(
            events.WorkerReplaced(
                at=time.monotonic(),
                worker=started,
                restarts_used=command.restarts_used,
                generation=self._state.generation,
            )
        )

    def _end_workers(self, command: commands.StopWorkers | commands.KillWorkers) -> None:
        is_known = self._recalls.is_about_this_node(command.reason) or self._is_told(command.reason)
        if command.reason and not is_known:
            self._reporter.say(command.reason)
        if not isinstance(self._pcontext, WorkersContext):
            return
        if isinstance(command, commands.KillWorkers):
            self._pcontext.kill(command.local_ranks)
        else:
            self._pcontext.stop(command.local_ranks, command.reason if command.is_anyone_gone else None)

    def _tell_peers(self, reason: str) -> None:
        is_told = self._nodes.tell_fault(f"On {self._state.host}, {reason}")
        timeout_s = PEERS_TIMEOUT_S / 10 if is_told else PEERS_TIMEOUT_S  # the store tells who has no connection
        is_in_round = self._worker_group.store is not None and self._worker_group.group_world_size > 1
        if is_in_round and self._nodes.has_store_of_each_round:
            try:
                tell_peers(self._store, f"On {self._state.host}, {reason}", timeout_s)
            except SignalException:
                raise
            except Exception as error:  # the store's node may be the one that is gone: peers hear of it otherwise
                self._reporter.say(f"The other nodes could not be told of the fault: {error}")

    def _hold_joins(self, reason: str) -> None:
        if reason:
            self._reporter.say(reason)
        self._nodes.hold_joins(reason)

    def _wake_at(self, at: float) -> None:
        self._runtime.loop.call_at(at, self._time_has_come)

    def _time_has_come(self) -> None:
        if self._state.hang is not None:
            self._hangs.look_now()
        self._events.append(events.TimePassed(at=time.monotonic()))

    def _find_out_when_to_leave(self, command: commands.AwaitStep | commands.AskToLeave) -> None:
        if isinstance(command, commands.AwaitStep):
            processes = self._pcontext.workers if isinstance(self._pcontext, WorkersContext) else {}
            self._recalls.await_step(self._state.generation, processes.values())
            return
        group = self._worker_group
        why_not = isolation.why_not_now(self._nodes, group.group_world_size, command)
        if command.is_departure and not why_not:
            self._expect_breaks()
        self._handle(events.LeaveAnswered(at=time.monotonic(), why_not=why_not))

    def _leave_or_fail(self, command: commands.FailJob | commands.LeaveJob | commands.DepartWell) -> None:
        """Ends the job on this node, or everywhere."""
        if not isinstance(command, commands.DepartWell):
            self._reporter.say(with_stack(command))
        elif not self._is_told(command.reason):
            self._reporter.say(command.reason)
        self._stop_workers(self._worker_group)
        self._stop_watches()
        if isinstance(command, commands.DepartWell):
            self._recalls.does_anyone_depart = True
            self._nodes.leave()
            if not command.is_drained:
                self._finish(WorkerState.SUCCEEDED, self._succeeded())
                return
            self._runtime.why_drained = command.reason
        if isinstance(command, commands.FailJob):
            self._nodes.why_failed = command.reason
        if isinstance(command, commands.LeaveJob):
            isolation.leave(self._nodes, self._state.host, command, self._reporter.say)
        cause = None if isinstance(command, commands.DepartWell) else command.cause
        if cause is None and not isinstance(command, commands.FailJob) and self._pcontext is not None:
            failures.write_reason(self._pcontext.error_files[0], command.reason)
        self._finish(WorkerState.FAILED, self._failed(cause))

    def _finish(self, state: WorkerState, result: RunResult) -> None:
        self._stop_watches()
        self._worker_group.state = state
        self._put_metrics(state)
        self._result = result

    def _succeeded(self) -> RunResult:
        ranks = (worker.global_rank for worker in self._worker_group.workers)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=self._return_values or dict.fromkeys(ranks))

    def _failed(self, cause: RootCause | None) -> RunResult:
        assert self._pcontext is not None
        error_files = self._pcontext.error_files
        for worker in self._state.workers:
            if worker.raised is not None:
                failures.write_error_file(error_files[worker.local_rank], worker.raised)
        if cause is not None and cause.fault.failure.exit_code == 0:
            failures.write_reason(error_files[cause.fault.failure.local_rank], cause.fault.reason, "RankLeft")
        found = failures.process_failures(
            exit_codes={w.local_rank: w.exit_code or 0 for w in self._state.workers},
            pids={w.local_rank: w.pid for w in self._state.workers},
            error_files=error_files,
            cause=cause,
        )
        by_rank = {self._worker_group.workers[local].global_rank: failure for local, failure in found.items()}
        return RunResult(state=WorkerState.FAILED, failures=by_rank)

    def _put_metrics(self, state: WorkerState) -> None:
        role = self._worker_group.spec.role
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{state.name.lower()}", 1)

    # -- watches and logs ----------------------------------------------------------------------------------------------

    def _start_watches(self) -> None:
        spec = self._worker_group.spec
        generation = self._state.generation
        remote_ranks = self._remote_ranks_of_round = self._remote_ranks()
        self._said_elsewhere = set()
        listener = RoundListener(
            on_fault=partial(self._peer_failed, generation),
            on_told=partial(self._peer_told, generation),
            on_cancel=self._cancelled,
            on_waiting=partial(self._nodes_wait, generation),
            on_recall=self._recalls.told,
            on_depart=partial(self._others_depart, generation),
            on_lost=partial(self._nodes_lost, generation),
            on_taken_out=partial(self._taken_out, generation),
            on_change=self._worlds.look,
        )
        self._nodes.watch_nodes(listener)
        if self._nodes.has_store_of_each_round:
            self._peers = PeerWatch(
                self._nodes,
                self._store,
                spec.monitor_interval,
                on_fault=partial(self._peer_told, generation),
                on_waiting=partial(self._nodes_wait, generation),
                on_error=partial(self._rendezvous_failed, generation),
                on_silent=partial(self._nodes_silent, generation, self._store),
                outlives_store=self._nodes.outlives_stores,
                remote_ranks=remote_ranks,
            )
            self._peers.start()
        self._watch_hangs()
        if isinstance(context := self._pcontext, WorkersContext):
            see = partial(seen_of, processes=context.workers)
            self._pace.start(lambda: see(self._state, self._worker_group, self._nodes, kept_at=self._snapshots.kept_at))

    def _watch_hangs(self) -> None:
        """Watch the workers that train; newcomers are not in step yet."""
        if not isinstance(self._pcontext, WorkersContext) or self._options.on_hang == "off":
            return
        trains = {worker.local_rank for worker in self._state.workers if trains_here(self._state, worker)}
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        workers = {ranks[each]: worker for each, worker in self._pcontext.workers.items() if each in trains}
        tell_after_s = min(self._state.policy.hang_tell_s, self._state.policy.hang_patience_s)
        world, remote_ranks = self._state.world, self._remote_ranks_of_round
        is_whole = self._worker_group.group_world_size == 1
        if world is not None:  # nodes that were lost are nowhere to be asked
            is_whole = is_whole or not is_anyone_elsewhere(self._state)
            remote_ranks = None if is_whole else remote_ranks
            if remote_ranks is not None:
                remote_ranks.members = world.size
        self._hangs.start(
            self._state.generation,
            workers,
            whole_job=is_whole,
            remote_ranks=remote_ranks,
            is_first_world=world is None or world.number == 1,
            tell_after_s=tell_after_s,
        )

    def _watch_newcomers(self) -> None:
        if not isinstance(self._pcontext, WorkersContext) or self._options.on_hang == "off":
            return
        processes = self._pcontext.workers
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        late = (worker.local_rank for worker in self._state.running if is_newcomer(self._state, worker))
        self._hangs.watch_newcomers({ranks[each]: processes[each] for each in late})

    def _remote_ranks(self) -> RemoteRanks | None:
        """Where to ask for the ranks of the other nodes; None if there are none."""
        group = self._worker_group
        if group.group_world_size == 1 or not self._nodes.has_store_of_each_round:
            return None
        return RemoteRanks(
            self._store,
            rank=group.group_rank,
            size=group.group_world_size,
            members=group.workers[0].world_size,
            host=self._state.host,
        )

    def _may_thread(self) -> bool:
        # torch forks function workers from this very process, which therefore must have no more threads than torch's.
        return self._runtime.is_alone and isinstance(self._worker_group.spec.entrypoint, str)

    def _serve_metrics(self) -> None:
        self._reporter.serve_metrics(
            self._view,
            self._state.host,
            self._runtime.metrics_teller,
            cluster_samples=self._nodes.cluster_samples if self._nodes.is_of_cluster else tuple,
            may_thread=self._may_thread(),
        )

    def _start_node_watch(self) -> None:
        if self._options.health and self._may_thread():
            folders = [str(self._reporter.folder)] if self._reporter.folder is not None else []
            self._node.start(folders, self._pids, self._options.health_command)

    def _pids(self) -> dict[int, str]:
        """Return the pids of workers that run, for the probes' threads."""
        return {worker.pid: f"rank {worker.rank}" for worker in self._state.running}

    def _stop_watches(self) -> None:
        if self._peers is not None:
            self._peers.stop()
            self._peers = None
        if self._functions is not None:
            self._functions.stop()
            self._functions = None
        self._hangs.stop()
        self._worlds.stop()
        self._pace.stop()

    def _view(self) -> LocalJobView:
        processes = self._pcontext.workers if isinstance(self._pcontext, WorkersContext) else {}
        readings = {local_rank: process.reading() for local_rank, process in processes.items()}
        group = self._worker_group
        world_size = group.workers[0].world_size if group.workers else 0
        return job_view(self._state, readings, nodes=group.group_world_size or 1, world_size=world_size)

    def _error_file(self) -> str | None:
        return self._pcontext.error_files.get(0) if self._pcontext is not None else None


def _state_moved(moves: StateMoves, reporter: Reporter, teller: JobTeller, move: StateMove) -> None:
    """Not of the agent: what hears workers must not hold it, see ``Agent.run``."""
    if (incident := moves.moved(move)) is not None:
        teller.recorded(reporter.record_again(incident))


def _without_store(error: Exception) -> RendezvousConnectionError:
    """Return what to say of an ``error`` of the store in which nodes have met."""
    first = str(error).partition("\n")[0]
    return RendezvousConnectionError(f"The node is gone that has the store of all nodes: {first}")
