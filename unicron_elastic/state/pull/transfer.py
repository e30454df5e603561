"""Which source sends which chunk: one transfer as a state machine without clock, thread or socket.

``handle(state, event) -> (state, commands)``. A source first sends a part of its own, in order. One that has done its
part takes over half of what the slowest has before it, so that none holds up all; in the end it also asks for what a
slow one is sending, and the first to arrive is accepted. What a lost source had before it is asked of the others. Every
chunk is accepted once; the transfer ends as soon as all are, or when no source is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unicron_elastic.state.pull.distance import Distance, is_local, stripe

SERVING_MAX = 4  # sources that send at the same time; the others wait in reserve
WRONG_MAX = 3  # chunks with a wrong checksum until a source is no longer asked


@dataclass(frozen=True, slots=True)
class SourceReady:
    """A source holds the state and can send ``lanes`` chunks at a time."""

    source: int
    name: str
    distance: Distance
    lanes: int


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk is here with the right checksum."""

    source: int
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkWrong:
    """A chunk is here and its checksum is not the source's."""

    source: int
    chunk: int


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A source does not send any more, or never did; ``reason`` is a sentence without full stop."""

    source: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask ``source`` for a chunk; ``is_copy``: another source is sending it too."""

    source: int
    chunk: int
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Accept:
    """The chunk from this source is the one that counts."""

    source: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Finish:
    """All chunks are here."""


@dataclass(frozen=True, slots=True)
class Fail:
    """No source is left; ``reason`` says what happened to each."""

    reason: str


Event = SourceReady | ChunkArrived | ChunkWrong | SourceLost
Command = Fetch | Accept | Finish | Fail


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a live source. ``todo``: chunks before it; ``asked``: chunks it is sending, oldest first."""

    name: str
    distance: Distance
    lanes: int
    todo: range = range(0)
    asked: tuple[int, ...] = ()
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of ``total`` chunks.

    ``expected``: sources that are neither ready nor lost. ``returned``: chunks whose source was lost, or sent them
    wrong and is not to send them again (-1: none). ``orphans``: chunks that a lost source had before it. ``late``:
    chunks that a source is still sending after another one's was accepted. ``lost``: what happened to each lost one.
    """

    total: int
    expected: int
    sources: dict[int, Source] = field(default_factory=dict)
    returned: tuple[tuple[int, int], ...] = ()
    orphans: tuple[range, ...] = ()
    late: frozenset[tuple[int, int]] = frozenset()
    accepted: int = 0
    began: bool = False
    is_over: bool = False
    lost: tuple[str, ...] = ()


def handle(state: Transfer, event: Event) -> tuple[Transfer, list[Command]]:
    """What follows from ``event``."""
    if state.is_over:
        return state, []
    commands: list[Command] = []
    match event:
        case SourceReady(source, name, far, lanes):
            sources = {**state.sources, source: Source(name, far, lanes)}
            orphans = state.orphans if state.began else (range(state.total),)
            state = replace(state, sources=sources, orphans=orphans, expected=state.expected - 1, began=True)
        case SourceLost(source, reason):
            state = _lose(state, source, reason)
        case ChunkArrived(source, chunk):
            state, commands = _arrive(state, source, chunk)
        case ChunkWrong(source, chunk):
            state = _return_wrong(state, source, chunk)
    if state.accepted == state.total and state.began:
        return replace(state, is_over=True), [*commands, Finish()]
    if not state.sources and state.expected <= 0:
        return replace(state, is_over=True), [*commands, Fail("; ".join(state.lost))]
    return _deal(state, commands)


def _lose(state: Transfer, source: int, reason: str) -> Transfer:
    """Takes a source out, and what it had before it back."""
    state = replace(state, lost=(*state.lost, reason))
    gone = state.sources.get(source)
    if gone is None:
        return replace(state, expected=state.expected - 1)
    others = {number: other for number, other in state.sources.items() if number != source}
    elsewhere = {chunk for other in others.values() for chunk in other.asked}
    missing = [c for c in gone.asked if (source, c) not in state.late and c not in elsewhere]
    return replace(
        state,
        sources=others,
        late=frozenset(pair for pair in state.late if pair[0] != source),
        returned=(*state.returned, *((chunk, -1) for chunk in missing)),
        orphans=(*state.orphans, gone.todo) if gone.todo else state.orphans,
    )


def _arrive(state: Transfer, source: int, chunk: int) -> tuple[Transfer, list[Command]]:
    """Accepts a chunk, if it was asked for and is the first of its number."""
    sender = state.sources.get(source)
    if sender is None or chunk not in sender.asked:
        return state, []
    is_late = (source, chunk) in state.late
    state = _free(state, source, chunk)
    if is_late:
        return state, []
    others = {(number, chunk) for number, other in state.sources.items() if chunk in other.asked}
    return replace(state, accepted=state.accepted + 1, late=state.late | others), [Accept(source, chunk)]


def _return_wrong(state: Transfer, source: int, chunk: int) -> Transfer:
    """Takes back a chunk that came wrong, and lets go a source of which too many did."""
    sender = state.sources.get(source)
    if sender is None or chunk not in sender.asked:
        return state
    is_late = (source, chunk) in state.late
    state = _free(state, source, chunk)
    if not is_late and not any(chunk in other.asked for other in state.sources.values()):
        state = replace(state, returned=(*state.returned, (chunk, source)))
    sender = replace(state.sources[source], wrong=sender.wrong + 1)
    state = replace(state, sources={**state.sources, source: sender})
    if sender.wrong < WRONG_MAX:
        return state
    return _lose(state, source, f"{sender.name} sent {sender.wrong} chunks with a wrong checksum")


def _free(state: Transfer, source: int, chunk: int) -> Transfer:
    """Frees the lane on which a chunk came."""
    sender = state.sources[source]
    sender = replace(sender, asked=tuple(other for other in sender.asked if other != chunk))
    return replace(state, sources={**state.sources, source: sender}, late=state.late - {(source, chunk)})


def _serving(state: Transfer) -> list[int]:
    """The sources that are asked, nearest first: those of this host if there are any, since no network is faster."""
    ordered = _nearest_first(state)
    local = [number for number in ordered if is_local(state.sources[number].distance)]
    return (local or ordered)[:SERVING_MAX]


def _nearest_first(state: Transfer) -> list[int]:
    """All live sources."""
    return sorted(state.sources, key=lambda number: (state.sources[number].distance, number))


def _deal(state: Transfer, commands: list[Command]) -> tuple[Transfer, list[Command]]:
    """Gives every free lane a chunk, in turns, as long as there are any."""
    is_dealing = True
    while is_dealing:
        is_dealing = False
        serving = _serving(state)
        # One in reserve sends only what no serving source may send again.
        for source in _nearest_first(state):
            sender = state.sources[source]
            if len(sender.asked) < sender.lanes:
                state, fetch = _next(state, source, serving)
                commands = [*commands, *fetch]
                is_dealing = is_dealing or bool(fetch)
    return state, commands


def _next(state: Transfer, source: int, serving: list[int]) -> tuple[Transfer, list[Fetch]]:
    """The next chunk for a free lane of ``source``, if there is one."""
    for place, (chunk, avoided) in enumerate(state.returned):
        is_allowed = avoided != source or len(state.sources) == 1
        if is_allowed and (source in serving or serving == [avoided]):
            rest = (*state.returned[:place], *state.returned[place + 1 :])
            return _ask(replace(state, returned=rest), source, chunk, is_copy=False)
    if source not in serving:
        return state, []
    if not state.sources[source].todo:
        state = _take_over(state, source, serving)
    todo = state.sources[source].todo
    if todo:
        return _ask(_with(state, source, todo[1:]), source, todo[0], is_copy=False)
    copied = _sent_by_one_other(state, source)
    return (state, []) if copied is None else _ask(state, source, copied, is_copy=True)


def _ask(state: Transfer, source: int, chunk: int, *, is_copy: bool) -> tuple[Transfer, list[Fetch]]:
    """Books that ``source`` is asked for a chunk."""
    sender = state.sources[source]
    sender = replace(sender, asked=(*sender.asked, chunk))
    return replace(state, sources={**state.sources, source: sender}), [Fetch(source, chunk, is_copy)]


def _with(state: Transfer, source: int, todo: range) -> Transfer:
    """The state in which ``source`` has ``todo`` before it."""
    return replace(state, sources={**state.sources, source: replace(state.sources[source], todo=todo)})


def _take_over(state: Transfer, source: int, serving: list[int]) -> Transfer:
    """Gives ``source`` what nobody has before it, or the later half of what the busiest other one has."""
    if state.orphans:
        return _with(replace(state, orphans=state.orphans[1:]), source, state.orphans[0])
    busiest = max(state.sources, key=lambda number: (len(state.sources[number].todo), -number))
    todo = state.sources[busiest].todo
    # One that is not asked any more, because a nearer one has come, gives all.
    kept = len(stripe(len(todo), 2)[1]) if busiest in serving else 0
    return _with(_with(state, busiest, todo[:kept]), source, todo[kept:])


def _sent_by_one_other(state: Transfer, source: int) -> int | None:
    """The oldest chunk that one source is sending, which is not ``source``, and which is not here yet."""
    own = state.sources[source].asked
    late = {chunk for _, chunk in state.late}
    asked = [chunk for other in state.sources.values() for chunk in other.asked]
    copied = (chunk for chunk in asked if asked.count(chunk) == 1 and chunk not in own and chunk not in late)
    return next(copied, None)
