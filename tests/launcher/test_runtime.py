"""What an agent process owns: begun once, begun anew after a loss, and why workers start plainly."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unicron_elastic.launcher.agent.process.processes import Exit, KeeperLost
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.config.options import Options

if TYPE_CHECKING:
    from conftest import Lab

DEADLINE_S = 30.0
UNFIT = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


class Owner:
    """A runtime, the command of its workers, and the exits it was told of."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.runtime = Runtime(options)
        self.exits: list[Exit] = []
        self.runtime.on_exit = self.exits.append
        script = folder / "train.py"
        script.write_text("pass\n")
        modules = folder / "modules"  # beside the script, a module would stand in for a preloaded one
        modules.mkdir(exist_ok=True)
        (modules / "unfit.py").write_text(UNFIT)
        (modules / "slow.py").write_text("import time\ntime.sleep(600)\n")
        self.command = [sys.executable, "-u", str(script)]
        self.env = {**os.environ, "PYTHONPATH": str(modules)}

    def begin(self, *command: str) -> Runtime:
        self.runtime.begin(command or self.command, self.env)
        return self.runtime

    def wait(self, condition: Callable[[], object]) -> None:
        assert self.runtime.loop.run_until(lambda: bool(condition()), time.monotonic() + DEADLINE_S), "deadline passed"

    def kill_keeper(self) -> None:
        os.kill(self.runtime.processes.keeper_pid, signal.SIGKILL)
        self.wait(lambda: not self.runtime.processes.is_up)


MakeOwner = Callable[..., Owner]


@pytest.fixture
def make_owner(tmp_path: Path) -> Iterator[MakeOwner]:
    """Makes owners whose warm process preloads next to nothing."""
    made: list[Owner] = []

    def make(*, preload: str = "colorsys", warm: bool = True, in_band: bool = True) -> Owner:
        made.append(Owner(tmp_path, Options(preload=preload, warm=warm, in_band=in_band)))
        return made[-1]

    yield make
    for owner in made:
        owner.runtime.end()


def test_a_second_begin_changes_nothing(make_owner: MakeOwner) -> None:
    owner = make_owner()
    runtime = owner.begin()
    keeper, warm = runtime.processes.keeper_pid, runtime.warm
    assert warm is not None
    assert owner.begin().warm is warm
    assert runtime.ready_warm() is warm
    assert owner.begin().ready_warm() is warm
    assert runtime.processes.keeper_pid == keeper
    assert runtime.why_plain is None


@pytest.mark.parametrize("how", ["no command", "warm off", "in-band off"])
def test_without_a_warm_process_nothing_is_complained_of(make_owner: MakeOwner, how: str) -> None:
    owner = make_owner(warm=how != "warm off", in_band=how != "in-band off")
    runtime = owner.runtime
    runtime.begin(None if how == "no command" else owner.command, owner.env)
    assert runtime.processes.is_up
    assert runtime.ready_warm() is None
    assert runtime.why_plain is None


def test_a_command_that_is_not_this_python_starts_plainly_and_says_so(make_owner: MakeOwner) -> None:
    runtime = make_owner().begin("/bin/true")
    assert runtime.ready_warm() is None
    assert (
        runtime.why_plain
        == "the workers do not run this Python interpreter, so that nobody keeps snapshots of a Run in them"
    )


@pytest.mark.parametrize(
    ("preload", "why"),
    [("unfit", "thread"), ("no_such_module", "cannot import no_such_module"), ("colorsys,?no_such_module", None)],
)
def test_a_warm_process_says_why_it_cannot_serve(make_owner: MakeOwner, preload: str, why: str | None) -> None:
    runtime = make_owner(preload=preload).begin()
    if why is None:
        assert runtime.ready_warm() is not None
        return
    assert runtime.ready_warm() is None
    assert runtime.why_plain is not None
    assert runtime.why_plain.startswith("the warm process cannot serve: ")
    assert why in runtime.why_plain


def test_one_that_cannot_serve_is_not_tried_again(make_owner: MakeOwner) -> None:
    # It would import torch anew for each generation, and each would wait for it, to hear the same refusal.
    owner = make_owner(preload="unfit")
    runtime = owner.begin()
    assert runtime.ready_warm() is None
    why = runtime.why_plain
    owner.begin()
    assert runtime.warm is None
    assert runtime.ready_warm() is None
    assert runtime.why_plain == why


def test_one_that_died_is_replaced(make_owner: MakeOwner) -> None:
    owner = make_owner()
    first = owner.begin().ready_warm()
    assert first is not None
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    owner.wait(lambda: first.is_gone)
    second = owner.begin().ready_warm()
    assert second is not None
    assert second is not first
    assert owner.runtime.why_plain is None


def test_one_that_dies_unnoticed_is_noticed_when_it_is_needed(make_owner: MakeOwner, lab: Lab) -> None:
    owner = make_owner()
    runtime = owner.begin()
    warm = runtime.ready_warm()
    assert warm is not None
    assert warm.pid is not None
    pid = warm.pid
    os.kill(pid, signal.SIGKILL)
    lab.wait_for_death(pid)  # the loop does not run meanwhile
    owner.wait(lambda: any(ended.pid == pid for ended in owner.exits))
    owner.wait(lambda: warm.is_gone)
    assert runtime.ready_warm() is None
    assert runtime.why_plain == "the warm process cannot serve: it died"


def test_a_sweep_spares_the_warm_process(make_owner: MakeOwner, lab: Lab) -> None:
    runtime = make_owner().begin()
    warm = runtime.ready_warm()
    assert warm is not None
    assert warm.pid is not None
    number = runtime.processes.request_start(["/bin/sleep", "600"], {}, "/", {})
    left_behind = runtime.processes.wait_for_pid(number, "sleep")
    runtime.sweep()
    assert not lab.is_alive(left_behind)
    assert lab.is_alive(warm.pid)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_sweep_without_a_keeper_has_nothing_to_do(make_owner: MakeOwner, is_noticed: bool) -> None:
    owner = make_owner(warm=False)
    runtime = owner.begin()
    if is_noticed:
        owner.kill_keeper()
    else:
        keeper = os.pidfd_open(runtime.processes.keeper_pid)
        os.kill(runtime.processes.keeper_pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, keeper, os.WEXITED | os.WNOWAIT)
        os.close(keeper)
    runtime.sweep()
    assert not runtime.processes.is_up


def test_a_lost_keeper_is_replaced_and_its_warm_process_too(make_owner: MakeOwner) -> None:
    owner = make_owner()
    runtime = owner.begin()
    first = runtime.ready_warm()
    assert first is not None
    owner.kill_keeper()
    owner.wait(lambda: first.is_gone)
    with pytest.raises(KeeperLost):
        runtime.processes.request_start(["/bin/true"], {}, "/", {})
    second = owner.begin().ready_warm()
    assert second is not None
    assert second is not first


def test_the_end_takes_everything_along_and_may_come_twice(make_owner: MakeOwner, lab: Lab) -> None:
    runtime = make_owner().begin()
    warm = runtime.ready_warm()
    assert warm is not None
    pids = [runtime.processes.keeper_pid, warm.pid]
    runtime.end()
    for pid in pids:
        assert pid is not None
        assert not lab.is_alive(pid)
    runtime.end()
    runtime.sweep()


def test_an_end_before_the_beginning_is_no_error(make_owner: MakeOwner) -> None:
    make_owner().runtime.end()


def test_an_end_while_it_imports_waits_for_nothing(make_owner: MakeOwner, lab: Lab) -> None:
    runtime = make_owner(preload="slow").begin()
    number = runtime.processes.request_start(["/bin/sleep", "600"], {}, "/", {})
    worker = runtime.processes.wait_for_pid(number, "sleep")  # the keeper is up and has heard of the start
    runtime.end()
    assert not lab.is_alive(runtime.processes.keeper_pid)
    assert not lab.is_alive(worker)
