"""How a newcomer gets the state: from the nearest replicas while they compute, or in the group while all wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.base.text import counted, one_line
from unicron_elastic.state.layout import Layout, empty_tensors, rebuild
from unicron_elastic.state.pull.client import Pulled, SourcesLost, pull
from unicron_elastic.state.pull.server import Held, NotAtRest, StateServer, Unsendable
from unicron_elastic.training.group.sendable import NotSendableError, sendable
from unicron_elastic.training.snapshot.gate import StateGate
from unicron_elastic.training.step.collective import is_of_script
from unicron_elastic.training.step.module_values import ModuleValues
from unicron_elastic.training.step.randomness import Randomness
from unicron_elastic.training.step.shares import from_ranges
from unicron_elastic.training.step.trainable import Trainable
from unicron_elastic.worker.notices import StateTaken

REST_TIMEOUT_S = 60.0  # a step may take long, and its end is not at rest
PULL_TIMEOUT_S = 600.0
_WHY_CHARACTERS = 500
_MAY_PASS = (OSError, MemoryError, torch.OutOfMemoryError)  # another try may do better
_OF_TORCH = (RuntimeError, ValueError)  # which load_state_dict raises for what does not fit: its words say all


class NotTakenError(RuntimeError):
    """This process has not what the state of the others is for: it cannot train with them."""


class NotGivenError(Exception):
    """Those who train cannot give their state: what is registered there cannot be sent, as the text says."""


class HasState(Protocol):
    """A run."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""


class Servant:
    """Serves the state of a run, from the first time that it is asked for."""

    def __init__(self, run: HasState, gate: StateGate, where: Callable[[], tuple[int, int]]) -> None:
        """``where``: the total of the steps that this run is in, and its step."""
        self._run = run
        self._gate = gate
        self._where = where
        self._server: StateServer | None = None
        gate.on_expire = self._break_off

    def serve(self, key: str) -> dict[str, Any]:
        """Begins to serve those who know ``key``, if it does not yet; returns the address, and where this run is.

        Raises OSError.
        """
        if self._server is None:
            self._server = StateServer(self, bytes.fromhex(key))
        until, step = self._where()
        return {**self._server.address, "until": until, "step": step}

    def hold(self) -> Held:
        """Keeps the state as it is. Raises NotAtRest."""
        try:
            state = self._gate.hold(REST_TIMEOUT_S)
        except TimeoutError as error:
            raise NotAtRest(str(error)) from None
        try:
            layout, tensors = sendable(self._run)
        except NotSendableError as error:
            self._gate.release()
            raise Unsendable(str(error)) from None
        except BaseException:
            self._gate.release()
            raise
        return Held(step=state, layout=layout, tensors=tensors)

    def release(self, held: Held) -> None:  # noqa: ARG002 - one hold is like another
        """Lets the state go on."""
        self._gate.release()

    def _break_off(self) -> None:
        """The state is about to change: whoever has not copied all of it begins again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _said(error: Exception) -> str:
    """Return what it says, without torch's heading."""
    said = str(error) if isinstance(error, _OF_TORCH) else f"{type(error).__name__}: {error}"
    return re.sub(r"Error\(s\) in loading state_dict for \w+:\s*", "", said).rstrip(".")


def fetch_state(run: HasState, invitation: Mapping[str, Any]) -> Pulled | None:
    """Copies the state from where the invitation says and takes it over.

    None if all sources were lost on the way. Until the result is released the sources stay in their step. Raises
    NotGivenError if they cannot send it, and NotTakenError if it does not fit.
    """
    try:
        pulled = pull(invitation["sources"], bytes.fromhex(invitation["key"]), timeout_s=PULL_TIMEOUT_S)
    except SourcesLost as lost:
        if lost.refusal:
            raise NotGivenError(lost.refusal) from None
        return None
    except TimeoutError:
        return None
    run.load_state_dict(rebuild(pulled.layout, pulled.tensors))
    return pulled


def about_fetched(pulled: Pulled) -> StateTaken:
    """What the agent is told of it."""
    sources = tuple(f"{use.name} ({use.way})" for use in pulled.sources)
    return StateTaken(bytes_taken=pulled.bytes, took_s=pulled.took_s, sources=sources)


def about_taken(taken_bytes: int, took_s: float, node: str = "") -> StateTaken:
    """The same of a state that came by collectives. ``node``: what the giver's is called in the world."""
    host = node.partition("#")[0].rpartition("/")[0] or "another replica"
    return StateTaken(bytes_taken=taken_bytes, took_s=took_s, sources=(f"{host} (in the group)",))


class Exchange(Protocol):
    """The members of a world, connected."""

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to one member."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive from one member."""


def give_state(run: HasState, members: Exchange, destinations: Sequence[int], device: torch.device) -> None:
    """Sends these ranks the state, or why it cannot be sent, which ends nothing. Raises what a collective raises."""
    tensors = list[Tensor]()
    try:
        layout, tensors = sendable(run)
        told, sign = layout.to_json(), 1
    except NotSendableError as error:
        told, sign = str(error), -1
    parts = _parts(told, tensors, sign)
    for destination in destinations:
        for part in parts:
            members.send(part.to(device), destination)


def take_state(run: HasState, members: Exchange, source: int, device: torch.device) -> int:
    """Receives what ``give_state`` sends, and takes it over; its bytes. Raises what ``receive_state`` raises."""
    state, taken_bytes = receive_state(members, source, device)
    run.load_state_dict(state)
    return taken_bytes


def receive_state(members: Exchange, source: int, device: torch.device) -> tuple[Any, int]:
    """Receives what ``give_state`` sends: the state, and its bytes.

    Raises NotGivenError if it is not sent, and what a collective raises.
    """

    def receive(tensor: Tensor) -> Tensor:
        target = tensor.to(device)
        members.receive(target, source)
        return target

    return _received(receive)


class Broadcasts(Protocol):
    """The members of a world, connected."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all members what ``source`` has."""


def share_state(run: HasState, members: Broadcasts, source: int, device: torch.device, *, is_source: bool) -> Any:
    """Gives all members the state that the ``source`` has, and returns it; None there. All members call it.

    Raises what a collective raises, and NotSendableError.
    """

    def share(tensor: Tensor) -> Tensor:
        shared = tensor.to(device)
        members.broadcast(shared, source)
        return shared

    if is_source:
        layout, tensors = sendable(run)
        for part in _parts(layout.to_json(), tensors):
            share(part)
        return None
    state, _ = _received(share)
    return state


def _parts(told: str, tensors: Sequence[Tensor], sign: int = 1) -> list[Tensor]:
    """Return what is sent of a state, one part after the other. ``sign`` -1: ``told`` is why it is not."""
    text = torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)
    return [torch.tensor([sign * text.numel()]), text, *(_bytes(tensor) for tensor in tensors if tensor.numel())]


def _received(receive: Callable[[Tensor], Tensor]) -> tuple[Any, int]:
    """Return the state that comes in such parts, and its bytes; ``receive`` gets each, like the tensor it is given.

    Raises NotGivenError if it is not sent.
    """
    length = int(receive(torch.empty(1, dtype=torch.int64)))
    text = bytes(receive(torch.empty(abs(length), dtype=torch.uint8)).cpu().numpy()).decode()
    if length < 0:
        raise NotGivenError(text)
    layout = Layout.parse(text)
    tensors = empty_tensors(layout, "cpu")
    for tensor in tensors:
        if tensor.numel():
            target = _bytes(tensor)
            target.copy_(receive(torch.empty_like(target)))
    return rebuild(layout, tensors), layout.total_bytes


def _bytes(tensor: Tensor) -> Tensor:
    """View the tensor as bytes, whatever its type: back ends do not take all types."""
    return tensor.detach().reshape(-1).view(torch.uint8)


# What a newcomer gets from a member: the state of the run, and what its own script will not have done to the model.
#
# Scripts unfreeze layers and add them to their optimizer in one step alone, which is past when the newcomer begins.


Groups = list[list[int]]  # of one optimizer: in each group the positions of its parameters in the model


class Handover:
    """Of one process, to others of its job alone: what is saved has the state of the run and no more."""

    def __init__(
        self,
        run: HasState,
        trainable: Trainable,
        values: ModuleValues,
        optimizers: Sequence[Optimizer],
        until: Callable[[], int],
        *,
        randomness: Randomness,
        schedulers: Sequence[LRScheduler] = (),
    ) -> None:
        """``until``: the total of the steps that this process is in."""
        self._schedulers = schedulers
        self._run = run
        self._randomness = randomness
        self._until = until
        self.taken_until = 0  # the same, of the member whose state was taken
        self._trainable = trainable
        self._values = values
        self._optimizers = optimizers
        self._taken: Mapping[str, Any] | None = None
        self._yielded_groups = self._group_counts()

    def note_yield(self) -> None:
        """Notes what the script of a newcomer in this step is to find: what this one does before it, that does, too."""
        self._randomness.note_yield()
        self._yielded_groups = self._group_counts()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, what is trained and how, and which parameters each optimizer has in which group."""
        run = self._run.state_dict()
        run.pop("way", None)  # it is here, as it was at the last look
        return {
            "run": run,
            "model": self._trainable.state_dict(),
            "values": self._values.state_dict(),
            "optimizers": [self._groups(optimizer) for optimizer in self._optimizers],
            "until": self._until(),
            "yielded": self._randomness.yielded,
            "yielded_groups": self._yielded_groups,
        }

    def way(self) -> dict[str, Any]:
        """Return what a script does on its way, for one that begins again behind it: it does not do that once more."""
        groups = [self._groups(optimizer) for optimizer in self._optimizers]
        return {"model": self._trainable.present(), "values": self._values.state_dict(), "optimizers": groups}

    def take_groups(self, way: Mapping[str, Any]) -> None:
        """Adds the groups that optimizers were given on the way, if they have all that were there before."""
        if len(way["optimizers"]) != len(self._optimizers):
            return
        for optimizer, groups in zip(self._optimizers, way["optimizers"], strict=True):
            own = self._groups(optimizer)
            if groups is not None and own is not None and len(own) < len(groups) and groups[: len(own)] == own:
                self._regroup(optimizer, groups)

    def take_way(self, way: Mapping[str, Any]) -> str:
        """Takes over the rest of it, if that is there: what was saved may be read by another script, and has no more.

        Then returns what is trained otherwise here, if anything.
        """
        if "model" not in way:
            self._trainable.look()  # before steps() that is nobody else's look
            return self._trainable.tell_apart(from_ranges(way["trained"], len(self._trainable.parameters)))
        self._trainable.load_state_dict(way["model"])
        self._values.load_state_dict(way["values"])
        return ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes all of it over. Raises NotTakenError if it does not fit."""
        self._taken, self.taken_until = state, int(state["until"])
        try:
            for optimizer, groups in zip(self._optimizers, state["optimizers"], strict=True):
                if groups is not None and groups != self._groups(optimizer):
                    self._regroup(optimizer, groups)
            self._run.load_state_dict(state["run"])
            self._trainable.load_state_dict(state["model"])
            self._values.load_state_dict(state["values"])
            self._check_schedulers()
        except Exception as error:
            if is_of_script(error) or isinstance(error, _MAY_PASS):
                raise
            raise NotTakenError(
                f"the others' state does not fit: {one_line(_said(error), _WHY_CHARACTERS)}. The script has changed "
                "what it registered: a layer, a parameter or a group that comes on the way has to be there before "
                "run.steps(), frozen until its time (docs/going-on.md)"
            ) from (None if isinstance(error, _OF_TORCH) else error)

    def _check_schedulers(self) -> None:
        """Raises ValueError for one that would fail in its next step: functions are in no state."""
        for each in self._schedulers:
            functions, groups = getattr(each, "lr_lambdas", None), len(each.optimizer.param_groups)
            if functions is not None and len(functions) != groups:
                has = counted(len(functions), "function", "functions")
                raise ValueError(f"{type(each).__name__} has {has} for {groups} groups of its optimizer")

    def rewind(self) -> None:
        """Let the script of a newcomer do what the others did in their step before its first micro-batch.

        It draws what they drew, and adds to its optimizers the groups that they added, which are refused twice.
        """
        if self._taken is not None:
            self._randomness.rewind(self._taken["yielded"])
            for optimizer, count in zip(self._optimizers, self._taken["yielded_groups"], strict=True):
                del optimizer.param_groups[count:]

    def load(self) -> None:
        """Takes over once more what was taken last, if that is not forgotten: the script may have changed it."""
        if self._taken is not None:
            self.load_state_dict(self._taken)

    def load_again(self) -> None:
        """Takes over once more what was taken last, if that was not done, and forgets it.

        It is that of a member in its step. What scripts do before a step is in it, and a newcomer's does it again.
        """
        self.load()
        self.forget()

    def forget(self) -> None:
        """Takes over nothing once more: this script has not done what is in the state, and will."""
        self._taken = None

    def _group_counts(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self._optimizers]

    def _groups(self, optimizer: Optimizer) -> Groups | None:
        """None if it has a parameter that the model has not."""
        place = {id(parameter): position for position, parameter in enumerate(self._trainable.parameters)}
        groups = [[place.get(id(each), -1) for each in group["params"]] for group in optimizer.param_groups]
        return None if any(-1 in group for group in groups) else groups

    def _regroup(self, optimizer: Optimizer, groups: Groups) -> None:
        """Give the optimizer as many groups, of these parameters; all else of a group comes with its state."""
        parameters = self._trainable.parameters
        if any(position >= len(parameters) for group in groups for position in group):
            return  # it is another model, and will say so
        del optimizer.param_groups[len(groups) :]
        for group in optimizer.param_groups:
            group["params"] = []
        for number, positions in enumerate(groups):
            params = [parameters[position] for position in positions]
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = params
            elif "param_names" in optimizer.param_groups[0]:  # it takes none without names
                optimizer.add_param_group({"params": [(self._trainable.name(each), each) for each in params]})
            else:
                optimizer.add_param_group({"params": params})
