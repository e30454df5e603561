"""An agent of the cluster: it has a node, and runs on it what the plan says, or helps a job that nobody plans.

Decisions are ``planning.agent``'s; here its orders are read from the store, its child is started and ended, and what
comes of both is handed back. One thread decides; others wait for the child and for the store.
"""

from __future__ import annotations

import math
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM
from typing import Any, TypeVar

from unicron_elastic.launcher.common.kept_snapshots import VARIABLE as SNAPSHOTS_VARIABLE
from unicron_elastic.launcher.common.kept_snapshots import KeptSnapshots
from unicron_elastic.launcher.export.metrics.cluster import AgentMetrics
from unicron_elastic.launcher.export.metrics.link import VARIABLE as METRICS_VARIABLE
from unicron_elastic.launcher.export.metrics.link import ChildMetrics
from unicron_elastic.launcher.node.children import Child
from unicron_elastic.launcher.node.cluster_watch import ClusterWatch, PrefixChanged, Trouble
from unicron_elastic.launcher.node.planned import child_command, child_environment, why_not_here
from unicron_elastic.launcher.node.planned_records import (
    end_job,
    may_come_back,
    phase_of,
    read_spec,
    verdict_on,
    wait_for_name,
    why_out_of_jobs,
)
from unicron_elastic.launcher.node.spare import Claim, Spare
from unicron_elastic.metrics.figures import NodeFigures
from unicron_elastic.planning.coordinate import agent
from unicron_elastic.planning.coordinate.agent import AgentState, handle
from unicron_elastic.planning.coordinate.node_status import REFUSED_S, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.records.job import JobKeys, parse_round
from unicron_elastic.rendezvous.records.plan import parse_order, parse_phase, parse_spec, status_text
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys, order_key, run_of_start, status_key
from unicron_elastic.rendezvous.store.interface import Entry, LeaseGoneError, Store, StoreError, StoreReplacedError
from unicron_elastic.rendezvous.store.session import SAY_AGAIN_S

T = TypeVar("T")

TICK_S = 0.25
RETRY_S = 1.0
REACHED_S = 0.2  # between two looks whether the coordinator is reached again
KEPT_LOOK_S = 5.0  # between two looks whether what is kept of jobs is still of use
SPARE_S = 1.0  # without an order, after which a job that nobody plans may have this node


@dataclass(frozen=True, slots=True)
class _Ended:
    child: Child


class ClusterAgent:
    """Runs until ``stop``. All but ``stop`` belongs to the thread of ``run``."""

    def __init__(
        self,
        node: ClusterNode,
        open_store: Callable[[], Store],
        status: NodeStatus,
        *,
        endpoint: str,
        etcd: Mapping[str, str],
        address: str,
        say: Callable[[str], None],
    ) -> None:
        """``etcd``: the variables by which children find it; ``address``: where other nodes find this one, or ""."""
        self._node = node
        self._open_store = open_store
        self._endpoint, self._etcd, self._address = endpoint, etcd, address
        self._say = say
        self._state = AgentState(status=status)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._is_entering = False
        self._watch = ClusterWatch(open_store, self._inbox.put)
        self._has_told_trouble = False
        self._child: Child | None = None
        self._child_since = 0  # revision of the store when it was started
        self._recall_key = ""
        self._orders_done = 0  # revision of the latest order that was looked at
        self._refused: dict[str, float] = {}  # keys that say why, and since when (monotonic)
        self._pending: dict[str, agent.EndJob] = {}  # by job: what the store has not been told yet
        self._spare = Spare(node, status.host, address, say)
        self._idle_since = time.monotonic()
        self._has_lost_data = False
        self._lost_data_at = -math.inf
        self._known_job: tuple[str, dict[str, bytes]] = "", {}  # one that goes on, and what the store holds of it
        self._turned_at = time.monotonic()  # when the loop last went round
        self._child_metrics = ChildMetrics()
        self._kept, self._kept_looked_at = KeptSnapshots(), 0.0
        self._left: dict[str, tuple[int, float]] = {}  # starts of jobs that go on without this node, and since when
        self.tells_metrics = False  # so that children tell theirs

    def answers(self) -> AgentMetrics:
        """What this agent says of itself, to other threads."""
        return AgentMetrics(
            self._node.answers,
            node=lambda: NodeFigures(node=self._state.status.host, state=self._state.status.state.value),
            child=self._child_metrics.samples,
            stood_s=lambda: time.monotonic() - self._turned_at,
            why_kept_out=self._node.why_kept_out,
        )

    def stop(self) -> None:
        """Ends it soon: what runs here leaves its job, the second time at once. From a signal's handler as well."""
        self._stop.set()
        self._inbox.put(agent.Stopped(at_unix_s=time.time()))

    def run(self) -> None:
        """Obeys orders. Raises StoreError if the cluster cannot be reached at the start, or has a node of this name."""
        with self._open_store() as store:
            wait_for_name(store, self._state.status.host, self._stop)
        self._node.join_roster()
        self._node.say(status_key(self._me), status_text(self._state.status))
        self._open()
        while not (self._stop.is_set() and self._is_idle):
            self._turned_at = time.monotonic()
            self._wait()
            self._handle(agent.NodeTick(at_unix_s=time.time()))
            self._tell_ends()
            if not self._stop.is_set():
                self._help()
                self._give_up_kept()
                self._tell_kept()
        self._node.leave_roster()
        self._watch.close()

    @property
    def _me(self) -> str:
        return self._state.status.node_id

    @property
    def _is_idle(self) -> bool:
        return self._state.status.state is NodeState.IDLE and self._child is None

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Takes in what has come, after a moment at most."""
        try:
            self._take(self._inbox.get(timeout=TICK_S))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            pass
        except StoreError as error:
            self._reopen(error)

    def _take(self, told: Any) -> None:
        match told:
            case Trouble(error):
                raise error
            case PrefixChanged():
                self._look(self._watch.take(told))
            case agent.Stopped():
                self._handle(told)
            case _Ended(child) if child is self._child:
                self._child_ended(child)

    def _look(self, what: str) -> None:
        match what:
            case "order":
                self._look_at_order()
            case "status":
                self._look_at_status()
            case "job":
                self._look_at_job()
            case "round":
                self._look_at_round()

    def _look_at_order(self) -> None:
        entry = self._watch.entries("order").get(order_key(self._me))
        if entry is None or entry.revision <= self._orders_done:
            return
        try:
            order = parse_order(entry)
        except ValueError as error:
            self._say(f"{error}: it is ignored.")
            self._orders_done = entry.revision
            return
        spec = read_spec(self._watch.opened(), order.target) if order.target else None
        why_not = why_not_here(spec) if order.target else ""
        now_unix_s, host = time.time(), self._state.status.host
        why_out = "" if order.target else why_out_of_jobs(self._watch.opened(), host, now_unix_s)
        self._orders_done = entry.revision
        event = agent.Ordered(
            at_unix_s=now_unix_s, target=order.target, reason=order.reason, why_not=why_not, why_out=why_out
        )
        self._handle(event)

    def _look_at_status(self) -> None:
        """Say that this node is there if it is taken for lost, as soon as the coordinator is reached."""
        if time.monotonic() - self._lost_data_at < SAY_AGAIN_S:
            return  # nobody takes it for lost: it is being said
        if not (self._is_known() or self._stop.is_set() or self._is_entering):
            self._is_entering = True
            threading.Thread(target=self._enter_again, name="unicron-enter", daemon=True).start()

    def _is_known(self) -> bool:
        return status_key(self._me) in self._watch.entries("status")

    def _enter_again(self) -> None:
        try:
            if why := self._node.why_unreached():
                self._say(f"This node was taken for lost, and {why}: it comes back when that is over.")
            while self._node.why_unreached():
                if self._stop.wait(REACHED_S) or self._is_known():
                    return
            self._say("This node was taken for lost: it says that it is there.")
            self._node.enter(RETRY_S, again=True)
        except (StoreError, OSError):
            pass  # the next beat of its lease says it
        finally:
            self._is_entering = False

    def _look_at_job(self) -> None:
        job = self._state.status.job
        keys, known = PlannedJobKeys(job), self._watch.entries("job")
        spec, record = self._parsed(known.get(keys.spec), parse_spec), self._parsed(known.get(keys.phase), parse_phase)
        if spec is not None and record is not None and record.phase in (JobPhase.SUBMITTED, JobPhase.RUNNING):
            told = (keys.rates, keys.measured, keys.spec, keys.phase)
            self._known_job = job, {key: known[key].value for key in told if key in known}
        elif self._child is not None and keys.phase not in known:
            self._tell_again(self._watch.opened(), job)
        if self._child is not None and (output := known.get(keys.output)) is not None:
            self._child.set_output(output.value.decode(errors="replace"))
        seen = agent.JobSeen(
            at_unix_s=time.time(),
            job=job,
            spec=spec,
            phase=None if record is None else record.phase,
            start=0 if record is None else record.start,
            nodes=0 if record is None else record.nodes,
            signal=SIGTERM if record is None else record.signal,
        )
        self._handle(seen)

    def _parsed(self, entry: Entry | None, parse: Callable[[Entry], T]) -> T | None:
        try:
            return None if entry is None else parse(entry)
        except ValueError as error:
            self._say(f"{error}: it is ignored.")
            return None

    def _look_at_round(self) -> None:
        for entry in self._watch.entries("round").values():
            if entry.revision <= self._child_since:
                continue  # it may have this node's place of an earlier time
            try:
                found = parse_round(entry)
            except ValueError:
                continue
            if any(place.host == self._state.status.host for place in found.places):
                if self._child is not None and isinstance(self._child.what, Claim):
                    self._spare.joined(self._child.what)
                self._handle(agent.ChildWorks(at_unix_s=time.time()))

    def _child_ended(self, child: Child) -> None:
        self._child = None
        self._kept_looked_at = 0.0  # its job may be over
        self._watch.unwatch("round")
        if was_recalled := bool(self._recall_key):
            self._node.give_up(self._recall_key)
            self._recall_key = ""
        verdict = ""
        if isinstance(child.what, Claim):
            self._spare.ended(child.what, is_well=child.exit_code == 0)
        else:
            verdict = child.verdict or self._verdict(child.what)
            if not was_recalled:
                self._left[self._state.status.job] = self._state.start, time.monotonic()
        self._handle(
            agent.ChildEnded(
                at_unix_s=time.time(),
                exit_code=child.exit_code,
                verdict=verdict,
                why_failed=child.why_failed,
                why=child.why,
                is_kept_out=bool(self._node.why_kept_out()),
            )
        )

    def _verdict(self, run: str) -> str:
        """How the job has ended, "" if it goes on or that cannot be seen now."""
        try:
            return verdict_on(self._watch.opened(), run)
        except StoreError:
            return ""

    # -- what is done --------------------------------------------------------------------------------------------------

    def _handle(self, event: agent.Event) -> None:
        self._state, commands = handle(self._state, event)
        for command in commands:
            self._do(command)

    def _do(self, command: agent.Command) -> None:
        match command:
            case agent.SayStatus():
                self._idle_since = time.monotonic()
                self._node.say(status_key(self._me), status_text(command.status))
            case agent.WatchJob():
                self._watch.unwatch("job")
                if command.job and not self._state.is_claimed:
                    self._watch.try_to_watch("job", PlannedJobKeys(command.job).prefix)
            case agent.StartChild():
                self._start_child(command)
            case agent.RecallChild():
                assert self._child is not None
                self._recall_key = JobKeys(str(self._child.what)).recalled(self._state.status.host)
                self._node.say(self._recall_key, command.reason)
            case agent.StopChild():
                if self._child is not None:
                    if command.saves_first:
                        self._kept.ask_to_save()
                    self._child.signal(command.signal)
                    if command.signal == SIGKILL:
                        self._say("The job's part of this node did not end in time, and is killed.")
            case agent.EndJob():
                self._pending[command.job] = command
                self._tell_ends()
            case agent.TellPeople():
                self._say(command.reason)
            case agent.TellJob():
                self._say(command.reason)
                self._tell_refusal(PlannedJobKeys(command.job).refused(self._me), command.reason)

    def _start_child(self, command: agent.StartChild) -> None:
        spec, host = command.spec, self._state.status.host
        run = run_of_start(spec.name, command.start)
        output = self._watch.entries("job").get(PlannedJobKeys(spec.name).output)
        try:
            words = child_command(
                spec, start=command.start, nodes=command.nodes, endpoint=self._endpoint, address=self._address
            )
            env = child_environment(spec, host, self._etcd)
            child = Child(run, words, spec.directory, env, on_end=lambda ended: self._inbox.put(_Ended(ended)))
            child.start(
                "" if output is None else output.value.decode(errors="replace"),
                self._node.known_secret(),
                host,
                self._say,
                {**self._metrics_link(), SNAPSHOTS_VARIABLE: self._kept.connect(self._submission(spec.name))},
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._handle(agent.ChildEnded(at_unix_s=time.time(), exit_code=None, why=f"it cannot be started ({error})"))
            return
        self._child = child
        self._watch_round(run)

    def _submission(self, job: str) -> tuple[str, int]:
        """Returns what tells a planned job from an earlier one of its name."""
        record = phase_of(self._watch.entries("job").get(PlannedJobKeys(job).phase))
        return job, 0 if record is None else record.submission

    def _give_up_kept(self) -> None:
        """Drops the snapshots of jobs that are over, or go on elsewhere and further."""
        if time.monotonic() - self._kept_looked_at < KEPT_LOOK_S:
            return
        self._kept_looked_at = time.monotonic()
        for job, number in self._kept.submissions():
            if job == self._state.status.heads_for:
                continue
            try:
                record = phase_of(self._watch.opened().read(PlannedJobKeys(job).phase).entry)
            except StoreError:
                return
            if record is None:
                continue  # a store that has lost its data will be told
            start, left_at = self._left.get(job, (0, 0.0))
            if not may_come_back(record, number, start, time.monotonic() - left_at):
                self._kept.drop((job, number))
                self._left.pop(job, None)

    def _tell_kept(self) -> None:
        runs = self._state.status.job if self._state.has_child else ""
        jobs = tuple(sorted({job for job, _ in self._kept.submissions()} - {runs}))
        if jobs != self._state.status.keeps:
            self._handle(agent.SnapshotsKept(at_unix_s=time.time(), jobs=jobs))

    def _metrics_link(self) -> dict[str, socket.socket]:
        """Where a new child is to tell its metrics, if anywhere. Raises OSError."""
        return {METRICS_VARIABLE: self._child_metrics.connect()} if self.tells_metrics else {}

    def _tell_refusal(self, key: str, reason: str) -> None:
        """Tell a refusal once as long as it holds; an agent that lives long must not say more and more."""
        now = time.monotonic()
        for known, since in list(self._refused.items()):
            if now - since > REFUSED_S and known != key:
                self._node.give_up(known)
                del self._refused[known]
        self._refused[key] = now
        self._node.say(key, reason)

    def _tell_ends(self) -> None:
        """Writes how jobs have ended, as soon as the store can be reached."""
        for job, end in list(self._pending.items()):
            try:
                self._tell_again(self._watch.opened(), job)
                end_job(self._watch.opened(), end)
            except (StoreError, LeaseGoneError):
                return
            del self._pending[job]

    # -- jobs that nobody plans ----------------------------------------------------------------------------------------

    def _help(self) -> None:
        if not self._is_idle or not self._watch.is_clear or time.monotonic() - self._idle_since < SPARE_S:
            return
        self._idle_since = time.monotonic()  # until the next look
        try:
            claim = self._spare.claim(self._watch.opened())
        except StoreError:
            return
        if claim is None:
            return
        self._handle(agent.Claimed(at_unix_s=time.time(), job=claim.run_id))
        if not self._state.is_claimed:
            self._spare.ended(claim, is_well=True)
            return
        try:
            child = Child(
                claim, self._spare.command(claim), claim.spec.cwd, self._spare.environment(claim),
                on_end=lambda ended: self._inbox.put(_Ended(ended)),
            )  # fmt: skip
            child.start("", "", self._state.status.host, self._say, self._metrics_link())
        except (OSError, subprocess.SubprocessError) as error:
            self._spare.ended(claim, is_well=False)
            self._say(f"The job {claim.run_id!r} cannot run here: {error}.")
            self._handle(agent.ChildEnded(at_unix_s=time.time(), exit_code=None, why=f"an error ({error})"))
            return
        self._child = child
        self._watch_round(claim.run_id)

    # -- the store -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        wanted = {"order": order_key(self._me), "status": status_key(self._me)}
        if self._state.status.job and not self._state.is_claimed:
            wanted["job"] = PlannedJobKeys(self._state.status.job).prefix
        if self._child is not None:
            wanted["round"] = JobKeys(_run_of(self._child)).round
        self._watch.open(wanted)

    def _reopen(self, error: StoreError) -> None:
        """After the store has lost its data, or could not be asked."""
        if not self._has_told_trouble:
            self._has_told_trouble = True
            self._say(f"The cluster's store is opened again: {error}.")
        self._watch.close()
        if isinstance(error, StoreReplacedError):
            self._orders_done = self._child_since = 0  # revisions begin anew
            self._has_lost_data, self._lost_data_at = True, time.monotonic()
        try:
            if self._has_lost_data:
                with self._open_store() as store:
                    self._tell_again(store, self._state.status.job)
            self._open()
        except StoreError as again:
            self._watch.close()
            time.sleep(RETRY_S)
            self._inbox.put(Trouble(again))
            return
        self._has_told_trouble = self._has_lost_data = False

    def _tell_again(self, store: Store, job: str) -> None:
        """Tell a store that knows nothing of this node's job, as it lost its data, what it held. Raises StoreError."""
        known, entries = self._known_job
        phase = PlannedJobKeys(job).phase
        if known != job or store.read(phase).entry is not None:
            return
        for key, value in entries.items():
            if store.create(key, value) is not None and key == phase:  # which is the last of them
                self._say(f"The cluster's store knows nothing of the job {job}: it is told again, and the job goes on.")

    def _watch_round(self, run: str) -> None:
        """Those of the child that starts now: what was written before says nothing of it."""
        self._child_since = self._watch.try_to_watch("round", JobKeys(run).round)


def _run_of(child: Child) -> str:
    """The run in the store that it is a part of."""
    return child.what.run_id if isinstance(child.what, Claim) else str(child.what)
