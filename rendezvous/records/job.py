"""What a job keeps in the store: keys and their texts, read with bounds, and a copy that a watch keeps up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from unicron_elastic.base.text import one_line
from unicron_elastic.membership.rounds import JobMember, JobView, Place, Round
from unicron_elastic.rendezvous.store.interface import Change, Entry, Snapshot
from unicron_elastic.rendezvous.store.records import large_text, object_in, odd

NAME_CHARACTERS = 200  # of hosts, labels and nodes
PROCESS_CHARACTERS = 500
PLACES_MAX = 100_000
REASON_CHARACTERS = 2000
_RECORD_MAX_BYTES = 32 * 1024 * 1024  # a round names all of its nodes
_WORLD = re.compile(r"worlds/(\d{1,18})/([1-9]\d{0,17}|latest)", re.ASCII)


class JobKeys:
    """The keys of one job. Whatever ends with the job is bound to a lease: of its agent, or of the job."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"jobs/{quote(run_id, safe='')}/"
        self.round = f"{self.prefix}round"
        self.closed = f"{self.prefix}closed"  # why
        self.failed = f"{self.prefix}failed"  # why it was closed, if it did not end well
        self.lease = f"{self.prefix}lease"  # of the job: all its agents keep it alive
        self.restarts = f"{self.prefix}restarts"  # that count, for nodes that take over from all others
        self.leaving = f"{self.prefix}leaving"  # the round, and how many of its nodes leave it
        self.held = f"{self.prefix}held"  # why nodes that wait to join are not let in now
        self.claims = f"{self.prefix}claims/"  # of spares that are on their way
        self.spec = f"{self.prefix}spec"  # what it runs, for nodes that are lent to it
        self.cancelled = f"{self.prefix}cancelled"  # why, by an operator

    def member(self, node_id: str) -> str:
        """Return the key of an agent."""
        return f"{self.prefix}members/{quote(node_id, safe='')}"

    def claim(self, number: int) -> str:
        """Return the key of a spare that is on its way."""
        return f"{self.claims}{number}"

    def lost(self, node_id: str) -> str:
        """Why the coordinator has removed an agent."""
        return f"{self.prefix}lost/{quote(node_id, safe='')}"

    def departing(self, node_id: str) -> str:
        """Why an agent that is well is about to leave."""
        return f"{self.prefix}departing/{quote(node_id, safe='')}"

    def recalled(self, host: str) -> str:
        """Why a node is wanted elsewhere, as a sentence: its agent leaves as soon as the job can spare it."""
        return f"{self.prefix}recalled/{quote(host, safe='')}"

    def world(self, round_number: int, place: int) -> str:
        """Return the key of those who train together in a round, one after the other, from place 1."""
        return f"{self.prefix}worlds/{round_number}/{place}"

    def latest_world(self, round_number: int) -> str:
        """The latest place that was written in a round."""
        return f"{self.prefix}worlds/{round_number}/latest"

    def store(self, number: int) -> str:
        """Where the workers of a round find their store."""
        return f"{self.prefix}stores/{number}"


def member_text(member: JobMember) -> bytes:
    """What a member's key holds."""
    told = {"node": member.node_id, "host": member.host, "label": member.label, "waits_for": member.waits_for}
    return json.dumps({**told, "process": member.process} if member.process else told).encode()


def round_text(found: Round) -> bytes:
    """What the round's key holds: compressed, if there are many nodes."""
    places = [[place.node_id, place.host] for place in found.places]
    processes = [place.process for place in found.places]
    told = {"number": found.number, "places": places}
    return large_text({**told, "processes": processes} if any(processes) else told)


def parse_member(entry: Entry) -> JobMember:
    """Raises ValueError for what is no member."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        return JobMember(
            node_id=str(told["node"])[:NAME_CHARACTERS],
            host=str(told["host"])[:NAME_CHARACTERS],
            label=str(told["label"])[:NAME_CHARACTERS],
            joined=entry.created,
            waits_for=int(told["waits_for"]),
            process=_whole(told.get("process", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise odd(entry, "member", error) from None


def parse_round(entry: Entry) -> Round:
    """Raises ValueError for what is no round."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        named = told["places"][:PLACES_MAX]
        processes = list(told.get("processes", ())) or [""] * len(named)
        places = tuple(
            Place(str(node)[:NAME_CHARACTERS], str(host)[:NAME_CHARACTERS], _whole(process))
            for (node, host), process in zip(named, processes, strict=True)
        )
        found = Round(number=int(told["number"]), places=places)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise odd(entry, "round", error) from None
    if found.number < 1 or not places:
        raise odd(entry, "round", ValueError(f"its number is {found.number}, and it has {len(places)} places"))
    return found


def _whole(process: object) -> str:
    """What names a process, which a part of it would not: then "", which proves nothing."""
    return process if isinstance(process, str) and len(process) <= PROCESS_CHARACTERS else ""


@dataclass(frozen=True, slots=True)
class Lost:
    """An agent that was removed, or has left, and why.

    ``has_ended``: it is certain that its processes are no more. ``is_orderly``: by its own word it has left because it
    was told to, or the others can do without it, and not for an error.
    """

    node_id: str
    reason: str
    has_ended: bool
    is_orderly: bool


def lost_text(node_id: str, reason: str, *, has_ended: bool, is_orderly: bool = False) -> bytes:
    """What the key of a lost agent holds, as ``Lost`` has it."""
    return json.dumps({"node": node_id, "reason": reason, "has_ended": has_ended, "is_orderly": is_orderly}).encode()


def parse_lost(entry: Entry) -> Lost:
    """Raises ValueError."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    node_id, reason = told.get("node"), told.get("reason")
    if not isinstance(node_id, str) or not isinstance(reason, str):
        raise odd(entry, "lost agent", ValueError("node and reason must be texts"))
    return Lost(
        node_id=node_id[:NAME_CHARACTERS],
        reason=one_line(reason, REASON_CHARACTERS),
        has_ended=told.get("has_ended") is True,
        is_orderly=told.get("is_orderly") is True,
    )


def departing_text(node_id: str, reason: str) -> bytes:
    """What the key of an agent that is about to leave holds."""
    return json.dumps({"node": node_id, "reason": reason}).encode()


def parse_departing(entry: Entry) -> tuple[str, str]:
    """Node and reason. Raises ValueError."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    node_id, reason = told.get("node"), told.get("reason")
    if not isinstance(node_id, str) or not isinstance(reason, str):
        raise odd(entry, "agent that leaves", ValueError("node and reason must be texts"))
    return node_id[:NAME_CHARACTERS], one_line(reason, REASON_CHARACTERS)


class JobMirror:
    """The job's keys as they were at one revision of the store; changes come in order.

    Each key is read when it changes. What cannot be read is left out and told in ``odd``, {key: why}: one bad key must
    not stop a job.
    """

    def __init__(self, keys: JobKeys, snapshot: Snapshot) -> None:
        self._keys = keys
        self._entries: dict[str, Entry] = {}
        self._members: dict[str, JobMember] = {}
        self._round: Round | None = None
        self._lost: dict[str, Lost] = {}
        self._departing: dict[str, tuple[str, str]] = {}
        self._worlds: dict[int, dict[int, Entry]] = {}  # by round and place; 0: the key of its latest place
        self._view: JobView | None = None
        self.odd: dict[str, str] = {}
        for entry in snapshot.entries:
            self._take(entry.key, entry)

    def apply(self, changes: Iterable[Change]) -> None:
        """Takes changes over."""
        for change in changes:
            self._take(change.key, change.entry)

    def get(self, key: str) -> Entry | None:
        """What a key holds; None if it does not exist."""
        return self._entries.get(key)

    def revision(self, key: str) -> int:
        """Return the revision of a key's last change; 0: it does not exist."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.revision

    def view(self) -> JobView:
        """What that means. The same object as before while nothing has changed, as it is asked for often."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _make_view(self) -> JobView:
        members = tuple(self._members[key] for key in sorted(self._members))
        closed = self._entries.get(self._keys.closed)
        reason = "" if closed is None else one_line(closed.value) or "The job has ended."
        revision = self.revision(self._keys.round)
        return JobView(
            members=members,
            round=self._round,
            closed=reason,
            round_revision=revision,
            ended=frozenset(lost.node_id for lost in self._lost.values() if lost.has_ended),
            orderly=frozenset(lost.node_id for lost in self._lost.values() if lost.is_orderly),
        )

    def world_after(self, round_number: int, place: int) -> tuple[int, Entry] | None:
        """The first world of a round that stands in a later place, and which that is."""
        worlds = self._worlds.get(round_number, {})
        later = min((each for each in worlds if each > place), default=None)
        return None if later is None else (later, worlds[later])

    def worlds_before(self, round_number: int, place: int) -> list[str]:
        """The keys of the worlds before this round and the one before it, and of those of the round before a place.

        In their order, so that a part of them from the first on leaves no gaps.
        """
        rounds = sorted(number for number in self._worlds if number < round_number - 1)
        earlier = [self._worlds[number][each].key for number in rounds for each in sorted(self._worlds[number])]
        own = self._worlds.get(round_number, {})
        return earlier + [own[each].key for each in sorted(own) if 0 < each < place]

    def why_lost(self, node_id: str) -> str:
        """Why an agent was removed, or left; "": it was not."""
        return next((lost.reason for lost in self._lost.values() if lost.node_id == node_id), "")

    def departing(self) -> dict[str, str]:
        """{node: why} of the agents that are about to leave, or have left so."""
        return dict(self._departing.values())

    def departed(self, rounds: Iterable[Round]) -> list[str]:
        """The keys of the agents that said that they leave, and are in none of these rounds."""
        there = {place.node_id for each in rounds for place in each.places}
        return [key for key, (node_id, _) in self._departing.items() if node_id not in there]

    def _take(self, key: str, entry: Entry | None) -> None:
        self._view = None
        self.odd.pop(key, None)
        self._departing.pop(key, None)
        self._members.pop(key, None)
        self._lost.pop(key, None)
        self._take_world(key, entry)
        if key == self._keys.round:
            self._round = None
        if entry is None:
            self._entries.pop(key, None)
            return
        self._entries[key] = entry
        try:
            if key.startswith(f"{self._keys.prefix}members/"):
                self._members[key] = parse_member(entry)
            elif key.startswith(f"{self._keys.prefix}lost/"):
                self._lost[key] = parse_lost(entry)
            elif key.startswith(f"{self._keys.prefix}departing/"):
                self._departing[key] = parse_departing(entry)
            elif key == self._keys.round:
                self._round = parse_round(entry)
        except ValueError as error:
            self.odd[key] = str(error)

    def _take_world(self, key: str, entry: Entry | None) -> None:
        found = _WORLD.fullmatch(key.removeprefix(self._keys.prefix))
        if found is None:
            return
        round_number, place = int(found[1]), 0 if found[2] == "latest" else int(found[2])
        worlds = self._worlds.setdefault(round_number, {})
        if entry is not None:
            worlds[place] = entry
        else:
            worlds.pop(place, None)
        if not worlds:
            del self._worlds[round_number]
