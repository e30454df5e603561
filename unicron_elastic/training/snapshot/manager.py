"""Keeps the training state in memory that survives the worker, and takes it from there or from storage afterwards.

A thread copies the state while the next forward and backward pass run; the next optimizer step waits until it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import local_of
from unicron_elastic.compat.watching.optimizers import tells_of_steps, watch_before_steps
from unicron_elastic.state.layout import flatten, rebuild
from unicron_elastic.state.marks_of_shards import MarksOfShards
from unicron_elastic.state.snapshot.gather import Gather, gathering, own_rank
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.snapshot.newest_common import (
    best_for,
    is_borrowed,
    newest_common,
    newest_unfit,
    that_count,
    why_back,
    why_behind,
)
from unicron_elastic.state.snapshot.offers import Local, Offers, Remote
from unicron_elastic.state.snapshot.shards import Shards, map_leaves
from unicron_elastic.state.snapshot.writer import Marks, SnapshotWriter
from unicron_elastic.state.storage.manifest import RANDOM_OF_FIRST
from unicron_elastic.training.snapshot.marks_of_numbers import MarksOfNumbers
from unicron_elastic.training.snapshot.open_epochs import without_numbers
from unicron_elastic.training.snapshot.replication import Replication
from unicron_elastic.training.step.running_statistics import has_own_statistics
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.instructions import SnapshotOffers
from unicron_elastic.worker.notices import Restored, SnapshotMade, SnapshotsWanted
from unicron_elastic.worker.worlds import link

if TYPE_CHECKING:
    from unicron_elastic.state.storage.folder import Storage


ANSWER_TIMEOUT_S = 60.0

Key = tuple[int, ...]  # (step, 1, lineage) of a snapshot in memory, (step, 0, 0) of one in storage

_LOOKED_AT = 256  # numbers of each parameter, in each snapshot


class Keepable(Protocol):
    """A run."""

    @property
    def step(self) -> int:
        """How many optimizer steps it has behind it."""

    def drawn(self) -> dict[str, str]:
        """Where each of its generators of random numbers is, as digests."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""

    def why_not(self, state_dict: dict[str, Any]) -> str:
        """Why it cannot go on from that as it was built here; "" if it can."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""


class SnapshotManager:
    """`SnapshotManager` keeps the state of one run outside of its worker.

    ``stateful`` is what the run registered. ``replication`` knows whether the state is the same on all ranks, but for
    what is of a rank alone, as random numbers, if it ``has_own_parts``. Any state of others will do where those may be
    lost: else one that has them goes before newer ones that do not.

    ``peer_every``: each snapshot of a step that it divides is copied to another node; 0: none.
    """

    def __init__(
        self,
        run: Keepable,
        stateful: Mapping[str, Any],
        *,
        replication: Replication,
        peer_every: int,
    ) -> None:
        self._run = run
        self._stateful = stateful
        self._optimizers = [each for each in stateful.values() if isinstance(each, torch.optim.Optimizer)]
        self.replication = replication
        self.has_own_parts = True
        self._peer_every = peer_every
        self._writer = SnapshotWriter(files=3 if peer_every else 2)
        self._storage: Storage | None = None
        self._count = 0  # of the snapshots that this process has begun
        self._begun: int | None = None  # the number of the snapshot that was begun last
        self.began_with = 0  # the number of the state with which the script goes on
        self._restores = False
        self.is_wanted = False  # the job is to wait: a snapshot of the next step, whichever it is
        generation = _generation()
        self.lineage = _first_lineage(generation)
        self._is_restart = generation["TORCHELASTIC_RESTART_COUNT"] not in ("", "0")
        self._has_asked = False  # whether there is a state to go on from
        self._begun_at: int | None = None  # the number of a state that the script has loaded itself
        self.restored: int | None = None  # the number of the one that was taken over, if it had any steps behind it

    @property
    def storage(self) -> Storage:
        """Made when it is first used: torch takes a second to import what it needs."""
        if self._storage is None:
            from unicron_elastic.state.storage.folder import Storage

            self._storage = Storage()
        return self._storage

    # -- to memory ----------------------------------------------------------------------------------------------------

    def snapshot(self, step: int) -> bool:
        """Begins to copy the state to memory; false where nobody would keep it, or it was begun with that number.

        Raises TypeError for a state that cannot be kept.
        """
        if not self.is_on or step == self._begun:
            return False
        self.is_wanted = False
        self.wait()
        state = self._run.state_dict()
        local = Shards(state["state"]["model"]).local(state)
        unchanging = self._unchanging()
        kept = _Kept({local_of(each).untyped_storage().data_ptr() for each in unchanging})
        layout, tensors = flatten(map_leaves(local, kept.of))
        rank, world_size = own_rank()
        about = {
            "step": step,
            "lineage": self.lineage,
            "rank": rank,
            "world_size": world_size,
            "is_replicated": self.replication.holds,
            "has_own_parts": self.has_own_parts,
            "is_for_peer": bool(self._peer_every and step % self._peer_every == 0),
        }
        watch_before_steps(self._writer)
        self._writer.begin(layout, tensors, about, _tell_agent, self._marks(unchanging))
        self._begun = step
        return True

    def _marks(self, unchanging: Sequence[Tensor]) -> Marks | None:
        """Return what tells whether any has changed while it is copied, beside torch's own counts.

        All numbers are looked at in the first snapshot, the second, the fourth and so on, and some of each parameter in
        all others: who changes weights behind torch's back does so in each step, or to whole tensors. Not on a device,
        which would be waited for each time.
        """
        shards = [each for each in unchanging if local_of(each) is not each]
        marks = MarksOfShards(shards) if shards else None
        self._count += 1
        if self._writer.is_careful:
            return marks
        if self._count.bit_count() == 1:
            return MarksOfNumbers(unchanging, marks)
        parameters = [each for each in unchanging if isinstance(each, nn.Parameter) and each.device.type == "cpu"]
        return MarksOfNumbers(parameters, marks, most=_LOOKED_AT) if parameters else marks

    def note_reached(self, step: int) -> None:
        """Writes down where the job has come to, for who restores an earlier state."""
        self._writer.note_reached(step)

    @property
    def is_on(self) -> bool:
        """Whether somebody would keep it."""
        return link() is not None and not self._writer.is_off

    def _save_asked(self) -> bool:
        """Whether one rank's snapshot alone helps the job, and the script would take it up again."""
        is_enough = self.replication.holds and (
            not self.has_own_parts or self.replication.may_be_lost or own_rank()[1] == 1
        )
        self.is_wanted = is_enough and self._restores and self.is_on
        return self.is_wanted

    def wait(self) -> None:
        """Waits until the copy that was begun last is complete."""
        self._writer.wait()

    def _unchanging(self) -> list[Tensor]:
        """Return the tensors that change in nothing but an optimizer step, before which we are asked.

        Of an optimizer whose steps torch tells nobody of there are none.
        """
        found: list[Tensor] = []

        def learn(leaf: Any) -> None:
            if isinstance(leaf, Tensor) and _has_storage(local_of(leaf)):
                found.append(leaf)

        for optimizer in filter(tells_of_steps, self._optimizers):
            for group in optimizer.param_groups:
                map_leaves(group["params"], learn)
            for state in optimizer.state.values():
                map_leaves(state, learn)
        return found

    # -- to storage ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], keep: int, rank: int | None = None) -> None:
        """Begins to write the state to a folder; all ranks must call it. Raises ValueError and TypeError.

        ``rank``: this one's among those who write, if they are not all of the job.
        """
        rank = own_rank()[0] if rank is None else rank
        state = self._run.state_dict()
        for name in ("buffers", "hidden"):
            state.pop(name, None)  # as in torch: what state_dict leaves out is the script's to make
        if "epochs" in state:
            state["epochs"] = without_numbers(state["epochs"])
        for name in ("gradients", "place"):
            state.pop(name, None)
        # Another script may read it, which trains and freezes as it likes; without its groups no optimizer loads.
        if way := state["way"]:
            state["way"] = {"optimizers": way["optimizers"], "trained": way["model"]["trained"]}
        self.storage.save(folder, state, keep=keep, is_replicated=self.replication.holds, rank=rank)

    def wait_saved(self) -> None:
        """Waits until what was begun is written, or could not be."""
        if self._storage is not None:
            self._storage.wait()

    # -- back ---------------------------------------------------------------------------------------------------------

    def restore(self, folder: str | os.PathLike[str] | None) -> int:
        """Takes over the newest state that all ranks have; returns its step.

        If there is none, that is 0, or the step with which the script has said that it begins, as none that is older is
        taken then. All ranks must call it. Raises what torch raises if one does not come, and ValueError if the state
        is another's.
        """
        self._has_asked = True
        self.wait()
        began = time.monotonic()
        offers = self._ask()
        if offers.is_replacement:  # those who train have the state, and give it
            self._writer.adopt(offers.own, sys.maxsize)
            return 0
        rank, world_size = own_rank()
        gather = gathering()
        least = self._begun_at or 0
        sources: dict[Key, Any] = {
            (key[0], 1, key[1]): each for key, each in best_for(offers.found, rank, world_size).items()
        }
        if folder is not None:
            sources |= {(step, 0, 0): each for step, each in self.storage.find(folder, rank, world_size).items()}
        sources = {key: each for key, each in sources.items() if key[0] >= least}
        first_said: Sequence[Collection[Key]] | None = None
        refused: list[tuple[int, list[str]]] = []  # of which step, and why, by rank; empty where it is right
        lacks: list[str] = []
        taken: _Loaded | None = None
        drawn = self._run.drawn()
        while True:
            token = secrets.randbits(62)
            mine = {
                "keys": list(sources),
                "borrowed": [key for key, each in sources.items() if self._is_borrowed(each, rank, world_size)],
                "token": token,
                "reached": offers.reached(),
                "again": offers.is_restart,
                "unfit": newest_unfit(offers.found, world_size),
                "drawn": drawn,
            }
            said = [json.loads(each) for each in gather(json.dumps(mine))]
            keys = that_count(*([[tuple(key) for key in each[name]] for each in said] for name in ("keys", "borrowed")))
            first_said = first_said or keys
            chosen = newest_common(keys)
            if chosen is None:
                break
            loaded, why_not = self._read(sources.pop(chosen))
            told = json.dumps(
                {
                    "is_right": loaded is not None,
                    "why_not": why_not,
                    "lacks": "" if loaded is None else self._lacks(loaded, chosen[0], rank),
                    "where": "" if loaded is None else loaded.where,
                    "bytes": 0 if loaded is None else loaded.bytes,
                }
            )
            answers = [json.loads(each) for each in gather(told)]
            refused.append((chosen[0], [each["why_not"] for each in answers]))
            if loaded is not None and all(each["is_right"] for each in answers):
                lacks = _notes([each["lacks"] for each in answers])
                alike = {name for name, each in drawn.items() if all(one["drawn"].get(name) == each for one in said)}
                self._take(taken := loaded, rank, alike)
                break
        self._note_replication(taken, gather, rank)
        self.lineage = said[0]["token"]
        reached, is_restart = [each["reached"] for each in said], any(each["again"] for each in said)
        step = self.began_with = chosen[0] if chosen is not None else least
        self.restored = None if chosen is None else step or None
        self._writer.adopt(offers.own, step)
        offers.close_others()
        if rank == 0:
            notes = [*_refusals(refused), *lacks, why_back(first_said, chosen, least)]
            unfit = [(step, ranks) for step, ranks in (each["unfit"] for each in said)]
            behind = why_behind(first_said, chosen, reached, is_restart=is_restart, unfit=unfit, begun=least)
            answers = answers if chosen is not None else []
            self._tell(step, chosen, notes, answers, behind, took_s=time.monotonic() - began)
        return step

    def _note_replication(self, taken: _Loaded | None, gather: Gather, rank: int) -> None:
        """Learn whether all ranks have the same: from a snapshot, which knows, else by comparing."""
        if taken is not None and taken.header is not None:
            self.replication.take(is_replicated=taken.header.is_replicated)
        elif (apart := self.replication.compare(gather)) and rank == 0:
            _say(f"{apart}.")

    def begin_steps(self, *, in_shards: bool) -> None:
        """All ranks are in ``steps()`` now, and have the same state, or each its shards."""
        if not in_shards:
            self.replication.begin_steps()
        self.has_own_parts = False

    def begin_at(self, step: int) -> None:
        """Takes it that the script has loaded a state of its own, with so many steps behind it."""
        self._begun_at = self.began_with = step

    def begin(self, step: int) -> None:
        """``steps()`` begins with this step: says so after a restart if the script has asked for no state of before.

        It may have loaded one of its own, as where an optimizer has made steps: then nothing is said, unless it has
        said so itself.
        """
        if step != (self._begun_at or 0):
            return
        if self._is_restart and not self._has_asked:
            begins = f"run.steps() begins again with step {step}"
            if self._begun_at is not None:
                self._tell_all(Restored(step=step, sentence=f"{begins}, as the script says by run.begin_at()."))
            elif not any(each.state for each in self._optimizers):
                why = "the script has not asked run.restore() for a snapshot"
                self._tell_all(Restored(step=step, sentence=f"{begins}: {why}."))
        self._has_asked = True  # it is told once

    def _ask(self) -> Offers:
        to_agent = link()
        if to_agent is None:
            return Offers.nothing()
        self._restores, to_agent.on_save = True, self._save_asked
        rank, world_size = own_rank()
        wish = SnapshotsWanted(rank=rank, world_size=world_size)
        return Offers.of(to_agent.ask(wish, (SnapshotOffers,), ANSWER_TIMEOUT_S))

    def _read(self, source: Any) -> tuple[_Loaded | None, str]:
        """The state from a source, or None and why it cannot be used."""
        try:
            if isinstance(source, Local | Remote):
                layout, tensors = source.read()
                loaded = _Loaded(rebuild(layout, tensors), source.where, source.header, layout.total_bytes)
            else:
                loaded = _Loaded(source.load(self._shards()), "storage", None)
            if not (why := self._run.why_not(loaded.state)):
                return loaded, ""
        except Exception as error:  # there may be another state that can be read
            why = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        return None, why

    def _is_borrowed(self, source: Any, rank: int, world_size: int) -> bool:
        """Whether it lacks what is of this rank, and must not go before an older one that has it."""
        if self.replication.may_be_lost or not isinstance(source, Local | Remote):
            return False
        return is_borrowed(source.header, rank, world_size)

    def _lacks(self, loaded: _Loaded, step: int, rank: int) -> str:
        """What this rank has to say of a state in which what is of itself is missing; empty if nothing is."""
        if loaded.header is not None and loaded.is_of_another(rank):
            whose = loaded.header.rank
            why = f"no state of its own is left of step {step}, and it takes that of rank {whose}"
        elif loaded.header is None and "epochs" in loaded.state and not loaded.state["random"]:  # of a loop of its own
            whose, why = 0, "storage has what rank 0 had alone"
        else:
            return ""
        draws = (
            "its own random numbers begin again as the script has seeded them, and it may draw what it has drawn before"
        )
        taken = {
            "BatchNorm's running statistics": has_own_statistics(self._stateful["model"]),
            "the gradients that are accumulated": bool(loaded.state.get("gradients")),
        }
        return f"{why}: {draws}" + "".join(f"; {what} are those of rank {whose}" for what in taken if taken[what])

    def _shards(self) -> Shards:
        return Shards(self._stateful["model"].state_dict())

    def _take(self, loaded: _Loaded, rank: int, alike: Collection[str]) -> None:
        """Take it over. ``alike``: the generators that the scripts of all ranks have seeded, and used, alike so far."""
        state = self._shards().whole(loaded.state)
        of_first = state.pop(RANDOM_OF_FIRST, {})
        if loaded.header is None and "epochs" not in state and not state["random"]:  # of steps(), where none is its own
            state["random"] = {name: each for name, each in of_first.items() if name in alike}
        if loaded.is_of_another(rank):
            state["random"] = {}  # two ranks must not draw the same
            state["epochs"] = without_numbers(state["epochs"])
        self._run.load_state_dict(state)

    def _tell(
        self,
        step: int,
        chosen: Key | None,
        notes: list[str],
        answers: list[dict[str, Any]],
        behind: str,
        *,
        took_s: float,
    ) -> None:
        sentences = [note for note in notes if note]
        places = list[str]()
        if chosen is not None:
            places = sorted({str(each["where"]) for each in answers})
            sentences.append(f"All ranks go on from step {step}, from {' and '.join(places)}.")
        if behind:
            sentences.append(behind)
        if not sentences:
            return
        count = sum(each["bytes"] for each in answers) if places else 0
        self._tell_all(
            Restored(step=step, sentence=" ".join(sentences), bytes_taken=count, took_s=took_s, sources=tuple(places))
        )

    def _tell_all(self, restored: Restored) -> None:
        to_agent = link()
        if to_agent is None:
            _say(restored.sentence)
        else:
            to_agent.say(restored)


@dataclass(frozen=True)
class _Loaded:
    """A state that was read; without a ``header`` from storage."""

    state: Any
    where: str
    header: Header | None
    bytes: int = 0  # 0: not counted

    def is_of_another(self, rank: int) -> bool:
        """Whether it is of another rank, and has what is of that one alone."""
        return self.header is not None and self.header.has_own_parts and self.header.rank != rank


def _notes(said: Sequence[str]) -> list[str]:
    """What ranks have to say, each thing once with all who say it."""
    who: dict[str, list[str]] = {}
    for rank, note in enumerate(said):
        if note:
            who.setdefault(note, []).append(str(rank))
    return [
        f"Rank {ranks[0]}: {note}." if len(ranks) == 1 else f"Ranks {', '.join(ranks[:-1])} and {ranks[-1]}: {note}."
        for note, ranks in who.items()
    ]


def _refusals(refused: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """What ranks have to say of states that they cannot use, each reason once with all that it is said of."""
    notes: list[str] = []
    for why in dict.fromkeys(each for _, said in refused for each in said if each):
        of = [[step for step, said in refused if said[rank] == why] for rank in range(len(refused[0][1]))]
        notes += _notes([f"{_states(steps)} cannot be used: {why}" if steps else "" for steps in of])
    return notes


def _states(steps: Sequence[int]) -> str:
    """Return "the states of steps 16, 14 and 12"."""
    *others, last = map(str, dict.fromkeys(steps))
    return f"the states of steps {', '.join(others)} and {last}" if others else f"the state of step {last}"


def _has_storage(tensor: Tensor) -> bool:
    """Tell whether it lies in memory as one piece; a sparse one does not, and is refused by name where it is kept."""
    return tensor.layout is torch.strided


class _Kept:
    """`_Kept` copies now what may change while a state is copied, as batch norm's statistics; what is one stays one."""

    def __init__(self, unchanging: set[int]) -> None:
        """``unchanging`` are storages of tensors that do not."""
        self._unchanging = unchanging
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # with what they are of, which so keeps its identity

    def of(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not _has_storage(leaf):
            return leaf
        if leaf.untyped_storage().data_ptr() in self._unchanging:
            return leaf
        if id(leaf) not in self._copies:
            self._copies[id(leaf)] = leaf, leaf.detach().clone()
        return self._copies[id(leaf)][1]


def _generation() -> dict[str, str]:
    """Return what tells this generation of the job's workers from all others."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ.get(name, "") for name in names}


def _first_lineage(generation: Mapping[str, str]) -> int:
    """Return the same for all ranks of a generation that did not restore anything."""
    text = "\0".join(generation.values())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _say(sentence: str) -> None:
    sys.stderr.write(f"unicron: {sentence}\n")


def _tell_agent(made: SnapshotMade) -> None:
    to_agent = link()
    if to_agent is not None:
        with contextlib.suppress(ChannelClosed):
            to_agent.say(made)
