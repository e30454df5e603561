"""Two workers that run a script made for ft_launcher, and what an agent sees of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import WarmLaunchers, environment_of_no_job

from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.link import HEARTBEATS_WAITED_FOR
from unicron_elastic.worker.pulse import TRAIN, PulsePage, PulseReading

DEADLINE_S = 60.0

# What the bootstrap does in a worker.
PRELUDE = """
import sys
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.notices import FirstStep
from unicron_elastic.worker.phases import announce_phases
from unicron_elastic.worker.pulse import Pulse
from unicron_elastic.worker.rank_monitor.finder import offer_rank_monitor
from unicron_elastic.worker.step_count import count_steps
control, pulse = Control(int(sys.argv[1])), Pulse(int(sys.argv[2]))
count_steps(pulse, lambda step: AGENT.say(FirstStep(step=step)))
announce_phases(pulse)
offer_rank_monitor(control, pulse)
"""

SCRIPT = """
import json, os, time
import torch, torch.distributed as dist
import torch.distributed.nn  # before the group, which it would else hold at exit: torch then aborts now and then
import nvidia_resiliency_ext.fault_tolerance as ft

def pause(what):  # until the test has looked
    print(what, flush=True)
    assert sys.stdin.readline()

rank, folder = int(os.environ["RANK"]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
client = ft.RankMonitorClient()
client.init_workload_monitoring()
client.start_section("setup")
pause("setup")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
client.end_section("setup")
for step in range(8):
    client.start_section("step")
    model(torch.ones(1, 2)).sum().backward()
    client.send_heartbeat()
    if sys.argv[4] == "torch":
        optimizer.step()
    client.end_section("step")
    time.sleep(0.01 * (1 + rank))
pause("trained")
if rank == 0:
    client.start_section("checkpointing")
    pause("checkpointing")
    client.end_section("checkpointing")
else:
    pause("waiting")
client.calculate_and_set_hb_timeouts()
client.calculate_and_set_section_timeouts(["setup", "step", "checkpointing"], calc_out_of_section=True)
print(json.dumps(client.state_dict()), flush=True)
dist.destroy_process_group()
client.shutdown_workload_monitoring()
"""


class Worker:
    """A process, and the agent's ends of its streams, page and channel."""

    def __init__(self, rank: int, folder: Path, optimizer: str, warm: WarmLaunchers) -> None:
        self._page = PulsePage()
        self._channel, theirs = Channel.pair()
        (reads, told), (said, writes) = os.pipe(), os.pipe()
        self._told, self._said = os.fdopen(told, "w"), os.fdopen(said)
        script = folder / "script.py"
        script.write_text(PRELUDE + SCRIPT)
        files = [reads, writes, sys.__stderr__.fileno(), theirs.fileno(), self._page.fd]
        env = {**environment_of_no_job(folder), "RANK": str(rank), "WORLD_SIZE": "2"}
        command = [str(script), "3", "4", str(folder), optimizer]
        self.process = warm.start(command, env, folder, files, ends_as_script=True)
        for each in (reads, writes):
            os.close(each)
        theirs.close()
        self._channel.settimeout(0.0)

    def line(self) -> str:
        return self._said.readline().strip()

    def go_on(self) -> None:
        self._told.write("\n")
        self._told.flush()

    def read(self) -> PulseReading:
        reading = self._page.read()
        assert reading is not None
        return reading

    def heard(self, is_there: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """What was said, as soon as it ``is_there``."""
        messages: list[dict[str, Any]] = []
        end = time.monotonic() + DEADLINE_S
        while not is_there(messages):
            assert time.monotonic() < end, messages
            try:
                messages.append(self._channel.receive()[0])
            except BlockingIOError:
                time.sleep(0.01)
        return messages

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for each in (self._told, self._said):
            each.close()
        self._channel.close()
        self._page.close()


@pytest.mark.parametrize(("optimizer", "steps"), [("torch", 8), ("another", 8 - HEARTBEATS_WAITED_FOR)])
def test_a_script_for_ft_launcher(tmp_path: Path, optimizer: str, steps: int, warm_launchers: WarmLaunchers) -> None:
    workers = [Worker(rank, tmp_path, optimizer, warm_launchers) for rank in (0, 1)]
    try:
        for worker in workers:
            assert worker.line() == "setup"
            assert (worker.read().phase, worker.read().step) == ("setup", 0)
            worker.go_on()
        for worker in workers:
            assert worker.line() == "trained"
            assert (worker.read().phase, worker.read().step) == (TRAIN, steps)
            worker.go_on()
        assert [worker.line() for worker in workers] == ["checkpointing", "waiting"]
        assert [worker.read().phase for worker in workers] == ["checkpointing", TRAIN]
        for worker in workers:
            worker.go_on()
        states = [json.loads(worker.line())["current_timeouts"] for worker in workers]
        assert states[0] == states[1]  # the second never saved a checkpoint
        assert states[0]["section"]["calculated_sections"] == ["checkpointing", "setup", "step"]
        limits = {"sections_s": states[0]["section"]["section"], "heartbeat_s": states[0]["heartbeat"]["subsequent"]}
        for worker in workers:
            assert worker.process.wait(DEADLINE_S) == 0
            said = worker.heard(lambda messages: any(m.get("sections_s") for m in messages))
            assert {"is": "FirstStep", "step": 1, "stack_fd": None} in said
            assert limits.items() <= said[-1].items()
    finally:
        for worker in workers:
            worker.end()
