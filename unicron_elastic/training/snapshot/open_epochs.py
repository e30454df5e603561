"""A script that goes on in the middle of an epoch: it begins its DataLoader anew, and skips what it has had of it.

The order of the epoch, and what the loader's workers draw, come from the random numbers of the moment in which the
epoch began; how the samples of the last batch are changed from those with which it was read, as the script may have
drawn some before; and what comes behind it from those of the snapshot. All are kept, and given back there. A script
that skips from the beginning of its training has them in each epoch that it skips, so also in the one that it was in;
one that does not skip is found out by its first optimizer step, and left alone from then on.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Generator

from unicron_elastic.compat.loaded import is_initialising
from unicron_elastic.compat.watching.batches import first_index_given, keeps_workers, watch_batches
from unicron_elastic.compat.watching.optimizers import watch_before_steps
from unicron_elastic.state.snapshot.gather import own_rank
from unicron_elastic.training.snapshot.drawn_order import DrawnOrder, is_same
from unicron_elastic.training.snapshot.loader_epoch import LoaderEpoch, digest_of, mark_of
from unicron_elastic.training.snapshot.looks import Looks
from unicron_elastic.training.snapshot.own_generators import OwnGenerators, draw_seed
from unicron_elastic.training.step.randomness import Generators, generators_of, packed, unpacked

_STATES = "began", "first", "read", "read_since"  # of generators
_KINDS_MAX = 64  # of loaders that are remembered
_OR = "samples of that epoch come twice or never"
_ADVICE = (
    f"give the DataLoader a generator that is seeded by the epoch, and skip the batches that it has given. Else {_OR}"
)

_OTHER_ORDER = (
    f"the order of the epoch in whose middle the script goes on is another one than it was, and {_OR}: have it depend "
    "on the epoch alone, as by set_epoch(epoch) before each"
)
_OTHER_NUMBERS = (
    "the script begins an epoch in its middle, and the workers of its DataLoader draw other numbers than without the "
    "restart: skip the batches that it has given if they draw any"
)


class OpenEpochs:
    """`OpenEpochs` is what a run knows of its script's DataLoaders, for its snapshots and after one was taken over."""

    def __init__(self, generators: Generators, has_gradients: Callable[[], bool] = lambda: False) -> None:
        """``has_gradients``: of what the script has computed since the state was taken over."""
        self._generators = generators
        self._has_gradients = has_gradients
        self._process = os.getpid()
        self._epochs: list[LoaderEpoch] = []
        self._awaited: list[LoaderEpoch] = []  # of the state that was taken over, as the script may begin them again
        self._again: list[LoaderEpoch] = []  # those that it has begun, until it has had of them what it had then
        self._had: list[LoaderEpoch] = []  # those of which it has had that, until it trains
        self._moment: dict[str, Any] = {}  # where the generators were when that state was kept
        self._loaders: list[tuple[ref[Any], int]] = []  # all that were begun, each with its place
        self._kept: list[Any] = []  # marks of those which had workers in the state that was taken over
        self._lengths: list[tuple[Any, int]] = []  # by mark, of loaders that can only be iterated and came to an end
        self._undrawn: tuple[LoaderEpoch, list[Generator]] | None = None  # whose loader's new workers count as old
        self._skips = True  # as far as is known
        self._trained: list[Any] = []  # marks of loaders in whose epochs the script has trained
        self._untrained: list[LoaderEpoch] | None = None  # begun since a state was taken over, until the script trains
        self._is_told_of_look = False
        self._behind_last: list[list[Any]] = []  # marks of those of which the script has just skipped an epoch's last
        self._has_been_back = False  # at the place at which that state was asked for, since it was taken over
        self._skipping: dict[str, Any] = {}  # where the generators were then, if an epoch was still to be skipped
        self._wrong = ""  # with where the script goes on, if it trains there
        self._left: Counter[tuple[Any, ...]] = Counter()  # by mark, how many of those the script has left
        self._own, self._looks = OwnGenerators(), Looks()
        watch_batches(self)
        watch_before_steps(self)

    # -- what is in a state -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Notes which loaders have given something since the script was here last: it may make a snapshot here."""
        self._had = []
        for each in self._living():
            each.advances, each.looked = each.given > each.looked, each.given

    def is_back(self) -> bool:
        """The script is at the place at which the state was asked for: so are the generators, if it has not trained.

        Return whether that is for good: who asks there also while it skips is there with each batch, and skips on.
        """
        if self._untrained is not None and not self._has_gradients():
            self._skipping = self._generators.states() if self._again else {}
            self._has_been_back = True
            self._generators.set(self._moment)
            for each in self._begun_since():
                each.is_early = True
        return not self._skipping

    def _begun_since(self) -> list[LoaderEpoch]:
        """Return what the script has begun between restore() and the place at which it asked for the state.

        It is to begin it behind that place, as far as it has been given nothing of it.
        """
        found, at = [], self._moment
        for each in self._untrained or ():
            is_new = each.earlier is None and each.rest_of is None and not each.is_left
            if is_new and not each.given and is_same(each.began, at):
                found.append(each)
                at = each.behind_begin
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs in whose middle the script is."""
        found = [each for each in self._living() if not each.is_early and self._is_open(each)]
        met = [each.mark for each in found if not each.is_looked_at]
        found = [each for each in found if each.mark in met or not each.is_looked_at]
        return {
            "skips": self._skips,
            "kept": [mark_of(loader) for loader, _ in self._begun() if keeps_workers(loader)],
            "lengths": self._lengths,
            "looks": self._looks.state_dict(each.mark for each in self._untrained_on()),
            "trained": [each for each in self._trained if self._is_of_one(each)],
            "own": self._own.state_dict(
                [(each.loader(), each.draws_seed) for each in self._living() if not self._is_open(each)],
                [(each.loader(), each.own_began) for each in self._living() if each.is_early],
            ),
            "epochs": [
                {
                    "mark": each.mark,
                    "place": each.place,
                    "is_drawn": each.is_drawn,
                    "moved": each.moved,
                    "keeps_workers": each.keeps_workers,
                    "count": each.had,
                    "first_index": each.first_index,
                    "last_index": digest_of(each.index),
                    "is_look": each.is_looked_at,
                    "is_recent": each.advances or each.given > each.looked,
                    "began": packed(each.began),
                    "own_began": each.own_began,
                    "first": packed(each.first),
                    "read": packed(each.read),
                    "since": each.since,
                    "read_since": packed(each.read_since if each.since < each.given else {}),
                }
                for each in found
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it over; the generators are where they were when it was kept."""
        epochs = [
            LoaderEpoch(**{**each, **{name: unpacked(each.get(name, {})) for name in _STATES}})
            for each in state["epochs"]
        ]
        # What the script has begun before it takes the state over it does not begin again.
        epochs = [each for each in epochs if not any(_is_begun_already(each, by) for by in self._living())]
        for each in self._living():
            each.is_of_before = True
        self._epochs, self._awaited, self._again, self._had = [], [], [], []
        self._skips, self._kept, self._lengths = (
            state["skips"],
            list(state.get("kept", [])),
            list(state.get("lengths", [])),
        )
        self._own.load_state_dict(state.get("own", []))
        self._looks.load_state_dict(state.get("looks", []))
        self._has_been_back, self._skipping, self._behind_last, self._wrong = False, {}, [], ""
        self._left.clear()
        self._trained, self._untrained, self._moment = list(state.get("trained", [])), [], self._generators.states()
        if self._skips and all(each.began for each in epochs):
            self._awaited = epochs
        elif any(each.is_drawn for each in epochs):
            _tell(f"the state is of the middle of an epoch whose order was drawn, and may be another now: {_ADVICE}")

    def began(self) -> dict[str, Any]:
        """Return where the generators were when the epoch began in whose middle the state is that was taken over.

        Nothing if there is no such epoch, or more than one.
        """
        return dict(self._awaited[0].began) if len(self._awaited) == 1 else {}

    # -- what the script does -----------------------------------------------------------------------------------------

    def begins(self, loader: Any) -> LoaderEpoch | None:
        """Notes where the generators are, or puts them to where they were when it began what it is in the middle of."""
        self._undrawn = None
        mark = mark_of(loader)
        if mark is None or os.getpid() != self._process:  # where it is that of a loader's worker
            return None
        place = self._place_of(loader, mark)
        alike = [each for each in (*self._awaited, *self._left_again(loader)) if each.mark == mark]
        earlier = min(alike, key=lambda each: each.place != place, default=None)
        has_skipped = earlier is None and self._has_skipped(loader, mark)
        if has_skipped and not self._has_been_back and mark not in self._behind_last:
            self._generators.set(self._moment)
        self._behind_last = [each for each in self._behind_last if each != mark]
        self._own.begins(loader, mark, is_again=earlier is not None, has_skipped=has_skipped)
        own = generators_of(loader)
        if earlier is not None:
            self._awaited = [each for each in self._awaited if each is not earlier]
            self._had = [each for each in self._had if each is not earlier]
            self._again = [*(each for each in self._again if each is not earlier), earlier]
            # It is the same also for who does not skip where the script has seeded it as it did then.
            if earlier.moved and earlier.again is None:
                here = DrawnOrder(loader, self._generators)
                earlier.is_drawn = not here.is_as_in(earlier.began, earlier.own_began, earlier.moved)
            self._put_back(earlier, own)
            self._own.is_put_back(loader)
        rest_of = None if alike or has_skipped else self._rest_of(mark, own)
        had_workers = mark in self._kept or keeps_workers(loader) if earlier is None else earlier.keeps_workers
        self._kept = [each for each in self._kept if each != mark]
        epoch = LoaderEpoch(
            mark=mark,
            place=place,
            loader=ref(loader),
            keeps_workers=had_workers,
            is_drawn=False,
            order=DrawnOrder(loader, self._generators),
            draws_seed=not keeps_workers(loader),
            began=self._generators.states(),
            own_began=[each.get_state() for each in own],
            read={},
            reads=loader.num_workers == 0,
            earlier=earlier,
            rest_of=rest_of,
        )
        if had_workers and not keeps_workers(loader):
            self._undrawn = epoch, own
        self._note_looks(epoch, loader)
        if self._untrained is not None:
            self._left.update(tuple(each.mark) for each in self._untrained if each.is_left)
            self._untrained = [*(each for each in self._untrained if not each.is_left), epoch]
        return epoch

    def _rest_of(self, mark: list[Any], own: Sequence[Generator]) -> LoaderEpoch | None:
        """Return that of which a loader may be made for what is left; its order may be drawn as it was, to be left out.

        The script may begin it behind its latest batch, or with that once more.
        """
        if self._has_gradients():
            return None
        left = [each for each in self._awaited if each.is_recent]
        rests = [each for each in left if any(each.is_rest(mark, had=each.count - again) for again in (0, 1))]
        if not rests:
            return None
        self._put_back(rests[0], own if len(own) == len(rests[0].own_began) else ())
        return rests[0]

    def _note_looks(self, epoch: LoaderEpoch, loader: Any) -> None:
        """Note whether the script may begin this one to look at some batches, and how often it has done so before."""
        passed = [each for each in self._living() if each.loader() is loader and each.given and not each.is_passed]
        going_on = [each.mark for each in self._untrained_on() if each not in passed]
        alike = [each for each in self._living() if each.mark == epoch.mark]
        epoch.is_in_midst = any(each.trained and self._is_open(each) for each in alike)
        epoch.looks = self._looks.begins(epoch.mark, going_on, is_in_midst=epoch.is_in_midst)
        begun = [each.mark for each in self._untrained or ()].count(epoch.mark) + self._left[tuple(epoch.mark)]
        epoch.is_look = self._looks.is_look(epoch.mark, begun)
        for each in passed:
            each.passer, each.passed_at = epoch, each.given

    def _untrained_on(self) -> list[LoaderEpoch]:
        """Return those that the script goes through, and may train on in the place of those that it has trained on."""
        return [each for each in self._living() if not (each.trained or each.is_passed or each.is_in_midst)]

    def _has_skipped(self, loader: Any, mark: list[Any]) -> bool:
        """Return whether the script has had epochs of a loader with which it trains, and has not trained since.

        It skips whole epochs up to the end of one, and the next may be that in which it goes on; or it has looked at
        some batches, which it does not before each epoch.
        """
        left = [each for each in self._untrained or () if each.mark == mark and each.is_left_for(loader)]
        has_skipped = self._is_at_state(mark, self._left[tuple(mark)] + len(left))
        if has_skipped and not self._is_told_of_look and not self._looks.is_known(mark):
            self._is_told_of_look = True
            _tell(
                "before its first epoch the script has begun the DataLoader without training on it, and it is not "
                "known yet whether it does so before each one: the next epoch is taken for one before which it does "
                "not. Look at batches before restore(), where that makes no difference"
            )
        return has_skipped

    def _is_at_state(self, mark: list[Any], since: int) -> bool:
        """Return whether the script may be where the state was kept, as it has left so many epochs of a loader."""
        if not since or mark not in self._trained or self._has_gradients():
            return False
        return self._looks.is_at_state(mark, since)

    def _may_be_at_state(self, epoch: LoaderEpoch) -> bool:
        """Return whether the script, which is given the last batch of this epoch, may have skipped it as the last."""
        untrained = self._untrained or []
        if epoch not in untrained or epoch.earlier is not None or epoch.is_look:
            return False
        others = [each for each in untrained if each.mark == epoch.mark and each is not epoch]
        if any(each.given and not (each.is_left or each.has_given_all) for each in others):
            return False  # in the midst of that one: the script evaluates, say
        return self._is_at_state(epoch.mark, self._left[tuple(epoch.mark)] + len(others) + 1)

    def _put_back(self, epoch: LoaderEpoch, own: Sequence[Generator]) -> None:
        """Put the generators, and the loader's own, to where they were when this epoch began."""
        self._generators.set(epoch.began)
        for generator, state in zip(own, epoch.own_began, strict=False):
            generator.set_state(state)

    def draws_order(self) -> None:
        """What was drawn for new workers does not count where the script had workers when it began this epoch."""
        if self._undrawn is not None:
            self._put_back(*self._undrawn)
            self._undrawn[0].draws_seed = False
            self._undrawn = None

    def has_begun(self, noted: LoaderEpoch | None, batches: Any) -> _Batches | None:
        """Notes what gives the batches of that epoch, which may have given those of another before."""
        if noted is None:
            return None
        noted.batches, noted.behind_begin = ref(batches), self._generators.states()
        if noted.earlier is not None:
            noted.earlier.again = noted
        if noted.order is not None:
            noted.order.has_begun(has_drawn_seed=noted.draws_seed)
            noted.note_order()
        if not noted.reads:
            self._note_first(noted, first_index_given(batches))
        self._epochs = [*(each for each in self._living() if each.batches() is not batches), noted]
        if noted.earlier is not None and not noted.earlier.count:
            self._had_all_of(noted.earlier)
        return _Batches(self, noted)

    def before_batch(self, epoch: LoaderEpoch, number: int) -> None:
        """Notes where the generators are, or puts them to where they were before the last one that the script had."""
        if self._skipping and epoch.earlier in self._again and not self._has_gradients():
            self._generators.set(self._skipping)
        self._skipping = {}
        if epoch.is_early:
            self._begin_late(epoch)
        if (earlier := self._last_again(epoch, number)) is not None:
            self._generators.set(earlier.read)
        elif epoch.earlier in self._again and epoch.earlier is not None:
            if number == 1:  # then an order is drawn
                self._generators.set(epoch.earlier.first)
            elif number == epoch.earlier.since:
                self._generators.set(epoch.earlier.read_since)
        if epoch.reads:
            epoch.read = self._generators.states()
            epoch.first = epoch.first or epoch.read
            if epoch.given == epoch.trained:
                epoch.since, epoch.read_since = number, epoch.read

    def _begin_late(self, epoch: LoaderEpoch) -> None:
        """Draw what its loader draws when it begins, as it would have begun here without the restart."""
        epoch.is_early = False
        if is_same(self._generators.states(), self._moment):
            self._generators.set(epoch.behind_begin)
        elif epoch.reads:
            if (loader := epoch.loader()) is not None and loader.generator is None:
                draw_seed(loader)
        elif epoch.is_drawn:
            _tell(
                f"an iterator over the DataLoader was made before the script drew what it draws in each step: {_ADVICE}"
            )

    def behind_index(self, epoch: LoaderEpoch, index: Any) -> None:
        """Notes what is in the batch that is about to be read."""
        epoch.index = index
        if epoch.order is not None:
            epoch.order.behind_index()
            self._note_first(epoch, index)

    def _note_first(self, epoch: LoaderEpoch, index: Any) -> None:
        """Note with what it begins: in the midst of what it is again, or is the rest of, the script goes on at once.

        The generators are then where the state was kept, or before its last batch if it begins with that. A script that
        skips in spite of that finds the same as ever.
        """
        epoch.first_index = digest_of(index)
        of, is_again = epoch.rest_of, epoch.earlier is not None and epoch.earlier in self._again
        is_last = of is not None and not of.is_rest(epoch.mark, had=of.count)
        if is_again and epoch.earlier is not None:
            of = epoch.earlier if "" != epoch.earlier.first_index != epoch.first_index != "" else None
            is_last = of is not None and of.last_index == epoch.first_index
            epoch.offset = 0 if of is None else of.count - is_last
        if of is None or self._has_gradients():
            return
        epoch.within = of
        if is_last and of.last_index == epoch.first_index != "":  # so the order is the same
            self._awaited = [each for each in self._awaited if each is not of]
        self._generators.set(of.read if is_last and epoch.reads else self._moment)
        epoch.read = self._generators.states() if epoch.reads else {}
        epoch.is_at_last = is_last
        if not epoch.reads:
            self._wrong = _OTHER_NUMBERS

    def behind_batch(self, epoch: LoaderEpoch, number: int) -> None:
        """When the script has had of all what it had before, it is where the state was kept."""
        if epoch.order is not None:
            epoch.order.behind_batch()
            epoch.note_order()
            epoch.order = None
        if epoch.is_of_before:
            self._tell_of_before(epoch)
        if epoch.is_at_last:
            epoch.is_at_last = False
            self._generators.set(self._moment)
        if (earlier := self._last_again(epoch, number)) is not None:
            self._wrong = "" if self._has_gradients() or epoch.has_order_of(earlier) else _OTHER_ORDER
            self._had_all_of(earlier)
        elif number == epoch.mark[0] and self._may_be_at_state(epoch):
            self._generators.set(self._moment)  # what the script draws before it begins the next one counts
            self._behind_last.append(epoch.mark)

    def _had_all_of(self, earlier: LoaderEpoch) -> None:
        """Note that the script has had of this one what it had when the state was kept."""
        self._again.remove(earlier)
        self._had.append(earlier)
        if not self._again:
            self._generators.set(self._moment)

    def _tell_of_before(self, epoch: LoaderEpoch) -> None:
        """Tell of an epoch that was begun before the state was taken over, with which the script goes on."""
        epoch.is_of_before = False
        awaited = [each for each in self._awaited if each.mark == epoch.mark and each.is_recent]
        if self._untrained is None or not epoch.is_drawn or not (awaited or epoch.mark in self._trained):
            return
        self._awaited = [each for each in self._awaited if each not in awaited]
        _tell(f"an iterator over the DataLoader was made before restore(), so that {_OR}: make it behind that call")

    def end(self, epoch: LoaderEpoch) -> None:
        """Note that it has given all: the script is not in its middle any more."""
        epoch.has_ended = True
        if epoch.mark[0] is None:
            self._lengths = [*(each for each in self._lengths if each[0] != epoch.mark), (epoch.mark, epoch.given)]
        self._epochs = [each for each in self._living() if each is not epoch]

    def _left_again(self, loader: Any) -> list[LoaderEpoch]:
        """Return those that were begun again and left behind before this loader, and the script has not trained since.

        It skips whole epochs, or has looked at some batches, and the next one may be that which it was in.
        """
        found = [
            each
            for each in (*self._had, *self._again)
            if each.again is not None and each.again.is_left_for(loader) and not each.is_look
        ]
        return [] if found and self._has_gradients() else found

    def _place_of(self, loader: Any, mark: list[Any]) -> int:
        """Return that of this loader among those with its mark: of a new one the first that none which is there has."""
        begun = self._begun()
        place = next((place for known, place in begun if known is loader), None)
        if place is None:
            taken = {place for known, place in begun if mark_of(known) == mark}
            place = next(each for each in range(len(taken) + 1) if each not in taken)
            begun.append((loader, place))
        self._loaders = [(ref(known), place) for known, place in begun]
        return place

    def _begun(self) -> list[tuple[Any, int]]:
        """Return the loaders that the script has begun and that are there, each with its place."""
        return [(loader, place) for found, place in self._loaders if (loader := found()) is not None]

    def _is_of_one(self, mark: list[Any]) -> bool:
        """Return whether one loader alone has this mark, so that none that the script does not train on has it."""
        return [mark_of(loader) for loader, _ in self._begun()].count(mark) == 1

    def _last_again(self, epoch: LoaderEpoch, number: int) -> LoaderEpoch | None:
        """Return what this is again, if this batch is the last that the script had had of it."""
        earlier = epoch.earlier
        is_last = earlier is not None and earlier.count == number and earlier in self._again
        return earlier if is_last and not (number == 1 and epoch.within is earlier) else None

    def before_step(self, optimizer: Any) -> None:
        """The script trains on what it was given: it skips no more."""
        given = [each for each in self._living() if each.given and not each.is_passed]
        first = [(each.mark, each.looks) for each in given if not each.trained and not each.is_in_midst]
        if first:
            self._looks.trains(first, [each.mark for each in self._untrained_on() if not each.given])
        for each in given:
            if each.mark not in self._trained:
                self._trained = [*self._trained[1 - _KINDS_MAX :], each.mark]
            each.trained = each.given
        if self._untrained is None or is_initialising(optimizer):
            return
        if self._wrong:
            _tell(self._wrong)
            self._wrong = ""
        self._untrained, self._had = None, []
        self._left.clear()
        self._own.before_step()
        begun = [each.within for each in self._living()]
        awaited, self._awaited = self._awaited, []
        again, self._again = [each for each in self._again if each not in begun], []
        awaited, again = ([each for each in some if each.is_recent] for some in (awaited, again))
        if again:
            self._skips = False
            if not self._has_been_back:
                self._generators.set(self._moment)
        if any(each.is_drawn for each in (*awaited, *again)):
            what = "has not skipped what it had had of it" if again else "has begun it with another DataLoader"
            _tell(f"the script is in the middle of an epoch and {what}: {_ADVICE}")

    def _is_open(self, epoch: LoaderEpoch) -> bool:
        """Return whether there was more than the script had been given when it trained last, as far as is known."""
        lengths = [length for mark, length in self._lengths if mark == epoch.mark]
        length = lengths[0] if epoch.mark[0] is None and lengths else epoch.mark[0]
        return length is None or epoch.offset + epoch.trained < length

    def _living(self) -> list[LoaderEpoch]:
        self._epochs = [each for each in self._epochs if each.batches() is not None]
        return self._epochs


@dataclass(frozen=True)
class _Batches:
    """Those of one epoch."""

    epochs: OpenEpochs
    epoch: LoaderEpoch

    def before_batch(self, number: int) -> None:
        self.epochs.before_batch(self.epoch, number)

    def before_index(self) -> None:
        if self.epoch.order is not None:
            self.epoch.order.before_index()

    def behind_index(self, index: Any) -> None:
        self.epochs.behind_index(self.epoch, index)

    def behind_batch(self, number: int) -> None:
        self.epochs.behind_batch(self.epoch, number)

    def end(self) -> None:
        self.epochs.end(self.epoch)


def without_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of ``OpenEpochs`` that is for any rank: each has drawn numbers of its own."""
    epochs = [{**each, "own_began": [], **{name: {} for name in _STATES}} for each in state["epochs"]]
    return {**state, "epochs": epochs, "own": []}


def _is_begun_already(epoch: LoaderEpoch, by: LoaderEpoch) -> bool:
    """Return whether this one of a state is what the script has begun in this process, too, and had as much of."""
    if epoch.mark != by.mark or epoch.count != by.given:
        return False
    return not epoch.is_recent or is_same(epoch.began, by.began)


def _tell(why: str) -> None:
    if own_rank()[0] == 0:
        sys.stderr.write(f"unicron: {why}.\n")
