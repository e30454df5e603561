"""How a newcomer gets the state from the nearest replicas while they compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from unicron_elastic.state.layout import Layout, rebuild
from unicron_elastic.state.pull.client import Pulled, SourcesLost, pull
from unicron_elastic.state.pull.server import Held, NotAtRest, StateServer, Unsendable
from unicron_elastic.training.group.sendable import NotSendableError, Stateful, sendable
from unicron_elastic.training.snapshot.gate import StateGate
from unicron_elastic.worker.instructions import Invitation
from unicron_elastic.worker.notices import StateTaken

REST_TIMEOUT_S = 60.0  # a step may take long, and its end is not at rest
PULL_TIMEOUT_S = 600.0
WHOLE_TIMEOUT_S = 1.0  # a script may have given its modules other parameters for good, which the next look sees
_LOOK_S = 0.001


class NotGivenError(Exception):
    """Those who train cannot give their state: what is registered there cannot be sent, as the text says."""


class Servant:
    """Serves the state of a run, from the first time that it is asked for."""

    def __init__(
        self,
        run: Stateful,
        gate: StateGate,
        where: Callable[[], tuple[int, int]],
        is_whole: Callable[[], bool],
        *,
        patience_s: float = WHOLE_TIMEOUT_S,
    ) -> None:
        """``where``: the total of the steps that this run is in, and its step.

        ``is_whole``: no module has other parameters for a while, as within ``torch.func.functional_call``.
        """
        self._run = run
        self._gate = gate
        self._where = where
        self._is_whole = is_whole
        self._patience_s = patience_s
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
            layout, tensors = self._sendable()
        except NotSendableError as error:
            self._gate.release()
            raise Unsendable(str(error)) from None
        except BaseException:
            self._gate.release()
            raise
        return Held(step=state, layout=layout, tensors=tensors)

    def _sendable(self) -> tuple[Layout, list[Tensor]]:
        """Return the state, read while no module had other parameters. Raises what ``sendable`` raises."""
        end = time.monotonic() + self._patience_s
        while time.monotonic() < end:
            if self._is_whole():
                try:
                    found = sendable(self._run)
                except NotSendableError:
                    if self._is_whole():
                        raise
                else:
                    if self._is_whole():
                        return found
            time.sleep(_LOOK_S)
        return sendable(self._run)

    def release(self, held: Held) -> None:  # noqa: ARG002 - one hold is like another
        """Lets the state go on."""
        self._gate.release()

    def _break_off(self) -> None:
        """The state is about to change: whoever has not copied all of it begins again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def fetch_state(run: Stateful, invitation: Invitation) -> Pulled | None:
    """Copies the state from where the invitation says and takes it over.

    None if all sources were lost on the way. Until the result is released the sources stay in their step. Raises
    NotGivenError if they cannot send it, and NotTakenError if it does not fit.
    """
    try:
        pulled = pull(invitation.sources, bytes.fromhex(invitation.key), timeout_s=PULL_TIMEOUT_S)
    except SourcesLost as lost:
        if lost.refusal:
            raise NotGivenError(lost.refusal) from None
        return None
    except TimeoutError:
        return None
    try:
        run.load_state_dict(rebuild(pulled.layout, pulled.tensors))
    except BaseException:
        pulled.release()
        raise
    return pulled


def about_fetched(pulled: Pulled) -> StateTaken:
    """What the agent is told of a state that was fetched."""
    sources = tuple(f"{use.name} ({use.way})" for use in pulled.sources)
    return StateTaken(bytes_taken=pulled.bytes, took_s=pulled.took_s, sources=sources)
