"""torch's rendezvous on etcd v3: `--rdzv-backend=unicron --rdzv-endpoint=host:port[,host:port]`.

Works under plain torchrun as well, by the entry point `torchrun.handlers`. Who trains together is decided in
``membership``; here it is waited for, and each round gets a store of its own, which its first node hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed import PrefixStore, Store, TCPStore

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.base.text import failed_text, one_line
from unicron_elastic.compat.errors import ChildFailedError, SignalException
from unicron_elastic.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from unicron_elastic.membership.decision import Decision, why_not
from unicron_elastic.membership.round_wait import RoundWait
from unicron_elastic.membership.rounds import (
    BLIND_MARGIN_S,
    Formed,
    JobMember,
    JobView,
    NotYet,
    Place,
    Round,
    Settings,
    nodes_waiting,
    safe_in_s,
)
from unicron_elastic.membership.wait_news import WaitNews
from unicron_elastic.metrics.samples import MetricSample
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.job import rounds
from unicron_elastic.rendezvous.job.agent_process import has_ended, parse_process
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.job.round_watch import RoundListener, RoundWatch
from unicron_elastic.rendezvous.job.rounds import RoundStoreError
from unicron_elastic.rendezvous.records.cluster import UnplannedJobSpec, spec_text
from unicron_elastic.rendezvous.records.job import REASON_CHARACTERS, JobKeys
from unicron_elastic.rendezvous.records.news_writer import NewsWriter
from unicron_elastic.rendezvous.records.plan_keys import VERDICT_VARIABLE, PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import StoreError
from unicron_elastic.rendezvous.store.records import whole_number

BACKEND = "unicron"
STORE_TIMEOUT_S = 30.0  # of a call to a round's store, where everybody is by then
_PROPOSE_S = 0.5  # between two nodes' turns to write the next round, should the first not do it
_FEW = 32  # nodes; more are a crowd, whose changes are waited for a little and looked at together
_CROWD_PER_NODE_S = 0.0005
_CROWD_S = 0.2  # at most
_SAID_S = 0.1  # for what was said to come back by the watch
_REACHED_S = 0.2  # between two looks whether the coordinator is reached again
_HOSTED_KEPT = 2  # of the stores of rounds: that an agent tells where they are
_LOOK_S = 1.0  # although nothing changes, as time is a reason, too


logger = logging.getLogger(__name__)


class RoundWorlds:
    """The worlds of one round, in the cluster's store."""

    def __init__(self, presence: JobPresence, round_number: int) -> None:
        self._presence = presence
        self._number = round_number

    def write(self, place: int, text: str) -> str:
        """Writes a world unless there is one in its place; returns what is there. Raises StoreError."""
        return self._presence.write_world(self._number, place, text)

    def after(self, place: int) -> tuple[int, str] | None:
        """The first world in a later place that has been seen, and which place that is."""
        return self._presence.world_after(self._number, place)


class ClusterRendezvous(JobRendezvous):
    """One agent's part in one job."""

    def __init__(
        self,
        presence: JobPresence,
        node: ClusterNode,
        member: JobMember,
        keys: JobKeys,
        *,
        run_id: str,
        settings: Settings,
        address: str,
        join_timeout_s: float,
        connect_timeout_s: float,
        is_shared: bool = False,
    ) -> None:
        """``address`` is where other nodes find this one; ``is_shared``: what all nodes say comes to one place."""
        self._is_shared = is_shared
        self._presence = presence
        self._node = node
        self._keys = keys
        self._run_id = run_id
        self._settings = settings
        self._address = address
        self._join_timeout_s = join_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._member = member
        self._round: Round | None = None  # in which this node trains
        self._store: Store | None = None
        self._tells_lost = False
        self._hosted: list[str] = []  # keys that tell of the stores of rounds that this agent hosts
        self._has_left = False
        self._before: Round | None = None  # the round before the one that this node waits for, or is in
        self._follows = is_shared  # that one, which is known to be of this very job: somebody was there
        self._has_waited = False  # for a round of a job that was not over then
        self._told_held = ""  # why it is not let in

    @property
    def use_agent_store(self) -> bool:
        """The workers use the store that the round's first agent hosts, or one that the first of them hosts."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    @property
    def is_of_cluster(self) -> bool:
        """Return that it is: it meets over the cluster's store."""
        return True

    @property
    def outlives_stores(self) -> bool:
        """The next round has another store, and another host for it."""
        return True

    @property
    def patience_s(self) -> float:
        """How long workers may have to wait for what all agents must agree on, while the store cannot be seen."""
        return self._settings.blind_patience_s + BLIND_MARGIN_S

    def get_backend(self) -> str:
        """The name on the command line."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other nodes, then opens the round's store.

        Raises RendezvousClosedError if the job is over, RendezvousTimeoutError if too few nodes come in time,
        RendezvousGracefulExitError if this node is wanted elsewhere and has left, and RendezvousConnectionError if
        etcd cannot be used.
        """
        deadline = time.monotonic() + self._join_timeout_s
        while True:
            self._store = self._round = None
            self.hold_joins("")
            found = self._meet(deadline)
            deadline = max(deadline, time.monotonic() + self._connect_timeout_s)
            try:
                opened = self._open_store(found, deadline)
            except RoundStoreError as error:
                logger.warning("The store of round %d cannot be used: %s", found.number, str(error).partition("\n")[0])
                opened = None
            if opened is None:
                continue  # somebody was lost meanwhile
            (self._store, where), self._round = opened, found
            rank = found.rank_of(self._member.node_id)
            assert rank is not None
            return RendezvousInfo(PrefixStore("agents", self._store), rank, len(found.places), where)

    def is_closed(self) -> bool:
        """Whether the job is over, as far as that can be seen."""
        return bool(self._presence.view().closed)

    def set_closed(self) -> None:
        """Ends the job for all nodes."""
        self._presence.close_job(f"The job was closed by {self._member.host}.")

    def watch_nodes(self, listener: RoundListener) -> None:
        """Let the listener hear, from now on and from other threads, what this round's nodes need to know."""
        if self._round is not None:
            watch = RoundWatch(self, self._round, listener)
            self._tells_lost = True
            self._presence.on_change = self._node.on_change = watch.look
            self._node.on_fault = watch.told
            watch.look()

    def hold_joins(self, reason: str) -> None:
        """Tells the nodes that wait to join why they are not let in now; "": nothing holds them up any more."""
        if reason:
            self._presence.say(self._keys.held, reason)
        else:
            self._presence.unsay(self._keys.held)

    def has_ended_well(self) -> bool:
        """Whether the job has ended well since this node was in it, or waited for a place."""
        return self._has_waited and self.is_closed() and self._presence.get(self._keys.failed) is None

    def is_nobody_awaited(self) -> bool:
        """The job is over, or nodes of this round have gone, or wait for another one: they come to no barrier of it."""
        return self.is_closed() or (self._round is not None and bool(self._lost(self._round)))

    @property
    def node_id(self) -> str:
        """What this node is called among those of the job."""
        return self._member.node_id

    def world_log(self) -> RoundWorlds | None:
        """Where the worlds of the present round are written; it outlives the round's store."""
        return None if self._round is None else RoundWorlds(self._presence, self._round.number)

    def tell_fault(self, reason: str) -> bool:
        """Tells the other nodes of the round of a fault here, at once."""
        if self._round is not None:
            self._node.tell_fault(self._round.number, reason)
        return True

    def cluster_samples(self) -> Iterable[MetricSample]:
        """What this agent's metrics say of the cluster. From any thread."""
        return self._node.answers().samples()

    def cluster_secret(self) -> str:
        """What all agents of the cluster know; "" if that has not been seen yet."""
        return self._node.known_secret()

    def offer_job(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], nproc_per_node: int) -> None:
        """Write the job's command line for spare nodes. Raises ValueError for one that is no use to them."""
        settings = self._settings
        spec = UnplannedJobSpec(
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            target_nodes=settings.most,
            nproc_per_node=nproc_per_node,
            argv=tuple(argv),
            cwd=cwd,
            env=env,
        )
        self._presence.offer(self._keys.spec, spec_text(spec))

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return who has met in the present round."""
        return () if self._round is None else tuple(place.node_id for place in self._round.places)

    def keep_measured(self, job: str, merge: Callable[[bytes | None], bytes]) -> bool:
        """Have ``merge`` bring up to date what was measured of a planned job. Whether it did; may take seconds."""
        return self._presence.keep(PlannedJobKeys(job).measured, merge)

    def tell_restarts(self, count: int) -> None:
        """Keep with the job how many restarts count."""
        self._presence.tell_restarts(count)

    def restarts_taken_over(self) -> int:
        """Return the job's count where no node of this round was in the one before, whose loss is a restart, too.

        Who finds only the leavings of a job whose agents were all gone before it came begins a new one, under its id.
        """
        before, now = self._before, self._round
        if before is None or now is None or not self._follows:
            return 0
        gone = {place.node_id for place in before.places}
        if gone & {place.node_id for place in now.places}:
            return 0  # that node counts
        known = whole_number((self._presence.get(self._keys.restarts) or "").encode()) or 0
        return known + bool(self._lost_before(before, now))

    def why_lost_before(self) -> str:
        """Return what is known of nodes that trained with this one and are not in its present round, and not gone well.

        What their loss has done to the workers here may have been seen long before: etcd was away.
        """
        before, now = self._before, self._round
        if before is None or now is None or before.rank_of(self._member.node_id) is None:
            return ""
        return " ".join(self._words_of(self._lost_before(before, now)))

    def _lost_before(self, before: Round, now: Round) -> list[Place]:
        well = self._presence.view().orderly | self._presence.departing().keys()
        return [each for each in before.places if each.node_id not in well and now.rank_of(each.node_id) is None]

    def news_writer(self) -> NewsWriter:
        """Tells who looks at the cluster of this run."""
        return NewsWriter(lambda: self._presence.store, self._run_id)

    def keep_out(self, quarantined: Quarantined) -> str:
        """Puts this node on the cluster's list; why that was not possible, or ""."""
        return self._node.keep_out(quarantined)

    def num_nodes_waiting(self) -> int:
        """For how many nodes it is worth to begin another round: those who wait, and those that are lost.

        The latter only if nobody else is told of them. A blind node begins nothing: what it saw last may be wrong.
        """
        this_round = self._round
        if this_round is None:
            return 0
        return self.nodes_waiting(this_round) or (0 if self._tells_lost else len(self._lost(this_round)))

    def nodes_waiting(self, this_round: Round) -> int:
        """The same without the lost ones, while ``this_round`` is this node's."""
        if self._round is not this_round or why_not(Decision.MEET, self._presence.blind):
            return 0
        view = self._presence.view()
        if view.round is None or view.closed:
            return 0
        if view.round.number > this_round.number:
            return 1  # the others have gone on without this node
        return nodes_waiting(view, self._settings)

    def shutdown(self) -> bool:
        """Leaves, and ends the job if that is why.

        torch's launcher calls this after whatever happened. An error of this node alone must not end the job of all,
        so what is on its way up decides: nothing, or the report of failed workers, is the job's end.
        """
        error = sys.exc_info()[1]
        if not self._has_left and (error is None or isinstance(error, ChildFailedError)):
            if error is None:
                _tell_verdict("well")
                self._presence.close_job(f"It has ended well on {self._member.host}.")
            else:
                _tell_verdict("failed", self.why_failed)
                why = failed_text(self._run_id, self._member.host, self.why_failed)
                self._presence.close_job(why, has_failed=True)
            self._has_left = True
            self._go()
        else:
            self.leave()
        return True

    def leave(self) -> None:
        """Goes without ending the job, whatever comes later: in good order, unless an error is on its way up."""
        self._has_left = True
        error, last = sys.exc_info()[1], self._round or self._presence.view().round
        if self._presence.is_up and last is not None and last.rank_of(self._member.node_id) is not None:
            is_orderly = error is None or isinstance(error, SignalException)
            self._presence.farewell(self._member.node_id, f"{self._member.host} has left.", is_orderly=is_orderly)
        self._go()

    def _go(self) -> None:
        self._store = self._round = None
        self._presence.leave()
        self._node.leave()

    def why_stay(self, nodes: int) -> str:
        """Why the job, of ``nodes`` now, cannot go on without this one; "" if it can."""
        departing = 0 if self._round is None else len(self.nodes_departing(self._round)[0])
        if self._spare(nodes) > departing:
            return ""
        left = nodes - departing - (0 if self._round is None else len(self._gone(self._round)))
        return "it is the only node of the job." if left == 1 else f"the job needs all {left} of its nodes."

    def take_leave(self, nodes: int) -> str:
        """Takes one of the places of this round that the job can spare; why there is none, or "" if there was one."""
        return self._take_leave(self._round, nodes)

    def depart(self, nodes: int, reason: str, have_state: Collection[str] = ()) -> str:
        """Do what ``take_leave`` does, for a node that is well: the others are told of it, and why, at the same time.

        ``have_state``: the nodes that have the training state, of which one has to stay; empty: that does not matter.
        """
        return self._take_leave(self._round, nodes, reason, have_state)

    def _take_leave(self, found: Round | None, nodes: int, reason: str = "", have_state: Collection[str] = ()) -> str:
        if found is None:
            return "it is in no round."
        if why := why_not(Decision.LEAVE, self._presence.blind):
            return why
        departing = (self._member.node_id, reason) if reason else None
        return self._presence.take_leave(found.number, self._spare(nodes, found), departing, have_state)

    def _spare(self, nodes: int, found: Round | None = None) -> int:
        """How many of the ``nodes`` of a round may leave: who waits would take their places, if it has none."""
        found = found or self._round
        places = () if found is None else found.places
        had_place = {place.node_id for place in places}
        others = sum(member.node_id not in had_place for member in self._presence.view().waiting)
        missing = 0 if found is None else len(self._gone(found))
        return nodes + others - missing - self._settings.min_nodes

    # -- how it is done ----------------------------------------------------------------------------------------------

    def _meet(self, deadline: float) -> Round:
        """Says that this node waits, and waits for a round with it."""
        self._join(deadline)
        waiting = RoundWait(self._settings, time.monotonic())
        news = WaitNews(self._settings, time.monotonic(), node_id=self._member.node_id, is_shared=self._is_shared)
        while True:
            changes = self._presence.changes
            view, now = self._presence.view(), time.monotonic()
            self._refuse_if_unwanted(view)
            self._look_back(view)
            self._has_waited = True
            self._tell_why_held()
            self._leave_if_recalled(view)
            if self._presence.why_lost(self._member.node_id):
                self._say_that_it_waits(deadline)  # it was taken for lost
                self._presence.wait(_SAID_S)
                continue
            if self._presence.is_distant:
                self._wait_at_a_distance(view, deadline, changes)
                continue
            mine = next((member for member in view.training if member.node_id == self._member.node_id), None)
            if view.round is not None and view.round.number >= self._member.waits_for:
                if mine is not None:
                    return view.round
                self._join(deadline)  # it has begun without this node: on to the next one
                continue
            decided = waiting.decide(view, now, self._presence.blind, self._presence.unseen_for_s())
            self._tell_who_has_ended(view, decided)
            deadline = max(deadline, now + safe_in_s(decided))
            self._refuse_if_late(deadline)
            pause_s = _LOOK_S
            if view.round is not None and self._presence.unheard(view.round):
                pass  # they may still train
            elif isinstance(decided, Formed):
                turn = next((n for n, each in enumerate(view.waiting) if each.node_id == self._member.node_id), 0)
                wait_s = waiting.unchanged_since + turn * _PROPOSE_S - now
                if wait_s <= 0:
                    self._presence.propose(decided.round, view)
                    pause_s = _PROPOSE_S
                else:
                    pause_s = wait_s
            else:
                pause_s = pause_s if decided.again_in_s is None else min(pause_s, decided.again_in_s)
                if who := "" if self._presence.blind else news.sentence(view, now, decided):
                    logger.warning("%s", one_line(who))
            self._presence.wait(min(pause_s, max(0.0, deadline - now) + 0.01), changes)
            if len(view.members) > _FEW:  # they come in a crowd: one look for many changes
                time.sleep(min(_CROWD_S, _CROWD_PER_NODE_S * len(view.members)))

    def _wait_at_a_distance(self, view: JobView, deadline: float, changes: int) -> None:
        """Wait for the round that those see to who came before; in a crowd not each looks who comes."""
        if view.round is not None and view.round.number >= self._member.waits_for:
            self._presence.look_closely()
            return
        self._refuse_if_late(deadline)
        self._presence.look_from_afar()
        self._presence.wait(_LOOK_S, changes)

    def _refuse_if_late(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError(
                f"no round of the job {self._run_id!r} began within {self._join_timeout_s:g} s"
            )

    def _look_back(self, view: JobView) -> None:
        if view.round is not None and view.round.number < self._member.waits_for:
            self._before = view.round
            self._follows = self._follows or bool(view.training)

    def _tell_who_has_ended(self, view: JobView, decided: Formed | NotYet) -> None:
        """Tells of those who might train unseen, as far as others know, and of whom this host knows better."""
        if not (isinstance(decided, NotYet) and decided.is_for_safety) or self._presence.blind:
            return
        own = parse_process(self._member.process)
        if view.round is None or own is None:
            return
        there = {member.node_id for member in view.members}
        for place in view.round.places:
            told = None if place.node_id in there | view.ended else parse_process(place.process)
            if told is not None and has_ended(told, self._run_id, own):
                self._presence.has_ended(place, f"{place.host} is lost: its process has ended.")

    def why_over(self, this_round: Round) -> str:
        """Why ``this_round`` cannot go on, as a sentence; "": it can, or is over already, or this node is blind."""
        if self._round is not this_round:
            return ""
        if why_not(Decision.TAKE_FOR_LOST, self._presence.blind):
            return self._why_blind_too_long()
        if why := self.why_taken_out(this_round):
            return why
        if failed := self._presence.get(self._keys.failed):
            return f"The job is over: {failed}"
        return " ".join(self._words_of(self._gone(this_round)))

    def _words_of(self, missing: list[Place]) -> list[str]:
        """Return sentences that say why nodes are lost."""
        told = [self._presence.why_lost(place.node_id) for place in missing]
        words = [why for why in told if why]
        if silent := [place.host for place, why in zip(missing, told, strict=True) if not why]:
            are = "is" if len(silent) == 1 else "are"
            words.append(f"{', '.join(silent)} {are} lost: the lease in the cluster's store is gone.")
        return words

    def why_taken_out(self, this_round: Round) -> str:
        """Why the others took this node for lost, as a sentence; "": they did not, or it is blind."""
        if self._round is not this_round or why_not(Decision.TAKE_FOR_LOST, self._presence.blind):
            return ""
        why = self._presence.why_lost(self._member.node_id)
        return f"This node was taken out of the job: {why}" if why else ""

    def nodes_gone(self, this_round: Round) -> tuple[str, ...]:
        """The nodes of a round that are gone, if that is all that is the matter: the others could go on."""
        is_all = (
            self._round is this_round
            and not why_not(Decision.TAKE_FOR_LOST, self._presence.blind)
            and not self._presence.why_lost(self._member.node_id)
            and not self._presence.get(self._keys.failed)
        )
        return tuple(place.node_id for place in self._gone(this_round)) if is_all else ()

    def _why_blind_too_long(self) -> str:
        blind_for_s = time.monotonic() - self._presence.blind_since
        if not why_not(Decision.TRAIN, self._presence.blind, blind_for_s, self._settings.blind_patience_s):
            return ""
        return f"The cluster's store has not been seen for {blind_for_s:.0f} s: others may go on without it now."

    def why_cancelled(self, this_round: Round) -> str:
        """Why an operator ends the job; "": nobody does."""
        why = self._presence.get(self._keys.cancelled) if self._round is this_round else None
        return f"the job {self._run_id!r} was {why}" if why else ""

    def why_recalled(self, this_round: Round) -> tuple[str, str, bool]:
        """Why this node is to leave, "": it is not; why it stays, "": it may leave; whether it is drained."""
        if self._round is not this_round:
            return "", "", False
        drained = self._node.why_drained()
        why = drained or self._why_recalled()
        return why, self.why_stay(len(this_round.places)) if why else "", bool(drained)

    def nodes_departing(self, this_round: Round) -> tuple[tuple[str, ...], str]:
        """The other nodes of a round that are well and leave it, and why."""
        departing = self._presence.departing()
        if self._round is not this_round or not departing:
            return (), ""
        places = (place.node_id for place in this_round.places if place.node_id != self._member.node_id)
        nodes = tuple(node_id for node_id in places if node_id in departing)
        return nodes, " ".join(departing[node_id] for node_id in nodes)

    def _why_recalled(self) -> str:
        why = self._presence.get(self._keys.recalled(self._member.host))
        if why is None:
            return ""
        words = one_line(why, REASON_CHARACTERS).rstrip(".") or "it is wanted elsewhere"
        return f"Node {self._member.host} is recalled: {words}."

    def _leave_if_recalled(self, view: JobView) -> None:
        """Goes if this node is wanted elsewhere, or drained, and a job that has begun can do without it."""
        drained = self._node.why_drained()
        why = "" if self.trains_on else drained or self._why_recalled()
        if not why:
            return
        if self._presence.is_distant:
            self._presence.look_closely()  # it is seen then whether the others wait for it
            return
        if view.round is not None and not self._may_go(view, view.round, why):
            return  # it asks again at each look
        self.leave()
        raise RendezvousClosedError(drained) if drained else RendezvousGracefulExitError(why)

    def _why_refused(self, view: JobView) -> str:
        """Why this node is kept out of all jobs, unless it has a place in this one: then it leaves when it can."""
        has_place = view.round is not None and view.round.rank_of(self._member.node_id) is not None
        return "" if has_place else self._node.why_kept_out()

    def _may_go(self, view: JobView, found: Round, why: str) -> bool:
        """Whether the job can do without this node, which waits; those of round ``found`` are told if it was there."""
        nodes = len(found.places)
        if found.rank_of(self._member.node_id) is None:
            is_awaited = any(member.node_id == self._member.node_id for member in view.waiting)
            return not is_awaited or self._spare(nodes, found) > 0
        return not self._take_leave(found, nodes, why)

    def _lost(self, this_round: Round) -> list[Place]:
        """Nodes that have left the round; nobody, if the store has gone on to another one."""
        return self._heard_of(this_round, self._presence.view().lost)

    def _gone(self, this_round: Round) -> list[Place]:
        """Those of them that do not wait for another round, and have not said before that they would leave."""
        departing = self._presence.departing()
        return self._heard_of(this_round, (p for p in self._presence.view().gone if p.node_id not in departing))

    def _heard_of(self, this_round: Round, places: Iterable[Place]) -> list[Place]:
        now = self._presence.view().round
        if now is None or now.number != this_round.number:
            return []
        unheard = self._presence.unheard(this_round)
        return [place for place in places if place not in unheard]

    def _join(self, deadline: float) -> None:
        """Says for which round this node waits: the one after the present one, and after all that it was in."""
        # The first time a store that cannot be reached is told soon; later it is waited for.
        timeout_s = self._connect_timeout_s if self._member.waits_for == 0 else deadline - time.monotonic()
        try:
            self._node.enter(timeout_s)
            if why := self._why_refused(self._presence.view()):
                raise RendezvousClosedError(why)
            if not self._presence.is_up:
                self._presence.enter(timeout_s)
        except (StoreError, OSError) as error:
            raise RendezvousConnectionError(f"the job {self._run_id!r} cannot be joined: {error}") from error
        self._leave_if_recalled(self._presence.view())  # before others hear that it waits
        view = self._presence.view()
        number = 0 if view.round is None else view.round.number
        self._member = replace(self._member, waits_for=max(number, self._member.waits_for) + 1)
        self._look_back(view)  # once the others see this node, they may go at any time
        self._say_that_it_waits(deadline)

    def _say_that_it_waits(self, deadline: float) -> None:
        why_lost = self._presence.why_lost(self._member.node_id)
        if why_lost:
            self._wait_until_reached(deadline, why_lost)
        timeout_s = max(self._connect_timeout_s, deadline - time.monotonic())
        try:
            if why_lost:
                self._node.enter(timeout_s, again=True)
            self._presence.join(self._member, timeout_s)
        except (StoreError, OSError) as error:
            raise RendezvousConnectionError(f"the job {self._run_id!r} cannot be joined: {error}") from error

    def _wait_until_reached(self, deadline: float, why_lost: str) -> None:
        """Keeps a node that was put out away from the job while it has no connection to the coordinator.

        It sees the store, so it could join: a round with it would never begin, and hold up those who reach each other.
        Raises RendezvousTimeoutError.
        """
        if not (why := self._node.why_unreached()):
            return
        logger.warning("This node waits until the others can be reached: %s. It was put out: %s", why, why_lost)
        while why := self._node.why_unreached():
            self._refuse_if_unwanted(self._presence.view())
            if time.monotonic() > deadline:
                said = f"this node was put out of the job {self._run_id!r}, and could not come back"
                raise RendezvousTimeoutError(f"{said} within {self._join_timeout_s:g} s: {why}. {why_lost}")
            self._presence.wait(_REACHED_S)
        logger.warning("The others can be reached again: this node joins them.")

    def _tell_why_held(self) -> None:
        why = self._presence.get(self._keys.held) or ""
        if why and why != self._told_held:
            logger.warning("This node has to wait. %s", one_line(why, REASON_CHARACTERS))
        self._told_held = why

    def _refuse_if_unwanted(self, view: JobView) -> None:
        if view.closed:
            raise RendezvousClosedError(f"the job {self._run_id!r} is over: {view.closed}")
        if cancelled := self._presence.get(self._keys.cancelled):
            raise RendezvousClosedError(f"the job {self._run_id!r} was {cancelled}")
        if why := self._why_refused(view):
            raise RendezvousClosedError(why)

    def _open_store(self, found: Round, deadline: float) -> tuple[TCPStore, RendezvousStoreInfo] | None:
        """The round's store and where the workers' is, once all have come; None if one of them is lost before."""
        key = self._keys.store(found.number)
        if found.places[0].node_id == self._member.node_id:
            store = rounds.host(self._address, STORE_TIMEOUT_S)
            self._presence.say(key, f"{self._address}:{store.port}")
            self._hosted.append(key)
            while len(self._hosted) > _HOSTED_KEPT:  # nobody comes to those rounds any more, and a job may live long
                self._presence.unsay(self._hosted.pop(0))
            where = RendezvousStoreInfo(self._address, store.port)
        else:
            changes = self._presence.changes
            while (address := self._presence.get(key)) is None:
                if self._is_off(found) or time.monotonic() > deadline:
                    return None
                self._presence.wait(_LOOK_S, changes)
                changes = self._presence.changes
            try:
                store, host, port = rounds.visit(address, STORE_TIMEOUT_S)
            except ValueError as error:
                raise RendezvousConnectionError(f"{key} {error}") from None
            where = RendezvousStoreInfo(host, port)
        if not rounds.arrive(store, len(found.places), lambda: self._is_off(found)):
            return None
        if not self.use_agent_store:
            rank = found.rank_of(self._member.node_id)
            assert rank is not None
            where = rounds.place_for_workers(store, rank, self._address)
        return store, where

    def _is_off(self, found: Round) -> bool:
        """Whether a round cannot begin any more: somebody is lost on the way to it, or gave it up."""
        view = self._presence.view()
        if self._presence.blind:
            return False
        return view.round is None or view.round != found or bool(view.lost) or bool(view.closed)


def _tell_verdict(word: str, why: str = "") -> None:
    """Tell the agent that runs this one for a planned job, if one does."""
    path = os.environ.get(VERDICT_VARIABLE)
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(f"{word} {one_line(why)}".rstrip())
