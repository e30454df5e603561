"""An agent's presence in its job: its member key, the job's own lease, and what all of them say of the job."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection

from unicron_elastic.base.seldom import Seldom
from unicron_elastic.base.text import one_line
from unicron_elastic.membership.rounds import JobMember, JobView, Place, Round, may_train_unseen
from unicron_elastic.rendezvous.records.job import (
    JobKeys,
    JobMirror,
    departing_text,
    lost_text,
    member_text,
    parse_departing,
    parse_round,
    round_text,
)
from unicron_elastic.rendezvous.store.interface import (
    MAX_OPERATIONS,
    Change,
    Deliver,
    Entry,
    LeaseGoneError,
    Put,
    Snapshot,
    Store,
    StoreError,
    StoreRefusedError,
    Watch,
    Write,
)
from unicron_elastic.rendezvous.store.records import whole_number
from unicron_elastic.rendezvous.store.session import Presence

JOB_LEASE_S = 60.0  # so long a job's own keys outlive all who may train by them
_KEPT_ALIVE_S = JOB_LEASE_S / 3
_LEASE_MAX_S = 86_400.0
_LAST_MOST = 32  # agents that may be the last to leave: of a crowd not each looks whether it is
CROWD = 16  # agents see to it that a round forms: who comes behind them hears of it, and not of each of the others
_WORTH_IT = 4  # times as many nodes: with fewer, to look twice costs what not to hear of each saves
_DISTANT_LOOK_S, _FOR_EACH_NODE_S = 2.0, 0.01  # between two looks of those at all the rest
CLOSED_FOR_S = 600.0  # so long it is known that a job is over
FAREWELL_S = 600.0  # so long it is known why an agent has left
_COUNT_TIMEOUT_S = 1.0  # workers are about to begin, and wait for it
_LEASE_ATTEMPTS = 3  # to hold the job's own lease, before a pause
_DELETED_AT_ONCE = MAX_OPERATIONS - 2  # with what is written
WORLDS_KEPT = 8  # of a round: who is further behind sees the oldest of these next

logger = logging.getLogger(__name__)


class JobPresence(Presence[JobMirror]):
    """From ``join`` to ``leave``. Safe from any thread; no method but ``join`` raises a StoreError."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        keys: JobKeys,
        lease_ttl_s: float,
        blind_for_s: float = 610.0,
        *,
        nodes: int = 1,
        crowd: int = CROWD,
    ) -> None:
        """``open_store`` opens another object for the same store each time.

        ``blind_for_s``: so long an agent that cannot see the store may train. The job's keys stay longer than that, so
        that nobody begins a first round beside it. ``nodes``: that are expected; ``crowd``: of which so many see to it
        that a round forms.
        """
        super().__init__(open_store, keys.prefix, lambda snapshot: JobMirror(keys, snapshot), lease_ttl_s)
        self._keys = keys
        self._job_lease_id: int | None = None
        self._job_lease_due_at = 0.0  # when it should be kept alive again: it is long, and all agents do that
        self._blind_for_s = blind_for_s
        self._kept_at: float | None = None  # when that was last done, if nobody of the round is there to do it
        self._job_texts: dict[str, bytes] = {}  # what is the job's own and any of its agents may say
        self._restarts: bytes | None = None  # how many count, if this agent has told it
        self._has_counted = False  # which is to be told
        self._round: Round | None = None  # the latest that was seen, to be said again to a store that forgot it
        self._refused = Seldom()  # rounds that the store does not take
        self._members = keys.member("")  # with which the keys of all agents begin
        self._nodes = nodes
        self._look_every_s = _DISTANT_LOOK_S + _FOR_EACH_NODE_S * nodes
        self._crowd = crowd
        self._member_key = ""  # of this agent
        self._waits = True  # for a round that others may see to
        self._look_at = 0.0  # when it looks whether they are still there
        self._has_read_all = True
        self.is_distant = False  # and hears of the round at once, of its agents nothing, and of the rest now and then

    def join(self, member: JobMember, timeout_s: float) -> None:
        """Becomes a member, or says what has changed of it. Raises StoreError if the store does not let it in in time.

        An unreachable store is waited for. In a crowd it hears no more of the others until ``look_closely``.
        """
        self._member_key, self._waits = self._keys.member(member.node_id), True
        is_up_close = self._store is not None and not self.is_distant
        if is_up_close and self._may_be_crowd and len(self.view().members) > self._crowd:
            self._look_anew()
        self._said[self._member_key] = member_text(member)
        if self.get(self._keys.lost(member.node_id)) is not None and self._store is not None:
            with contextlib.suppress(StoreError):
                self._store.delete(self._keys.lost(member.node_id))
        self.enter(timeout_s)

    def look_closely(self) -> None:
        """Hear of each of the job's agents from now on."""
        self._waits = False
        if self.is_distant:
            self._look_anew()

    def look_from_afar(self) -> None:
        """Look, when it is time, at what is not told at once; if few are there that came before, look closely from now.

        Somebody has to see to it that a round forms.
        """
        store, now = self._store, time.monotonic()
        if store is None or now < self._look_at:
            return
        self._look_at = now + self._look_every_s
        try:
            came_at = self._own_arrival()
            if store.count(self._members, most=self._crowd, created_before=came_at) >= self._crowd:
                self._take_all(store.read_prefix(self._keys.prefix, without=self._members))
            else:
                self.look_closely()
        except StoreError as error:
            logger.debug("It is not known who came before this agent: %s.", error)

    def _take_all(self, seen: Snapshot) -> None:
        """Take over what was read from afar, unless the watch has told of a later round."""
        with self._changed:
            mirror = self._mirror if self.is_distant else None  # another thread may have looked closely
            if mirror is not None and mirror.revision(self._keys.round) <= seen.revision:
                self._mirror = self._make_mirror(seen)
                self.changes += 1
                self._changed.notify_all()

    def _own_arrival(self) -> int:
        """Return the revision at which this agent came; 0 if it is not there. Raises StoreError."""
        store = self._store
        entry = None if store is None else store.read(self._member_key).entry
        return 0 if entry is None else entry.created

    def offer(self, key: str, text: bytes) -> None:
        """Have the next ``join`` write a key of the job's own, unless it is there."""
        self._job_texts[key] = text

    def tell_restarts(self, count: int) -> None:
        """Writes how many restarts of the job count, now or when the store can be reached."""
        if self._restarts is None and not count and self.get(self._keys.restarts) is None:
            return  # it is what everybody takes it for
        self._restarts, self._has_counted = b"%d" % count, True
        try:
            if self._store is not None and not self.blind:
                self._say_restarts(self._store)
        except (StoreError, LeaseGoneError) as error:
            logger.debug("The count of restarts could not be told: %s.", error)
        self._is_unsaid = self._is_unsaid or self._has_counted  # the next beat says it

    def _say_restarts(self, store: Store) -> None:
        text, lease_id = self._restarts, self._job_lease_id
        if text is not None and lease_id is not None:
            store.put(self._keys.restarts, text, lease_id, timeout_s=_COUNT_TIMEOUT_S)
            self._has_counted = text != self._restarts

    def why_lost(self, node_id: str) -> str:
        """Why an agent was removed from the job, or left it; "": it was not."""
        with self._changed:
            return "" if self._mirror is None else self._mirror.why_lost(node_id)

    def departing(self) -> dict[str, str]:
        """{node: why} of the agents that are well and about to leave, or have left so."""
        with self._changed:
            return {} if self._mirror is None else self._mirror.departing()

    def farewell(self, node_id: str, reason: str, *, is_orderly: bool) -> None:
        """Tells the others why this agent goes; its workers have ended. ``is_orderly``: no error makes it go."""
        with contextlib.suppress(StoreError, LeaseGoneError):
            if self._store is not None:
                lease_id = self._store.grant(FAREWELL_S).lease_id
                text = lost_text(node_id, reason, has_ended=True, is_orderly=is_orderly)
                self._store.put(self._keys.lost(node_id), text, lease_id)

    def has_ended(self, place: Place, reason: str) -> None:
        """Tells the others that an agent, and its workers, are no more, which is certain."""
        with contextlib.suppress(StoreError, LeaseGoneError):
            if self._store is not None:
                lease_id = self._store.grant(FAREWELL_S).lease_id
                put = Put(self._keys.lost(place.node_id), lost_text(place.node_id, reason, has_ended=True), lease_id)
                self._store.commit({self._keys.member(place.node_id): 0}, [put])

    def view(self) -> JobView:
        """The job as it was when last seen."""
        with self._changed:
            found = JobView() if self._mirror is None else self._mirror.view()
            if found.round is not None:
                self._round = found.round
            return found

    def unseen_for_s(self) -> float:
        """For how long at least nobody of the present round has been seen in the store, if they may train unseen."""
        kept_at = self._kept_at
        return 0.0 if kept_at is None else max(0.0, time.monotonic() - kept_at - _KEPT_ALIVE_S - self._ttl_s)

    def unheard(self, found: Round) -> list[Place]:
        """Those of a round who are missing, and may be for want of time to tell of themselves."""
        with self._changed:
            if not self.is_told_again:
                return []
            known = {member.node_id for member in self.view().members}
            return [p for p in found.places if p.node_id not in known and not self.why_lost(p.node_id)]

    def propose(self, found: Round, seen: JobView) -> bool:
        """Writes the round that follows what was ``seen``, unless somebody was faster or the job is over.

        Whether it surely was written. What was said by nodes that departed from rounds before goes with that: a job may
        live long.
        """
        store = self._store
        if store is None:
            return False
        guards = {self._keys.round: seen.round_revision, self._keys.closed: 0}
        rounds = [found] if seen.round is None else [seen.round, found]
        with self._changed:
            over = [] if self._mirror is None else self._mirror.departed(rounds)[:_DELETED_AT_ONCE]
        try:
            put = Put(self._keys.round, round_text(found), self._job_lease_id)
            return store.commit(guards, [put], over) is not None
        except (StoreRefusedError, ValueError) as error:  # as it is too large
            if line := self._refused.line(f"A round of {len(found.places)} nodes cannot be written: {error}."):
                logger.warning("%s", one_line(line))
            return False
        except (StoreError, LeaseGoneError):
            return False

    def write_world(self, round_number: int, place: int, text: str) -> str:
        """Writes a world of a round unless there is one in its place; returns what is there. Raises StoreError.

        The worlds of rounds before the last one go with that, and those of this one but the latest: nobody reads them
        any more, and a job may live long. Each write tells which place is the latest, so that nobody who is far behind
        writes in a place whose world has gone.
        """
        store = self._store
        if store is None:
            raise StoreError("the cluster's store is not open")
        with self._changed:
            over = [] if self._mirror is None else self._mirror.worlds_before(round_number, place - WORLDS_KEPT + 1)
        key, latest = self._keys.world(round_number, place), self._keys.latest_world(round_number)
        puts = [Put(each, value, self._job_lease_id) for each, value in ((key, text.encode()), (latest, b"%d" % place))]
        write = Write(puts=tuple(puts), deletes=tuple(over[:_DELETED_AT_ONCE]))

        def unless_later(seen: Entry | None) -> Write | None:  # the next write mends what is no number
            return None if seen is not None and (whole_number(seen.value) or 0) >= place else write

        try:
            return text if store.update(latest, unless_later) else _what_stands(store, key)
        except LeaseGoneError as error:
            raise StoreError(f"the job's lease has run out: {error}") from None

    def world_after(self, round_number: int, place: int) -> tuple[int, str] | None:
        """The first world of a round in a later place that has been seen, and which place that is."""
        with self._changed:
            found = None if self._mirror is None else self._mirror.world_after(round_number, place)
        return None if found is None else (found[0], found[1].value.decode(errors="replace"))

    @property
    def store(self) -> Store | None:
        """The open one; None, if there is none at the moment."""
        return self._store

    def keep(self, key: str, merge: Callable[[bytes | None], bytes]) -> bool:
        """Writes what ``merge`` makes of what a key holds, None for nothing; it outlives the job. Whether it was done.

        Who writes at the same moment is merged with. A key that is to go at some time, as its job is over, still does.
        """

        def merged(entry: Entry | None) -> Write:
            text = merge(None if entry is None else entry.value)
            return Write(puts=(Put(key, text, None if entry is None else entry.lease_id),))

        store = self._store
        try:
            return store is not None and store.update(key, merged)
        except (StoreError, LeaseGoneError) as error:
            logger.debug("%s could not be written: %s.", key, error)
        return False

    def close_job(self, reason: str, *, has_failed: bool = False) -> None:
        """Ends the job for all its nodes, if the store can be reached."""
        try:
            if self._store is None:
                self._store = self._open_store()
            lease = self._store.grant(CLOSED_FOR_S)
            closing = [self._keys.closed, self._keys.failed] if has_failed else [self._keys.closed]
            puts = [Put(key, reason.encode(), lease.lease_id) for key in closing]
            self._store.commit({}, puts, [self._keys.round])
        except (StoreError, LeaseGoneError) as error:
            logger.warning("The end of the job could not be told: %s.", error)

    def take_leave(
        self, number: int, spare: int, departing: tuple[str, str] | None = None, have_state: Collection[str] = ()
    ) -> str:
        """Takes one of the ``spare`` places that round ``number`` can do without; why there is none, or "".

        Nodes that would leave at the same moment count each other by compare-and-set. ``departing`` is (node, why) of
        one that is well: the others are told by the same write. ``have_state``: not all of these may have departed, if
        there are any.
        """
        store = self._store
        if store is None:
            return "the cluster's store is not open."
        why_not = ""

        def take(entry: Entry | None) -> Write | None:
            nonlocal why_not
            words = [] if entry is None else entry.value.split()
            is_told = len(words) == 2 and words[0] == b"%d" % number
            taken = (whole_number(words[1]) or 0) if is_told else 0
            why_not = self._why_no_place(store, taken, spare, have_state)
            puts = [Put(self._keys.leaving, b"%d %d" % (number, taken + 1), self._job_lease_id)]
            if departing is not None:
                puts.append(Put(self._keys.departing(departing[0]), departing_text(*departing), self._job_lease_id))
            return None if why_not else Write(puts=tuple(puts))

        try:
            store.update(self._keys.leaving, take)
        except (StoreError, LeaseGoneError) as error:
            return f"the other nodes could not be asked whether they can spare it ({error})."
        return why_not

    def _why_no_place(self, store: Store, taken: int, spare: int, have_state: Collection[str]) -> str:
        if taken >= spare:
            return "other nodes leave already, and the job needs the rest."
        if taken and have_state and not set(have_state) - self._departed(store):
            return "no other node that stays has the training state yet."
        return ""

    def _departed(self, store: Store) -> set[str]:
        """Read departures in the store: the mirror may not have heard of a write of this moment. Raises StoreError."""
        found = set()
        for entry in store.read_prefix(self._keys.departing("")).entries:
            with contextlib.suppress(ValueError):
                found.add(parse_departing(entry)[0])
        return found

    # -- what a presence asks for ------------------------------------------------------------------------------------

    def _read(self, store: Store) -> Snapshot:
        """Read the job, or all of it but its agents while it may be one of a crowd, and is to say so itself first."""
        self._has_read_all = False
        if self._waits and self._may_be_crowd:
            seen = store.read_prefix(self._keys.prefix, without=self._members)
            if self._knows_round(seen.get(self._keys.round)):
                self._look_at = 0.0
                return seen
        self._has_read_all = True
        return super()._read(store)

    @property
    def _may_be_crowd(self) -> bool:
        return self._nodes > _WORTH_IT * self._crowd

    def _knows_round(self, entry: Entry | None) -> bool:
        """Tell whether there is no round yet, or one in which this agent was: else it looks who of it is there."""
        if entry is None:
            return True
        try:
            places = parse_round(entry).places
        except ValueError:
            return False
        return any(self._keys.member(place.node_id) == self._member_key for place in places)

    def _follow(self, store: Store, seen: Snapshot, deliver: Deliver) -> Watch:
        self.is_distant = not self._has_read_all  # together with what is known
        if not self.is_distant:
            return super()._follow(store, seen, deliver)
        return store.watch(seen.under(self._keys.round), deliver)

    def _hold(self, store: Store) -> None:
        """Keeps the job's own lease alive, which any of its agents may have begun."""
        if self._job_lease_id is not None and self._is_there(store, self._job_lease_id):
            return
        for _ in range(_LEASE_ATTEMPTS):
            entry = store.read(self._keys.lease).entry
            known = None if entry is None else whole_number(entry.value)
            if known is not None and self._is_there(store, known):
                self._job_lease_id = known
                return
            lease = store.grant(min(self._blind_for_s + JOB_LEASE_S, _LEASE_MAX_S))
            revision = 0 if entry is None else entry.revision
            text = str(lease.lease_id).encode()
            if store.compare_and_set(self._keys.lease, text, revision, lease.lease_id) is not None:
                self._job_lease_id = lease.lease_id
                return
            store.revoke(lease.lease_id)  # another agent was faster: its lease is there to be read at once
        raise StoreError("other agents begin the job's lease at this moment")

    def _is_held(self, store: Store) -> bool:
        if self._job_lease_id is None:
            return False
        if time.monotonic() < self._job_lease_due_at:
            return True
        self._job_lease_due_at = time.monotonic() + _KEPT_ALIVE_S
        return self._is_there(store, self._job_lease_id)

    def _is_there(self, store: Store, lease_id: int) -> bool:
        """Whether the job's lease is, and keep it alive.

        While those of the present round may train unseen, its age tells all who wait since when: it is left as it is.
        """
        is_seen = self.is_distant or not may_train_unseen(self.view())
        if is_seen or self.unseen_for_s() >= self._blind_for_s:
            return store.keep_alive(lease_id) is not None
        age_s = store.age(lease_id)
        self._kept_at = None if age_s is None else time.monotonic() - age_s
        return age_s is not None

    def _let_go(self) -> None:
        self._job_lease_id = None

    def _clear_away(self, store: Store) -> None:
        """Ends the job's own lease behind its last agent, once the job is over, or an operator has ended it."""
        is_over = self.view().closed or self.get(self._keys.cancelled) is not None
        is_crowd = self.is_distant or len(self.view().members) > _LAST_MOST
        if self._job_lease_id is None or not is_over or is_crowd:
            return
        if not store.count(self._members, most=1):
            store.revoke(self._job_lease_id)

    def _say_more(self, store: Store) -> None:
        is_alone = not self.is_distant and all(
            self._keys.member(each.node_id) in self._said for each in self.view().members
        )
        for key, text in self._job_texts.items():
            entry = store.read(key).entry
            if entry is None or (is_alone and entry.value != text):  # of a start of before
                store.commit({key: 0 if entry is None else entry.revision}, [Put(key, text, self._job_lease_id)])
        if self._round is not None and store.read(self._keys.round).entry is None:
            put = Put(self._keys.round, round_text(self._round), self._job_lease_id)
            store.commit({self._keys.round: 0, self._keys.closed: 0}, [put])
        if self._has_counted or (self._restarts is not None and store.read(self._keys.restarts).entry is None):
            self._say_restarts(store)

    def _take(self, mirror: JobMirror, changes: tuple[Change, ...]) -> None:
        super()._take(mirror, changes)
        if not may_train_unseen(self.view()):  # the round is remembered
            self._forget_unseen()

    def _blinded(self, reason: str, silent_s: float = 0.0) -> None:
        super()._blinded(reason, silent_s)
        self._forget_unseen()  # somebody may be there meanwhile

    def _forget_unseen(self) -> None:
        if self._kept_at is not None:
            self._kept_at, self._job_lease_due_at = None, 0.0


def _what_stands(store: Store, key: str) -> str:
    entry = store.read(key).entry
    if entry is None:
        raise StoreError(f"{key} cannot be written: others have written later ones, which have not been seen yet")
    return entry.value.decode()
