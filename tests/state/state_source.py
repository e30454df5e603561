"""A process that serves a state until its stdin ends: ``state_source.py '{"seed": 0, "words": 1000, ...}'``.

Its first line is the address of its server. For each hold and each release another line follows.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.server import Held, NotAtRest, StateServer


def make_state(seed: int = 0, words: int = 1000, extra: int = 0) -> dict[str, Any]:
    """A state with tensors of many kinds, of which the largest has ``words`` 64-bit words; always the same."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randint(-(2**62), 2**62, (words,), generator=draw),
            "bias": torch.randn(1000 + extra, generator=draw).bfloat16(),
            "mask": torch.randn(77, generator=draw) > 0,
            "empty": torch.empty(0, 4),
        },
        "optimizer": {"state": {n: {"step": torch.tensor(float(n))} for n in range(300)}, "lr": 0.1},
        "seed": seed,
    }


class Source:
    """Holds its state at once, or refuses to, and says so on stdout."""

    def __init__(self, step: int, refusal: str, state: dict[str, Any]) -> None:
        self._step = step
        self._refusal = refusal
        self._layout, self._tensors = flatten(state)

    def hold(self) -> Held:
        """The state, or the refusal."""
        if self._refusal:
            raise NotAtRest(self._refusal)
        print("held", flush=True)
        return Held(self._step, self._layout, self._tensors)

    def release(self, held: Held) -> None:
        """Says that it was released."""
        assert held.step == self._step
        print("released", flush=True)


def main() -> None:
    """Serves until stdin ends."""
    torch.set_num_threads(1)
    told = {"seed": 0, "words": 1000, "extra": 0, "step": 7, "key": "key", "rack": "", "refusal": ""}
    told |= json.loads(sys.argv[1])
    state = make_state(told["seed"], told["words"], told["extra"])
    server = StateServer(Source(told["step"], told["refusal"], state), told["key"].encode(), rack=told["rack"])
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()
    assert threading.current_thread() is threading.main_thread()
    server.close()


if __name__ == "__main__":
    main()
