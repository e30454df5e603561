"""One node of a simulated job: the real decisions, and an imitation of what carries them out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from random_cluster_store import CLOSED, FAILED, ROUND
from random_cluster_watch import POLL_S, Watching

from unicron_elastic.base.incident import Incident
from unicron_elastic.faults import Failure, HangKind, Severity, Status
from unicron_elastic.membership.rounds import Round
from unicron_elastic.recovery import commands, events, machine
from unicron_elastic.recovery.state import JobState, Phase

if TYPE_CHECKING:
    from random_cluster import Cluster

__all__ = ["Node"]

EXIT_BARRIER_S = 300.0
GLOO_CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44696"
SIGKILL, SIGTERM = -9, -15


class Node(Watching):
    """One agent: what launcher/agent/core/agent.py does on one host."""

    def __init__(self, cluster: Cluster, node_id: str, host: str) -> None:
        super().__init__(cluster, node_id, host)
        self.state = JobState(policy=cluster.policy, run_id="job", job="train.py", host=host)
        self.ended = ""  # how
        self.most_restarts = 0  # that it may have counted when it last began to regroup
        self.pending: list[events.Event] = []
        self.is_handling = False
        self.running: dict[int, int] = {}  # pid of each local rank
        self.deaf: set[int] = set()  # local ranks that hear no SIGTERM
        self.closed: dict[int, Incident] = {}

    # -- a generation ----------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.state.generation

    @property
    def has_workers(self) -> bool:
        return bool(self.running)

    @property
    def all_run(self) -> bool:
        return self.state.phase is Phase.RUNNING and len(self.running) == len(self.state.workers) and not self.deaf

    def start_workers(self, restarts: int) -> None:
        if not self.is_up or self.round is None:
            return
        cluster, size = self.cluster, len(self.round.places)
        generation, rank = self.state.generation + 1, self.round.rank_of(self.id) or 0
        self.check_restarts(self.round, restarts)
        local_ranks = range(cluster.workers)
        self.running = {local: 1000 * generation + local for local in local_ranks}
        started = tuple(
            events.StartedWorker(local_rank=local, rank=rank * cluster.workers + local, pid=self.running[local])
            for local in local_ranks
        )
        why_stay = "it is the only node of the job." if size == 1 else self.why_stay(self.round)
        self.mode = ""
        cluster.say(self.id, f"runs round {self.round.number}, {restarts} restarts used")
        self._feed(events.WorkersStarted(at=cluster.now, restarts_used=restarts, workers=started, why_stay=why_stay))
        cluster.check_steps(self.round)
        self.watch()
        self._drain()

    def steps(self, number: int) -> None:
        """The first step of a round is done here."""
        if self.is_up and not self.mode and self.round is not None and self.round.number == number and self.all_run:
            for local in self.running:
                self.post(events.FirstStepDone(at=0.0, local_rank=local, generation=self.state.generation))

    # -- events and commands ---------------------------------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """As the agent's loop: while it meets the others it hears nothing, and later all."""
        if self.is_up:
            self.pending.append(replace(event, at=self.cluster.now))
            self._drain()

    def _drain(self) -> None:
        if self.is_handling:
            return
        self.is_handling = True
        while self.pending and not self.mode and self.is_up:
            self._feed(self.pending.pop(0))
        self.is_handling = False

    def _feed(self, event: events.Event) -> None:
        before = self.state
        self.state, todo = machine.handle(before, event)
        try:
            self.state.validate()
        except AssertionError as error:
            self.cluster.fail(self.id, f"{type(event).__name__} breaks the state: {error}")
        for command in todo:
            self._do(command)

    def _do(self, command: commands.Command) -> None:
        if not isinstance(command, commands.WakeAt | commands.RecordIncident):
            self.check_reason(command.reason)
            self.cluster.say(self.id, f"{type(command).__name__}: {command.reason}")
        match command:
            case commands.StopWorkers() | commands.KillWorkers():
                self._end_workers(command)
            case commands.GatherEvidence():
                found = events.EvidenceGathered(at=0.0, report=None, stacks=(), generation=self.state.generation)
                self.cluster.after(0.1, 4.0, self.post, found)
            case commands.TellPeers():
                self._tell_peers(command.reason)
            case commands.WakeAt():
                self.cluster.at(command.at, self.post, events.TimePassed(at=0.0))
            case commands.RecordIncident():
                self.check_incident(command.incident)
            case commands.AskToLeave():
                self.post(events.LeaveAnswered(at=0.0, why_not=self._take_leave(is_departure=command.is_departure)))
            case _:
                self._end_generation(command)

    def _end_workers(self, command: commands.StopWorkers | commands.KillWorkers) -> None:
        for local in command.local_ranks:
            pid = self.running.get(local)
            if isinstance(command, commands.KillWorkers):
                self.cluster.after(0.001, 0.1, self.worker_ends, local, pid, SIGKILL)
            elif local not in self.deaf and self.chance.random() > 0.02:
                code = self.chance.choice((SIGTERM, SIGTERM, SIGTERM, 0, 1, 143))
                slow = 5.0 if self.chance.random() < 0.1 else 0.3
                self.cluster.after(0.01, slow, self.worker_ends, local, pid, code)

    def _end_generation(self, command: commands.Command) -> None:
        match command:
            case commands.StartWorkers():
                self.unwatch()
                self.most_restarts = self.cluster.most_restarts()
                self.deaf.clear()
                self.begin(command.restarts_used)
            case commands.FinishJob():
                self._wait_to_exit()
            case commands.FailJob():
                self._close_job(has_failed=True)
                self.end("FailJob")
            case commands.LeaveJob():
                if self.cluster.executor.closes_on_leaving:
                    self._close_job(has_failed=True)
                self.bid_farewell()
                self.end("LeaveJob")
            case commands.DepartWell():
                self.bid_farewell()
                self.end("DepartWell")

    def _tell_peers(self, reason: str) -> None:
        assert self.round is not None
        store, number = self.cluster.round_stores[self.round.number], self.round.number
        others = [node for node in self.cluster.of_round(number) if node is not self]
        if store.is_up:
            store.news = store.news or reason
            for node in others:
                late_s = 3.0 if self.chance.random() < 0.05 else POLL_S + 0.01
                self.cluster.after(0.0, late_s, node.hear_news, number)
        if not self.is_cut and self.chance.random() < 0.5:  # there is a coordinator
            for node in others:
                if not node.is_cut:
                    self.cluster.after(0.0, 0.01, node.hear_fault, number, reason)

    def _take_leave(self, *, is_departure: bool) -> str:
        assert self.round is not None
        if not is_departure:
            self.cluster.faults += 1  # a broken node that has to stay for now leaves later, which is another restart
            if (
                why_not := "it is the only node of the job."
                if len(self.round.places) == 1
                else self.why_stay(self.round)
            ):
                return why_not
        return self.take_leave(self.round, is_departure=is_departure)

    def _close_job(self, *, has_failed: bool) -> None:
        if self.sees:
            said = (f"It {'has failed' if has_failed else 'has ended well'} on {self.host}.", None)
            self.etcd.commit({}, {CLOSED: said, FAILED: said} if has_failed else {CLOSED: said}, [ROUND])

    def _wait_to_exit(self) -> None:
        assert self.round is not None
        self.mode = "exits"
        self.unwatch()
        store = self.cluster.round_stores[self.round.number]
        store.done.add(self.id)
        if len(store.done) == store.size:
            for node in [*self.cluster.alive]:
                if node.mode == "exits" and node.round == self.round:
                    self.cluster.after(0.0, 0.1, node.exit)
        elif not store.is_up:
            self.exit()
        self.cluster.at(self.cluster.now + EXIT_BARRIER_S, self.exit)

    def exit(self) -> None:
        if self.is_up:
            self._close_job(has_failed=False)
            self.end("FinishJob")

    def end(self, how: str) -> None:
        """The agent ends, and with it its workers; it takes back what it has said, if it can."""
        self.cluster.say(self.id, f"ends: {how}")
        self.ended, self.is_up = how, False
        if self.round is not None:
            self.close_round_store()
        had_workers, self.running = bool(self.running), {}
        if had_workers and self.round is not None:
            self._break_collectives(self.round.number)
        if self.lease is not None and self.sees:
            self.etcd.revoke(self.lease)
        elif self.lease is not None:
            self.lose_sight()
        self.check_end(how)

    # -- faults ----------------------------------------------------------------------------------------------------

    def die(self, *, is_silent: bool) -> None:
        """The agent is killed, or the host loses power; its lease runs out later, if the coordinator is not faster."""
        if not self.is_up:
            return
        self.cluster.say(self.id, "dies")
        self.lose_sight()
        self.ended, self.is_up = "died", False
        had_workers, self.running = bool(self.running), {}
        if self.chance.random() < 0.5:
            reason, at = f"{self.host} is lost.", self.cluster.now + (1.5 if is_silent else 0.05)
            self.cluster.at(at, self._is_missed, reason, not is_silent)
        if self.round is not None:
            self.close_round_store(is_silent=is_silent)
            if had_workers and not is_silent:
                self._break_collectives(self.round.number)

    def _is_missed(self, reason: str, has_ended: bool) -> None:
        if any(node.sees for node in self.cluster.alive):
            self.etcd.remove(self.id, reason, has_ended=has_ended)

    def is_removed(self) -> None:
        """The coordinator takes it for lost although it lives, as it does not answer for a while."""
        if self.is_up:
            self._is_missed(f"{self.host} is lost.", False)

    def is_told_to_end(self) -> None:
        """A signal: the agent stops its workers and leaves the job to the others."""
        if self.is_up:
            if not self.mode:
                self.bid_farewell()
            self.end("signal")

    def worker_ends(self, local: int, pid: int | None, code: int, step: int | None = None) -> None:
        if not self.is_up or pid is None or self.running.get(local) != pid:
            return
        del self.running[local]
        self.deaf.discard(local)
        number, now = (0 if self.round is None else self.round.number), self.cluster.now
        event = events.WorkerExited(
            at=now, ended_at=now, local_rank=local, exit_code=code, step=step, generation=self.state.generation
        )
        self.post(event)
        if code != 0:
            self._break_collectives(number)

    def _break_collectives(self, number: int) -> None:
        """Who waits for this node's workers in a collective may get an error, or go on waiting."""
        for node in self.cluster.of_round(number):
            for local, pid in node.running.items():
                if node is not self and self.chance.random() < 0.5:
                    # A node may only see that a peer is gone, and not that this was for a newcomer.
                    is_regrouping = self.is_up and not self.state.counts_as_restart
                    self.cluster.faults += is_regrouping and not self.cluster.executor.newcomers_are_free
                    self.cluster.after(0.005, 0.5, node.worker_raises, local, pid, GLOO_CLOSED)

    def worker_raises(self, local: int, pid: int, message: str) -> None:
        if not self.is_up or self.running.get(local) != pid or local in self.deaf:
            return
        now, worker = self.cluster.now, self.state.find(local, pid)
        failure = Failure(
            at=now,
            rank=0 if worker is None else worker.rank,
            local_rank=local,
            pid=pid,
            exception_type="RuntimeError",
            message=message,
            location="train.py:88 in step",
        )
        self.post(events.WorkerRaised(at=now, failure=failure))
        self.cluster.after(0.01, 0.5, self.worker_ends, local, pid, 1)

    def worker_hangs(self, local: int) -> None:
        if not self.is_up or self.mode or local not in self.running:
            return
        self.deaf.add(local)
        event = events.WorkersHung(
            at=0.0,
            since=self.cluster.now,
            local_ranks=(local,),
            reason="rank 0 hangs: it is stopped.",
            kind=HangKind.STOPPED,
            generation=self.state.generation,
        )
        self.cluster.after(0.1, 2.0, self.post, event)

    def sickens(self) -> None:
        """A probe finds its GPU broken."""
        found = events.NodeUnhealthy(
            at=0.0, status=Status.GPU_DRIVER_ERROR, severity=Severity.SEV1, reason="GPU 3 has fallen off the bus."
        )
        self.post(found)

    # -- invariants ------------------------------------------------------------------------------------------------

    def check_reason(self, reason: str) -> None:
        if not reason.strip() or not reason.endswith(".") or "\n" in reason:
            self.cluster.fail(self.id, f"a decision has no sentence for its reason: {reason!r}.")

    def check_restarts(self, found: Round, restarts: int) -> None:
        """A round counts one restart more than any before, or none more, and none if no fault came since.

        Than any: agents who know of no restart may train alone for a while, and then meet one again who does. What an
        agent may have counted when it began to regroup it may still bring to a later round.
        """
        cluster, before = self.cluster, self.state.restarts_used
        if not before <= restarts <= cluster.policy.max_restarts:
            cluster.fail(self.id, f"counts {restarts} restarts after {before}, of {cluster.policy.max_restarts}.")
        places = {place.node_id for place in found.places}
        carried = (node.most_restarts for node in cluster.alive if node.id in places)
        most = max(cluster.most_restarts(found.number), *carried)
        if cluster.counts.get(found.number, restarts) != restarts:
            cluster.fail(self.id, f"counts {restarts} restarts, and others of the round do not.")
        if found.number not in cluster.counts and restarts > most:
            cluster.fail(self.id, f"counts {restarts} restarts, and {most} at most were for faults.")
        cluster.counts[found.number] = restarts

    def check_incident(self, incident: Incident) -> None:
        """Nothing is said of an incident that is over."""
        if incident.number in self.closed:
            self.cluster.fail(self.id, f"incident {incident.number} is told again after its end: {incident.reason}")
        is_decided = incident.action in ("fail", "isolate")
        if is_decided or incident.first_step_at is not None or incident.superseded_by is not None:
            self.closed[incident.number] = incident
        if incident.action:
            self.check_reason(incident.decision)

    def check_end(self, how: str) -> None:
        """No agent ends for what is not its own fault, nor the job's end, and only that closes a job."""
        ends = {node.ended for node in self.cluster.nodes}
        if how.startswith("closed: ") and not ends & {"FinishJob", "FailJob"}:
            self.cluster.fail(self.id, "the job is closed, and has neither finished nor failed.")
        self.cluster.faults += how == "cannot join"
        own = how in (
            "FinishJob",
            "FailJob",
            "LeaveJob",
            "DepartWell",
            "recalled",
            "cannot join",
            "signal",
        ) or how.startswith("closed: ")
        if not own:
            self.cluster.fail(self.id, f"its agent ends, and need not: {how}.")
