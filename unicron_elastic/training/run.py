"""The run: what a training script says once, so that it survives the loss of ranks.

One script works alone, under torchrun and under unicron-run. Only under unicron-run do survivors go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.training.engine import Engine
from unicron_elastic.training.group.sendable import Stateful
from unicron_elastic.training.micro_batch_counts import MicroBatchCounts
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.registered import Registered
from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.shard.mates import Mates, present_mates
from unicron_elastic.training.snapshot.accumulated import AccumulatedGradients, tell_of_save
from unicron_elastic.training.snapshot.manager import SnapshotManager
from unicron_elastic.training.snapshot.open_epochs import OpenEpochs
from unicron_elastic.training.snapshot.place_of_call import PlaceOfCall
from unicron_elastic.training.snapshot.replication import BufferSync, Replication, reducers_of
from unicron_elastic.training.snapshot.requests import Requests
from unicron_elastic.training.snapshot.seldom_due import SeldomDue
from unicron_elastic.training.snapshot.unregistered import UnregisteredOptimizers
from unicron_elastic.training.step import buffers
from unicron_elastic.training.step.randomness import OF_SCRIPT, Randomness
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.whole_number import check_module, function, seconds, whole_number
from unicron_elastic.training.wrapped.engine_progress import NO_STEPS, check_options
from unicron_elastic.training.wrapped.registered_by import OF_LOOP, engine_of, registered_by

_DISTRIBUTED = (
    "the model must not be wrapped in DistributedDataParallel for run.steps(), which reduces its gradients: give Run "
    "the model that is inside (model.module)"
)


class Run:
    """Registers the training state, joins the job, and hands out steps.

    ``model``, ``optimizer``, ``scheduler``, ``scaler`` and whatever else is given by name are the state that a
    replacement of a lost rank gets from its peers. The gradients of ``model``'s parameters are summed up over the
    micro-batches of a step and reduced over all ranks: do not wrap it in DistributedDataParallel. A dict is state, too,
    as of what a script counts: it, and what is in it, is changed in place when the state of others is taken over.

    ``reproducible``: the parameters and losses are bitwise those of any other run with the same micro-batches, however
    many ranks there are and whichever of them are lost. ``seed`` seeds the random numbers of torch, Python and NumPy
    before each micro-batch, by step and index, so that dropout does not depend on who computes it; "script": with what
    the script has seeded each of them when its first step begins, on rank 0; None leaves them alone. ``backend`` is
    nccl for a model on GPUs, else gloo. ``timeout_s``: so long ranks wait for one that is idle; for one at work, or in
    a phase that it has named, they wait until it comes. ``join_patience_s`` is how long a step is held up for a
    newcomer that copies its state. ``on_regroup`` is called each time the process group was made anew.

    ``snapshot_every`` and ``peer_snapshot_every``: ``steps()`` keeps a snapshot in memory at each step that one of them
    divides, and those of the latter are copied to a neighbouring node; 0: none. ``replicated``: all ranks have the same
    state, and one may go on from another's; by default those in ``steps()``, and those with a model in
    DistributedDataParallel where there is no step of which each rank has its own, as its random numbers are.
    ``compare_every``: once in so many steps, more often in the first ones and after newcomers, and in the last, ranks
    compare digests of parameters, buffers and optimizer state before the optimizer steps, and one whose state is not
    that of most ends; 0: never.

    Raises TypeError for what cannot be registered, and for arguments of another type, and ValueError for a
    ``compare_every`` below 0.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        scaler: Any = None,
        reproducible: bool = False,
        seed: int | str | None = OF_SCRIPT,
        backend: str | None = None,
        timeout_s: float = 600.0,
        join_patience_s: float = 5.0,
        on_regroup: Callable[[], None] | None = None,
        snapshot_every: int = 0,
        peer_snapshot_every: int = 0,
        replicated: bool | None = None,
        compare_every: int = 100,
        **state: Stateful | dict[str, Any],
    ) -> None:
        check_module("model", model)
        reducers = reducers_of((model, optimizer, *state.values()))
        self._is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        self._why_no_steps = _DISTRIBUTED if self._is_wrapped else ""
        model = self._model = model.module if self._is_wrapped else model
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **state}
        self._registered = Registered({name: each for name, each in named.items() if each is not None})
        if why := self._registered.found_twice():
            raise WrongUseError(why)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        mates = self._mates = present_mates()
        self._randomness = Randomness(_checked_seed(seed), device, 0 if mates is None else mates.shard)
        self._gradients = AccumulatedGradients(self._registered.objects.values())
        self._buffer_sync = BufferSync(reducers)
        self._epochs = OpenEpochs(self._randomness.generators, self._gradients.has_new)
        self._unregistered = UnregisteredOptimizers(self._registered.objects.values())
        self._place = PlaceOfCall()
        self._requests = Requests(self._wait_kept)
        compare_every = whole_number("compare_every", compare_every)
        self._engine = Engine(
            model=model,
            scaler=scaler,
            registered=self._registered,
            state=self,
            randomness=self._randomness,
            is_reproducible=reproducible,
            backend=_backend(backend, device, mates),
            timeout_s=seconds("timeout_s", timeout_s),
            join_patience_s=seconds("join_patience_s", join_patience_s),
            on_regroup=function("on_regroup", on_regroup or None),
            replicas=Replicas(model, self._registered.objects, compare_every),
            mates=mates,
        )
        self._snapshot_every = whole_number("snapshot_every", snapshot_every or 0)
        self._peer_snapshot_every = whole_number("peer_snapshot_every", peer_snapshot_every or 0)
        self._is_in_steps = self._is_told_of_twice = False
        self._seldom_due = SeldomDue()
        self._snapshots = SnapshotManager(
            self,
            self._registered.objects,
            replication=Replication(
                self._registered.objects,
                reducers if self._is_wrapped else (),
                said=replicated if mates is None else False,
                digests=self._registered.digests,
            ),
            peer_every=self._peer_snapshot_every,
        )

    @classmethod
    def of(cls, accelerator: Any, **options: Any) -> Run:
        """Return the run of what an ``accelerate.Accelerator`` has prepared and registered for checkpointing.

        ``options`` are those of ``Run``, and more state by name. Its steps are for an ``InPlaceAccelerator``; with
        accelerate's own it keeps snapshots, and so it does of DeepSpeed's engine, which may stand for the Accelerator.
        Raises TypeError for what is neither, or has prepared no model, and WrongUseError for an engine that divides
        more than the optimizer's state.
        """
        is_in_place = hasattr(accelerator, "options_of_run")
        if is_in_place:
            options = accelerator.options_of_run(options)
        if (engine := engine_of(accelerator)) is not None:
            check_options(engine, options)
        run = cls(**registered_by(accelerator), **options)
        if engine is not None:
            run._why_no_steps = NO_STEPS
        if is_in_place:
            accelerator.run_begins(run)
        return run

    @property
    def rank(self) -> int:
        """This process's rank in the present world; before the first step, as the launcher says."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together now; before the first step, as the launcher says."""
        return self._engine.world_size

    @property
    def step(self) -> int:
        """How many optimizer steps the parameters have behind them."""
        return self._engine.state

    @property
    def is_passing(self) -> bool:
        """Whether this is a newcomer, and the others have the call of ``steps()`` behind them that it has just left.

        What stands between that call and the next one it need not do: it gets the others' state.
        """
        return self._engine.is_passing

    def steps(self, total: int, micro_batches: int | Callable[[int], int]) -> Iterator[Step]:
        """Yields the steps that are left of ``total``, each of ``micro_batches`` micro-batches.

        That is a number, or a function that returns it for the number of a step. Each rank asks it, also one that comes
        later, and all must get the same: so it depends on nothing but the step.

        A newcomer begins with the step that the others are in; of calls that they have behind them it gets none. All
        ranks make the same calls with the same totals. Raises ValueError for numbers below 1, TypeError for what
        is no whole number, for a model that is wrapped or divided among ranks, for a SparseAdam, and for what is
        registered and cannot be sent to a replacement, and RuntimeError if the loop of an earlier call has not come to
        its end, and if the members of the job do not train the same. For what ``micro_batches`` returns the same is
        raised in that step.
        """
        total, counts = whole_number("total", total), MicroBatchCounts(micro_batches)
        if total < 1 or counts.number < 1:
            raise ValueError(f"total and micro_batches must be 1 or more, got {total} and {counts.number}")
        if self._why_no_steps:
            raise TypeError(self._why_no_steps)
        if self._is_in_steps:
            raise WrongUseError(
                f"the loop over run.steps() before this one has not come to its end, in step {self.step}: it is still "
                "going on, or was left by break, return or an exception, and that step would be trained twice. Let the "
                "loop end; to stop early, give run.steps() smaller totals and make no further call"
            )
        self._snapshots.begin_steps(in_shards=self._mates is not None)
        self._gradients.is_off = True  # there is none where a step is yielded
        self._unregistered.is_kept = False
        engine = self._engine
        if engine.has_made(total) or not engine.join(total, counts):
            return
        self._is_in_steps = True
        if not engine.was_newcomer and engine.rank == 0:
            self._snapshots.begin(engine.state)
        while engine.state < total:
            step = Step(engine)
            self._requests.begin_step()
            engine.note_yield()
            yield step
            if not step.is_over:
                why = f"step {step.number} was left before 'for index in step' had ended: its gradients are not reduced"
                engine.guard.check_outside(why)
                raise WrongUseError(why)
            engine.end_optimizer_step()
            self._snapshots.note_reached(engine.state)
            if self._snapshot_every or self._peer_snapshot_every or self._snapshots.is_wanted:
                self.snapshot(engine.state, every=self._snapshot_every)
        engine.part()
        self._is_in_steps = self._is_told_of_twice = False

    # -- state that outlives this process -----------------------------------------------------------------------------

    def begin_at(self, step: int) -> None:
        """Says that the script has loaded a state with ``step`` optimizer steps behind it: ``steps()`` begins there.

        For checkpoints that are not of ``save``. All ranks call it before the first ``steps()``, with the same number,
        whenever the script begins; a replacement of a lost rank gets the others' state and step all the same.
        ``restore`` stands behind it, and takes over nothing that is older.

        Raises TypeError and ValueError for what is no whole number, or is below 0, and RuntimeError behind the first
        ``steps()``, and behind a ``restore`` that has taken over the state of another step. ``steps()`` raises
        RuntimeError if ranks begin with different steps.
        """
        step = whole_number("step", step)
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        if self._engine.is_member:
            raise WrongUseError(
                "run.begin_at(step) says with which step run.steps() begins, and has to stand before it"
            )
        if (restored := self._snapshots.restored) not in (None, step):
            raise WrongUseError(
                f"run.begin_at({step}) says that the script has loaded a state of its own, and run.restore() has taken "
                f"over the one of step {restored} before: load it and call begin_at() first, as restore() takes over "
                "nothing that is older"
            )
        self._snapshots.begin_at(step)
        self._engine.state = step

    def restore(self, folder: str | os.PathLike[str] | None = None) -> int:
        """Takes over the newest state that all ranks have; returns how many steps it has behind it, 0 if there is none.

        Behind ``begin_at(step)`` it takes over nothing older, and returns ``step`` if it takes over nothing. The state
        comes from this host's memory, from a neighbouring node's, or from ``folder``, where ``save`` put it. All ranks
        call it, after ``init_process_group`` if there is one; a replacement in ``steps()`` gets 0, and its state
        from the others. Raises ValueError if something else is registered here than the state has, and what
        ``load_state_dict`` raises for a state that does not fit.
        """
        self._requests.carry_out()
        return self._snapshots.restore(folder)

    def restore_placed(self) -> dict[str, Any]:
        """Does what ``restore`` does, for a loop that finds its place in the data and its random numbers.

        Returns where these were when the epoch began in whose middle the state is; nothing where that is not known.
        """
        of_loaders = self._epochs.state_dict()
        self.restore()
        began = self._epochs.began()
        self._epochs.load_state_dict(of_loaders)
        return began

    def snapshot(self, step: int, every: int = 1) -> bool:
        """Begins to copy the state after ``step`` optimizer steps to memory that survives this process.

        That is done at steps that ``every`` or ``peer_snapshot_every`` divide (0: at none), and when the job is to wait
        for nodes, while the next step computes: the next ``optimizer.step()`` waits for it. Between this call and that
        one, only the optimizers may change what they optimise. False if nothing was begun: without unicron-run nobody
        keeps it, a newcomer that passes by the steps of earlier ``steps()`` has nothing to keep, and gradients that
        FSDP2 has not reduced yet cannot be kept, which is told once, nor can two places of registered dicts that have
        become one object. Of several calls in a row with one number the first counts. All ranks call it.
        From the first ``steps()`` on it is a request: what is kept is the state with which ``steps()`` yields the next
        step; behind the last one nothing is, as a script would do again what it does there. Raises ValueError for
        negative numbers and there for another step than the script is in, and TypeError for a state that cannot be
        kept; of a request that is told, and ends nothing.
        """
        step, every = whole_number("step", step), whole_number("every", every)
        if step < 0 or every < 0:
            raise ValueError(f"step and every must be 0 or more, got {step} and {every}")
        if not self._engine.is_member:
            self._snapshots.note_reached(step)
            self._epochs.look()
            if self._place.note(step) and self._epochs.is_back():
                self._place.forget_taken()
        is_due = any(each and step % each == 0 for each in (every, self._peer_snapshot_every))
        if (why := self._seldom_due.sentence(step, every, is_due=is_due)) and self._engine.rank == 0:
            sys.stderr.write(f"unicron: {why}.\n")
        if self._engine.is_passing or not (is_due or self._snapshots.is_wanted):
            return False
        if self._is_behind_begin(step):
            return False
        if self._engine.is_member:
            self._check_step(step)
            self._requests.ask_of_next(lambda: self._snapshots.snapshot(self._engine.steps_made))
            return self._snapshots.is_on
        self._engine.state = step  # this script counts them
        is_kept = self._can_be_kept() and self._gradients.can_be_kept() and self._snapshots.snapshot(step)
        if is_kept:
            self._unregistered.begin()
        return is_kept

    def _is_behind_begin(self, step: int) -> bool:
        """Return whether the script has begun with this number, and has computed some of the step that is next."""
        is_first = step == self._snapshots.began_with and not self._engine.is_member
        return is_first and self._gradients.are_there()

    def _can_be_kept(self) -> bool:
        """Return whether what is registered is there, and no two places of it are one object; tells once if not."""
        why = self._registered.uninitialised() or self._registered.found_twice()
        if why and not self._is_told_of_twice:
            self._is_told_of_twice = True
            if self._engine.rank == 0:
                sys.stderr.write(f"unicron: no state is kept as long as it is so: {why}.\n")
        return not why

    def save(self, folder: str | os.PathLike[str], step: int, keep: int = 3) -> None:
        """Begins to write the state after ``step`` optimizer steps to ``folder``, of which the newest ``keep`` stay.

        All ranks call it. A newcomer that passes by the steps of earlier ``steps()`` writes nothing. What goes wrong
        there is said once, and ends nothing. From the first ``steps()`` on it is a request, as ``snapshot`` is, which
        ``wait_saved`` and the end of the script carry out, too. Raises ValueError for a ``keep`` below 1, for negative
        steps and there for another step than the script is in, and TypeError for a state that cannot be written; of a
        request that is told, and ends nothing.
        """
        step, keep = whole_number("step", step), whole_number("keep", keep)
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}: the newest state always stays")
        if self._engine.is_passing:
            return
        if self._engine.is_member:
            self._check_step(step)
            self._requests.ask(("save", os.fspath(folder)), lambda: self._save(folder, keep))
            return
        self._engine.state = step  # this script counts them
        if not self._can_be_kept():
            return
        if self._gradients.are_elsewhere or self._gradients.are_there():
            tell_of_save()
        self._save(folder, keep)

    def _save(self, folder: str | os.PathLike[str], keep: int) -> None:
        """Have it written: of several replicas of several processes, by the first one."""
        if self._mates is None:
            self._snapshots.save(folder, keep)
        elif self._engine.rank < self._mates.seats:
            self._snapshots.save(folder, keep, self._mates.seat)

    def _check_step(self, step: int) -> None:
        """Raise ValueError if that is not the step which the script is in: its count would be wrong once restored."""
        right = self._engine.steps_made
        if step != right:
            raise ValueError(f"step is how many optimizer steps the state has behind it, here {right}, and not {step}")

    def wait_saved(self) -> None:
        """Waits until what ``save`` was asked for is written: for sharded states, before ``destroy_process_group``."""
        self._requests.carry_out()
        self._snapshots.wait_saved()

    def _wait_kept(self) -> None:
        self._snapshots.wait()
        self._snapshots.wait_saved()

    def mean(self, value: Tensor | complex) -> Tensor:
        """The mean of ``value`` over all ranks, which must all ask for it, as for a loss on held-out data.

        ``value`` is a tensor of any type, or a number, and is summed in float64. The mean of floating and complex
        numbers is of their type, that of integers, booleans and Python's numbers of float64. Raises TypeError for what
        has no mean, as a sparse tensor, and RuntimeError if the ranks do not ask for means of the same type and shape
        equally often.

        For use between steps, and for reports. If ranks are lost on the way it is the mean of those that are left, the
        same on all of them: then ``is_partial``, and rank 0 says on stderr whose share is missing. A rank that misses
        the end of the script's last one, after which the others have ended, has its own: then too it ``is_partial``.
        """
        return self._engine.mean(value)

    def all_reduce(self, value: Tensor | complex) -> Tensor:
        """The sum of ``value`` over all ranks, as ``mean`` is the mean: ``value`` stays as it is.

        That of floating and complex numbers is of their type, that of integers and booleans int64, where 2**63 is not
        told from -2**63. Of ranks that are lost on the way it lacks the share, and ``is_partial``; and so on, as there.
        Raises TypeError for uint64 as well, and OverflowError for a number of Python's of 2**63 or more.
        """
        return self._engine.all_reduce(value)

    def broadcast_object(self, value: Any) -> Any:
        """What rank 0 has as ``value``, on all ranks, which must all call it: a copy, tensors on the model's device.

        It may be all that can be registered: nested dicts, lists and tuples of tensors, numbers, strings and bytes. For
        use between steps, as ``mean``. If rank 0 is lost on the way it is what the lowest rank has that is left, the
        same on all of them: then ``is_partial``. So each rank should give what all can go on with; who has it on rank 0
        alone must look. Raises TypeError for what cannot be sent, and what ``mean`` raises.
        """
        return self._engine.broadcast_object(value)

    @property
    def is_partial(self) -> bool:
        """Whether the latest ``mean`` lacks the share of a rank that was lost after the step.

        The same of ``all_reduce``; and whether what ``broadcast_object`` gave is that of another rank than 0.
        So it does in a newcomer that comes to the others in a later step, where it is what this rank has itself.
        """
        return self._engine.reports.is_partial

    def state_dict(self) -> dict[str, Any]:
        """All that is registered, the model's other buffers, and how far the run has come.

        Raises TypeError that names what does not give its state.
        """
        state = self._registered.state()
        hidden, loose = self._registered.hidden(state), self._registered.loose(state)
        state["model"] = self._engine.at_rest(state["model"])
        return {
            "state": state,
            "buffers": buffers.given(self._engine.named_buffers(), state["model"]),
            "hidden": hidden,
            "loose": loose,
            "steps": self._engine.steps_made,
            "random": self._randomness.state_dict(),
            **({} if self._engine.is_member else self._of_own_loop()),
            "lineage": self._snapshots.lineage,
            "way": self._engine.way(),
        }

    def _of_own_loop(self) -> dict[str, Any]:
        """Return what a state of a loop of the script's own has besides."""
        return {
            "epochs": self._epochs.state_dict(),
            "gradients": self._gradients.state_dict(),
            "buffer_sync": self._buffer_sync.state_dict(),
            "place": self._place.state_dict(),
        }

    def drawn(self) -> dict[str, str]:
        """Return where each generator is outside of micro-batches, as digests."""
        return self._randomness.drawn()

    def why_not(self, state_dict: dict[str, Any]) -> str:
        """Return why ``restore`` does not use what ``state_dict`` gave; "" if it does."""
        return self._engine.why_not(state_dict.get("way", {}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave.

        Raises ValueError if something else is registered here, and if a tensor of a module, an optimizer, the
        scheduler or the scaler is not what was received, bit for bit, when it is loaded.
        """
        self._snapshots.wait()
        state, here = state_dict["state"], self._registered.objects
        if set(state) - OF_LOOP != set(here) - OF_LOOP:
            raise ValueError(f"the state has {sorted(state)}, and here {sorted(here)} are registered")
        if "buffers" in state_dict:  # which what ``save`` wrote has not
            buffers.take(self._model, state_dict["buffers"], state["model"])
        way = state_dict.get("way", {})
        self._engine.take_groups(way)
        state = {name: each for name, each in state.items() if name in here}
        self._registered.load(state, state_dict.get("hidden", {}), state_dict.get("loose"))
        self._engine.take_way(way)
        self._gradients.load_state_dict(state_dict.get("gradients", {}))
        self._buffer_sync.load_state_dict(state_dict.get("buffer_sync", ()))
        self._randomness.load_state_dict(state_dict["random"])
        if "epochs" in state_dict:
            self._epochs.load_state_dict(state_dict["epochs"])
        # Where another rank has made the state, this one draws numbers of its own, and comes back to none.
        self._place.load_state_dict(state_dict.get("place", []) if state_dict["random"] else [])
        self._engine.state = int(state_dict["steps"])
        self._snapshots.lineage = int(state_dict["lineage"])


def _backend(given: str | None, device: torch.device, mates: Mates | None) -> str:
    """Return what carries collectives between replicas. Raises ValueError if replicas have another one within."""
    if mates is None:
        return given or ("nccl" if device.type == "cuda" else "gloo")
    if given not in (None, mates.backend):
        raise ValueError(f"backend is {given!r}, and replica_mesh() was given {mates.backend!r}: give it there alone")
    return mates.backend


def _checked_seed(seed: Any) -> int | str | None:
    """Return the seed. Raises TypeError or ValueError for what is none."""
    if isinstance(seed, str) and seed != OF_SCRIPT:
        raise ValueError(f"seed must be a whole number, None or {OF_SCRIPT!r}, got {seed!r}")
    return seed if seed is None or isinstance(seed, str) else whole_number("seed", seed)
