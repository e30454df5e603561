"""A job whose keeper and warm process are forks of a process with torch is one with those that were started anew."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
LOOK = """
import json, os, random, signal, sys, time
import torch
own = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TMPDIR", "TEST_RUN"}
environ = {name: value for name, value in os.environ.items() if name not in own and not name.startswith("UNICRON_")}
def stream(each):
    return [type(each.buffer).__name__, *(str(getattr(each, name)) for name in (
        "name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through"))]
seen = {
    "env": environ, "cwd": os.getcwd(), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "main": sorted(vars(sys.modules["__main__"])), "file": __file__, "comm": open("/proc/self/comm").read(),
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "umask": os.umask(0o22),
    "parent": open(f"/proc/{os.getppid()}/comm").read(),
    "kernel": [line for line in open("/proc/self/status") if line.startswith(("SigI", "SigB", "SigC"))],
    "handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()],
    "files": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{name}")).partition(":")[0].partition("-")[0]
                    for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "streams": [stream(each) for each in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__)],
    "launcher": [name for name in sys.modules if name.startswith("unicron_elastic.launcher")],
    "random": [random.random(), torch.rand(1).item()], "shown": open("/proc/self/cmdline").read().split("\\0")[1:3],
}
with open("seen", "w") as file:
    json.dump(seen, file)
print("seen", flush=True)
if sys.argv[1] == "fail":
    raise MemoryError("struck")
sys.exit(int(sys.argv[1]))
"""


def _seen(launcher: Any, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    script = launcher.script("look.py", LOOK)
    run = launcher.run("--nproc-per-node=1", "--unicron-ledger=ledger", script, how, fast=False)
    assert run.process.returncode == 1, run.err
    last = json.loads((launcher.folder / "ledger").read_text().splitlines()[-1])
    names = ("exit_code", "exception_type", "message", "stack", "location", "step")
    return json.loads((launcher.folder / "seen").read_text()), {name: last[name] for name in names}


@pytest.mark.parametrize("how", ["3", "fail"])
def test_a_script_sees_and_tells_the_same(launcher: Any, how: str) -> None:
    forked, told = _seen(launcher, how)
    launcher.warm, launcher.forks_keeper = None, False
    anew, told_anew = _seen(launcher, how)
    assert forked.pop("random") != anew.pop("random")
    assert forked.pop("shown") != anew.pop("shown") == ["-u", "look.py"]  # so it was a fork
    assert {name: (forked[name], anew[name]) for name in anew if forked[name] != anew[name]} == {}
    assert told == told_anew


def test_it_trains_to_the_same_bits_and_loses_a_worker_alike(launcher: Any) -> None:
    finals = []
    for warm, forks_keeper in ((launcher.warm, True), (None, False)):
        launcher.warm, launcher.forks_keeper = warm, forks_keeper
        (launcher.folder / "struck-1-2-reduce").unlink(missing_ok=True)
        run = launcher.run("--standalone", "--nproc-per-node=2", "--max-restarts=3", IN_PLACE,
                           "--strike=1:2:reduce:kill", "--wait-for-worlds=3", fast=False)  # fmt: skip
        assert run.process.returncode == 0, run.err
        assert "Restart 1 of 3." in run.err
        finals.append([json.loads((launcher.folder / f"final-{rank}.json").read_text()) for rank in (0, 1)])
    assert finals[0] == finals[1]


@pytest.mark.parametrize("name", ["launcher", "unicron-keeper"])
def test_all_end_with_the_launcher_and_the_workers_with_the_keeper(launcher: Any, name: str) -> None:
    launcher.script("sleep.py", "import time, torch; print('here', flush=True); time.sleep(60)")
    run = launcher.start("--nproc-per-node=1", "--max-restarts=1", "sleep.py")
    run.until_line("here")
    os.kill(run.process.pid if name == "launcher" else run.named(name), signal.SIGKILL)
    if name == "unicron-keeper":
        run.until_line("here", count=2)  # of a worker of another keeper, which is started anew
        run.process.terminate()
    run.wait()
    run.assert_gone()
