"""One node's recovery machine in simulated time: faults strike its workers, and its commands are carried out.

``recovery.machine.handle`` decides: to connect anew, to go on without a worker and replace it, to isolate the node, and
when to climb from one to the next. Here is what a node's workers and the other nodes of the job do about it, with the
delays of ``durations``. The other nodes are one member of the world: all decisions about a node are made on it, but for
its loss, which a survivor decides about.
"""

from __future__ import annotations

from collections.abc import Sequence

from unicron_elastic.base.world import Member
from unicron_elastic.faults import HangKind, Severity, Status
from unicron_elastic.recovery.commands import (
    AskToLeave,
    ChangeWorld,
    Command,
    FailJob,
    GatherEvidence,
    InviteMember,
    KillWorkers,
    LeaveJob,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    Event,
    EvidenceGathered,
    LeaveAnswered,
    MemberEntered,
    MemberWentOn,
    OtherNodesLost,
    StateFetched,
    TimePassed,
    WorkersHung,
    WorldBroke,
    WorldChanged,
)
from unicron_elastic.recovery.state import Part, Phase, Worker
from unicron_elastic.simulation.live.faults import Strike, Surroundings
from unicron_elastic.simulation.live.shows import Shows, failure_of, shows
from unicron_elastic.simulation.live.workers import Crew
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.regroup import fetch_s, regroup_s
from unicron_elastic.simulation.model.training import Training

OTHERS = Member(name="others", node="others#1", local_rank=0)
GONE = Member(name="gone", node="gone#1", local_rank=0)  # the node whose loss a survivor hears of
# A broken node whose job cannot spare it fails again at each restart. The live system never takes it out by itself
# (recovery/node.py); assumed is an operator who does so after as many restarts.
RESTARTS_UNTIL_DRAINED = 3
_ACTIONS = {"reattempt": Severity.SEV3, "go on": Severity.SEV2, "restart": Severity.SEV2, "isolate": Severity.SEV1}


class Ladder(Crew):
    """The machine of one node in one job, from its first fault on."""

    def __init__(
        self,
        engine: SimulationEngine,
        durations: Durations,
        training: Training,
        around: Surroundings,
        *,
        host: str,
        others: Sequence[Member],
    ) -> None:
        self._strikes: list[Strike] = []
        self._asked: list[ChangeWorld] = []
        self._is_world_planned = False
        self._failed_restarts = 0
        self._behind_until_s = 0.0  # until then survivors compute again what was lost
        self._is_survivor = False  # of another node, whose loss it only hears of
        super().__init__(engine, durations, training, around, host=host, others=others)

    # -- faults ----------------------------------------------------------------------------------------------------

    def strike(self, strike: Strike) -> None:
        """A fault strikes a worker; it is noticed after a while."""
        self.training.stall(strike.entry, "detection", strike.entry)
        self._strikes.append(strike)
        self.after(self._notice_s(strike), lambda: self._show(strike))

    def node_lost(self, strike: Strike) -> None:
        """A survivor's machine hears that the node of ``strike`` is gone."""
        self._is_survivor = True
        self._strikes.append(strike)
        self.feed(OtherNodesLost(at=self.now, nodes=("gone",), reason=strike.entry.reason))

    def abandon(self) -> None:
        """The node is gone, or works for another job now."""
        if self.is_over:
            return
        for strike in self._strikes:
            self.training.resume(strike.entry)
            self.training.mend(strike.entry)
        self.is_over = True

    def _show(self, strike: Strike) -> None:
        worker = self.state.find(strike.local_rank)
        if strike not in self._strikes:
            return
        if self.state.phase is not Phase.RUNNING or worker is None or worker.part is not Part.MEMBER:
            self._cured(strike)  # all begin anew, or it is being replaced for another fault anyway
        elif shows(strike.status) is Shows.BROKEN_WORLD:
            self._breaks(strike, worker)
        else:
            self._fails(strike, worker)

    def _fails(self, strike: Strike, worker: Worker) -> None:
        match shows(strike.status):
            case Shows.EXCEPTION:
                self.raises(worker, strike.status)
            case Shows.BROKEN_WORLD:  # of one that has not joined the others: it says what its own network says
                self.raises(worker, Status.OTHER_NETWORK_ERROR)
            case Shows.HANG:
                stands_s = self._notice_s(strike)
                self.feed(
                    WorkersHung(
                        at=self.now,
                        since=strike.entry.at_s,
                        local_ranks=(worker.local_rank,),
                        reason=f"rank {worker.rank} hangs: no step for {stands_s:.0f} s; it is not at work.",
                        kind=HangKind.AWAITED,
                    )
                )
            case _:
                left = failure_of(strike.status, at=self.now, local_rank=worker.local_rank, pid=worker.pid, step=0)
                self.exits(worker, left.exit_code or 1, why_killed=left.why_killed)

    def _breaks(self, strike: Strike, worker: Worker) -> None:
        failure = failure_of(
            strike.status, at=self.now, local_rank=worker.local_rank, pid=worker.pid, step=self.training.steps
        )
        number = 0 if self.state.world is None else self.state.world.number
        self.feed(WorldBroke(at=self.now, world=number, failure=failure))

    # -- what the machine says -------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Feed the machine as ever; who is missing afterwards is booked."""
        super().feed(event)
        state = self.state
        is_told = bool(self._strikes) and not self._is_survivor and not self.is_over
        if not is_told or state.world is None or state.phase is not Phase.RUNNING:
            return
        missing = sum(worker.part is not Part.MEMBER for worker in state.workers)
        if missing:
            self.training.lack(self._strikes[-1].entry, missing)
            return
        for strike in self._strikes:
            self.training.mend(strike.entry)

    def carry_out(self, command: Command) -> None:
        match command:
            case ChangeWorld():
                self._plan_world(command)
            case RecordIncident():
                self._book(command)
            case WakeAt():
                self.engine.at(command.at, lambda: self.feed(TimePassed(at=self.now)))
            case GatherEvidence():
                self.after(0.0, lambda: self.feed(EvidenceGathered(at=self.now, report=None, stacks=())))
            case KillWorkers() | StopWorkers():
                self._acts()
                for local_rank in command.local_ranks:
                    self.stop(local_rank, -9 if isinstance(command, KillWorkers) else -15)
            case ReplaceWorker():
                self.after(self.durations.process.value, lambda: self._replaced(command))
            case InviteMember():
                fetched = StateFetched(at=self.now, local_rank=command.local_rank, state=self.training.steps)
                self.after(self._fetch_s, lambda: self.feed(fetched))
            case StartWorkers():
                self._acts()
                self._restart(command)
            case AskToLeave():
                self.after(0.0, lambda: self._answer(command))
            case LeaveJob() | FailJob():
                self._leave()
            case _:
                pass

    def _acts(self) -> None:
        """Something is done about it: what was detection is a transition from here on."""
        for strike in self._strikes:
            if self.training.is_stalled(strike.entry):
                self.training.stall(strike.entry, "transition", strike.entry)

    def _book(self, command: RecordIncident) -> None:
        incident = command.incident
        for strike in self._strikes:
            entry = strike.entry
            entry.severity = min(entry.severity, _ACTIONS.get(incident.action, entry.severity))
            entry.reason = f"{incident.reason} {incident.decision}".strip()

    # -- the world -------------------------------------------------------------------------------------------------

    def _plan_world(self, command: ChangeWorld) -> None:
        """Members meet in the next world; who did not stand still does so for that."""
        self._acts()
        self._asked.append(command)
        wait_s = regroup_s(self.training, self.durations)
        if self._is_world_planned:
            return
        self._is_world_planned = True
        if not self.training.stands:
            self.training.stall_for(wait_s, "transition", self._strikes[-1].entry if self._strikes else None)
        self.after(wait_s, self._change_world)

    def _change_world(self) -> None:
        """The members have met: they do what is left of the step, and go on."""
        self._is_world_planned = False
        asked, self._asked = self._asked, []
        world = self.state.world
        if world is None or self.state.phase is not Phase.RUNNING:
            return
        for command in asked:
            world = world.after(
                store="simulated:1",
                reason="",
                lost=command.lost,
                joined=command.joined,
                anew=command.of is not None,
                over=command.over,
                parted=command.parted,
            )
        self.feed(WorldChanged(at=self.now, world=world, generation=self.state.generation))
        number, is_lost = world.number, any(command.lost for command in asked)
        broken = [s for s in self._strikes if shows(s.status) is Shows.BROKEN_WORLD and s.cure < Severity.SEV3]
        if broken and any(command.of is not None for command in asked):
            self.after(self._notice_s(broken[0]), lambda: self._show(broken[0]))
            return
        self._behind_until_s = max(self._behind_until_s, self.now + self._redone_s(is_lost=is_lost))
        self.after(self._behind_until_s - self.now, lambda: self._went_on(number))

    def _went_on(self, number: int) -> None:
        state = self.state
        if state.world is None or state.world.number != number or self._asked:
            return
        for worker in state.workers:
            if worker.part is Part.MEMBER and worker.exit_code is None:
                self.feed(MemberWentOn(at=self.now, local_rank=worker.local_rank, world=number, reused=0, recomputed=0))
        self._go_on()

    def _go_on(self) -> None:
        """Training goes on; strikes are over once nobody is missing."""
        for strike in self._strikes:
            self.training.resume(strike.entry)
        if all(worker.part is Part.MEMBER for worker in self.state.workers):
            self._strikes = []
            self._failed_restarts = 0

    def _redone_s(self, *, is_lost: bool) -> float:
        """What the survivors compute again of the step in progress, or of all since the last checkpoint."""
        if not any(self.training.is_stalled(strike.entry) for strike in self._strikes):
            return 0.0  # it is a newcomer that joins at the end of a step
        training, part = self.training, max((strike.step_part for strike in self._strikes), default=0.0)
        if self.durations.checkpoint_s is not None and is_lost:
            return training.unsaved_s + self._fetch_s
        step_s = training.shape.step_s(training.size)
        if not self.durations.reuses_partial:
            return part * step_s
        lost = min(training.lost_part(), 0.5)
        return part * step_s * lost / (1.0 - lost)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _restart(self, command: StartWorkers) -> None:
        """All workers of this node begin again, with the state of peers or of this host's memory."""
        broken = next((strike for strike in self._strikes if strike.cure is Severity.SEV1), None)

        def started() -> None:
            self.start(command.restarts_used)
            if broken is None:
                self._go_on()
            elif not self._is_drained():
                self._show(broken)

        self.after(self.durations.process.value + self._fetch_s + self._redone_s(is_lost=True), started)

    def _replaced(self, command: ReplaceWorker) -> None:
        worker = self.replace(command.local_rank, command.restarts_used)
        if worker is None:
            return
        broken = [s for s in self._strikes if s.local_rank == worker.local_rank and s.cure is Severity.SEV1]
        if broken and not self._is_drained():
            self._fails(broken[0], worker)
        elif not broken:
            self.feed(MemberEntered(at=self.now, local_rank=command.local_rank))

    def _is_drained(self) -> bool:
        """Fail once more; somebody takes the node out if that happens too often."""
        self._failed_restarts += 1
        if self._failed_restarts >= RESTARTS_UNTIL_DRAINED:
            self._leave()
        return self.is_over

    def _answer(self, asked: AskToLeave) -> None:
        """Whether this node may leave; if so, and it is to go while the others train, these go on without it."""
        why_not = self.around.why_stay()
        self.feed(LeaveAnswered(at=self.now, why_not=why_not))
        members = () if self.state.world is None else self.state.world.members
        here = tuple(member.name for member in members if member.node == self.state.node)
        if asked.is_departure and not why_not and here:
            self._plan_world(ChangeWorld(lost=here, reason=asked.reason))

    def _leave(self) -> None:
        if self.is_over or not self._strikes:
            return
        self.is_over = True
        worst = min(self._strikes, key=lambda strike: strike.cure)
        for strike in self._strikes:
            self.training.mend(strike.entry)
        worst.entry.severity = Severity.SEV1
        self.around.isolate(worst)
        wait_s = regroup_s(self.training, self.durations) + self._redone_s(is_lost=True)
        for entry in [strike.entry for strike in self._strikes]:
            self.engine.after(wait_s, lambda entry=entry: self.training.resume(entry))  # type: ignore[misc]

    def _cured(self, strike: Strike) -> None:
        self.training.resume(strike.entry)
        self.training.mend(strike.entry)
        self._strikes = [each for each in self._strikes if each is not strike]

    def _notice_s(self, strike: Strike) -> float:
        return self.durations.notice_s(strike.method, self.training.shape.step_s(self.training.size))

    @property
    def _fetch_s(self) -> float:
        return fetch_s(self.training.shape, self.training.size, self.durations)
