"""How fast a state comes from the nearest peers, beside what the same processes can do without us.

    python benchmarks/state_transfer.py [--megabytes 500] [--repeats 7]

Same host: beside copying a tensor of the same size in one thread. TCP: beside a plain socket between the same two
processes. Three peers against one: on hosts made of network namespaces, each of which sends at a limited rate (root
only). Runs alternate, ratios are of neighbours; it prints a Markdown table of medians with extremes.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _exit_when_told import exit_when_told

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.chunks import view_of
from unicron_elastic.state.pull.client import pull
from unicron_elastic.state.pull.server import Held, StateServer

KEY = b"benchmark"
TENSORS = 40
PLAIN_BYTES = 1024 * 1024


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors that are together this large."""
    words = megabytes * 1_000_000 // 8 // TENSORS
    draw = torch.Generator().manual_seed(0)
    return {f"tensor_{n}": torch.randint(-(2**62), 2**62, (words,), generator=draw) for n in range(TENSORS)}


class Source:
    """Holds its state at once."""

    def __init__(self, state: Any) -> None:
        self.layout, self.tensors = flatten(state)

    def hold(self) -> Held:
        """The state."""
        return Held(1, self.layout, self.tensors)

    def release(self, held: Held) -> None:
        """Nothing waits for it."""


def serve(megabytes: int, host: str) -> None:
    """A source, and a plain socket that sends the same bytes, until stdin ends."""
    torch.set_num_threads(1)
    source = Source(make_state(megabytes))
    server = StateServer(source, KEY, host)
    plain = socket.create_server((host, 0))
    views = [view_of(tensor.data_ptr(), tensor.nbytes) for tensor in source.tensors]

    def send_plainly() -> None:
        while True:
            connection, _ = plain.accept()
            with connection:
                for view in views:
                    connection.sendall(view)

    threading.Thread(target=send_plainly, daemon=True).start()
    print(json.dumps({"address": server.address, "plain": plain.getsockname()}), flush=True)
    sys.stdin.read()
    server.close()


def own_command(megabytes: int, host: str) -> list[str]:
    """The command line of a source."""
    return [sys.executable, str(Path(__file__).resolve()), "--serve", host, "--megabytes", str(megabytes)]


def first_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a source says of itself."""
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.readline())
    return told


def seconds(call: Callable[[], None]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def get(addresses: Sequence[dict[str, Any]], into: list[torch.Tensor], way: str) -> None:
    """Pulls once, in the way that is to be measured."""
    pulled = pull(addresses, KEY, step=1, into=into)
    pulled.release()
    assert {use.way for use in pulled.sources} == {way}, pulled.sources
    assert not pulled.notes, pulled.notes


def receive_plainly(address: tuple[str, int], into: Sequence[torch.Tensor]) -> None:
    """Receives the same bytes over a plain socket."""
    with socket.create_connection(address) as connection:
        for tensor in into:
            view = view_of(tensor.data_ptr(), tensor.nbytes)
            done = 0
            while done < len(view):
                done += connection.recv_into(view[done : done + PLAIN_BYTES])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and extremes."""
    middle, low, high = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} [{low}-{high}]"


def compare(name: str, ours: Callable[[], None], others: Callable[[], None], size: int, repeats: int) -> str:
    """A row of the table: both in turns, after a first time each that does not count."""
    ours()
    others()
    pairs = [(seconds(ours), seconds(others)) for _ in range(repeats)]
    rates = [[size / took / 1e9 for took in column] for column in zip(*pairs, strict=True)]
    ratios = [other / own for own, other in pairs]
    return f"| {name} | {spread(rates[0])} | {spread(rates[1])} | {spread(ratios)} |"


def local_rows(megabytes: int, repeats: int) -> Iterator[str]:
    """Same host, and TCP between two processes of it."""
    command = own_command(megabytes, "127.0.0.1")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        told = first_line(process)
        source, into = Source(make_state(megabytes)), make_state(megabytes)
        here, size = list(into.values()), source.layout.total_bytes

        def copy() -> None:
            for target, tensor in zip(here, source.tensors, strict=True):
                target.copy_(tensor)

        def memory() -> None:
            get([told["address"]], here, "memory")

        def tcp() -> None:
            get([{**told["address"], "boot_id": "elsewhere"}], here, "TCP")

        yield compare("same host, memory / one tensor copy", memory, copy, size, repeats)
        yield compare("TCP / plain socket", tcp, lambda: receive_plainly(tuple(told["plain"]), here), size, repeats)
        assert all(torch.equal(a, b) for a, b in zip(here, source.tensors, strict=True))
    finally:
        process.kill()


@contextmanager
def limited_hosts(megabytes: int, rate_mbit: int) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """A host that receives, and the addresses of three sources on hosts that send at a limited rate."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))
    from hosts import Network, run_tool

    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        network = opened.enter_context(Network(folder))
        receiver, *senders = network.add("receiver", "a", "b", "c")
        addresses = []
        for sender in senders:
            limit = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "256k", "latency", "50ms"]
            run_tool("tc", "-netns", sender.namespace, "qdisc", "replace", "dev", "eth0", "root", *limit)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": None}
            addresses.append(first_line(sender.start(own_command(megabytes, sender.address), **pipes))["address"])
        yield receiver, addresses


def limited_row(megabytes: int, repeats: int, rate_mbit: int) -> str:
    """Three peers against one of them."""
    with limited_hosts(megabytes, rate_mbit) as (receiver, addresses):
        here = list(make_state(megabytes).values())
        size = sum(tensor.nbytes for tensor in here)
        name = f"three peers / one, {rate_mbit} Mbit/s each"

        def three() -> None:
            receiver.within(lambda: get(addresses, here, "TCP"))

        def one() -> None:
            receiver.within(lambda: get(addresses[:1], here, "TCP"))

        return compare(name, three, one, size, repeats)


def main() -> None:
    """Measures all and prints the table."""
    exit_when_told()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limited-repeats", type=int, default=3)
    parser.add_argument("--rate-mbit", type=int, default=1000)
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(told.megabytes, told.serve)
        return
    torch.set_num_threads(1)
    print(f"{told.megabytes} MB; rates in GB/s\n\n| ours / beside it | ours | beside it | ratio |\n|---|---|---|---|")
    for row in local_rows(told.megabytes, told.repeats):
        print(row, flush=True)
    try:
        print(limited_row(told.megabytes, told.limited_repeats, told.rate_mbit), flush=True)
    except RuntimeError as why:
        print(f"\nThree peers were not measured: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
