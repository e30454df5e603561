"""The order of a CUDA stream: what touches a tensor whose result is on its way waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from unicron_elastic.compat.dispatch import DispatchMode, leaves
from unicron_elastic.testing.late.late_event import event_of, pending, unseen


class StreamOrder(DispatchMode):
    """While `StreamOrder` lasts, an operation waits for results that are on their way to its tensors.

    So do kernels behind a collective on a CUDA stream, and ``.item()``; after an abort they go on, with garbage.
    Without it the next line sees garbage: stricter than CUDA, and right for what runs on another stream, in shared
    memory, or behind a socket.
    """

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let the operation run when its tensors are there.

        Of what one on a DTensor is made nobody sees: there each collective is waited for, as if by what follows it.
        """
        named = dict(kwargs or {})
        if pending:
            for each in leaves((args, named)):
                if isinstance(each, Tensor):
                    _await(each)
        if all(kind in (Tensor, Parameter) for kind in types):
            return function(*args, **named)
        with unseen:
            return function(*args, **named)


def _await(tensor: Tensor) -> None:
    try:
        event = event_of(tensor)
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has no memory of its own: a DTensor, a fake one
        return
    if event is not None:
        event.synchronize()
        if pending.get(address) is event:
            del pending[address]
