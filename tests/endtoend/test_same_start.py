"""What a script can observe of its start is what torchrun gives it, started warm or plainly."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

PROBE = """
import json, os, resource, signal, sys
def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split("/")[-1].split("-")[0].split(":")[0]
    except OSError:
        return None
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags), "cwd": os.getcwd(),
    "main": [__file__, __name__, __package__, __cached__, __spec__ and (__spec__.name, __spec__.origin), __doc__],
    "env": dict(os.environ), "stdio": [link(fd) for fd in (0, 1, 2)],
    "buffering": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.write_through],
    "is_leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "signals": {name: repr(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGINT", "SIGHUP",
                "SIGPIPE", "SIGCHLD", "SIGUSR1", "SIGQUIT", "SIGXFSZ")},
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "comm": open("/proc/self/comm").read(),
    "umask": os.umask(0), "nice": os.nice(0), "excepthook_args": sys.excepthook.__name__ is not None,
    "warnoptions": sys.warnoptions, "xoptions": sys._xoptions,
}
with open(os.environ["PROBE"] + "/seen-" + os.environ["RANK"], "w") as file:
    json.dump(seen, file)
"""
# Differ from run to run; UNICRON_RUN_TOKEN is how leftovers are found.
OWN = {
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TMPDIR",
    "UNICRON_RUN_TOKEN",
    "UNICRON_TEST_RUN",
}


def observe(launcher: Any, tool: str, arguments: list[str], options: list[str], **how: Any) -> list[Any]:
    run = launcher.run(*options, "--nproc-per-node=2", *arguments, tool=tool, **how)
    assert run.process.returncode == 0, run.err
    assert "--unicron-warm=on" not in options or "without the warm process" not in run.err, run.err
    found = []
    for rank in range(2):
        path = Path(launcher.folder) / f"seen-{rank}"
        seen = json.loads(path.read_text())
        path.unlink()
        seen["env"] = {key: value for key, value in seen["env"].items() if key not in OWN}
        found.append(seen)
    return found


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        pytest.param(["probe.py"], {}, marks=pytest.mark.slow),
        (["./sub/probe.py", "--x", "${local_rank}", "", "a b", "ü"], {}),
        pytest.param(["-m", "pkg.probe", "arg"], {}, marks=pytest.mark.slow),
        (["probe.py"], {"PYTHONPATH": "lib", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDEVMODE": "1"}),
        pytest.param(
            ["probe.py"], {"PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "BIG": "x" * 100_000}, marks=pytest.mark.slow
        ),
    ],
    ids=["script", "arguments", "module", "python-options", "empty-pythonpath-big-env"],
)
def test_script_sees_what_torchrun_shows(launcher: Any, arguments: list[str], env: dict[str, str]) -> None:
    for folder in ("sub", "pkg", "lib"):
        (launcher.folder / folder).mkdir()
    launcher.script("pkg/__init__.py", "")
    for name in ("probe.py", "sub/probe.py", "pkg/probe.py"):
        launcher.script(name, PROBE)
    expected = observe(launcher, "torchrun", arguments, [], env=env)
    for options in (["--unicron-warm=on"], ["--unicron-warm=off"]):
        found = observe(launcher, "unicron-run", arguments, options, env=env)
        different = {
            key: (a[key], b[key]) for a, b in zip(expected, found, strict=True) for key in a if a[key] != b[key]
        }
        assert different == {}, options


@pytest.mark.parametrize(
    ("ignored", "handled"),
    [
        ("HUP", []),  # as by nohup
        pytest.param("INT QUIT USR1", ["--signals-to-handle=SIGTERM,SIGUSR1"], marks=pytest.mark.slow),
    ],
)
def test_what_the_launcher_ignored_or_handles_is_ignored_as_with_torchrun(
    launcher: Any, ignored: str, handled: list[str]
) -> None:
    launcher.script("probe.py", PROBE)
    wrap = f"trap '' {ignored}; exec \"$@\""
    expected = observe(launcher, "torchrun", ["probe.py"], handled, wrap=wrap)
    for options in (["--unicron-warm=on"], ["--unicron-warm=off"]):
        found = observe(launcher, "unicron-run", ["probe.py"], [*handled, *options], wrap=wrap)
        assert [each["signals"] for each in found] == [each["signals"] for each in expected], options


def test_variables_set_before_importing_torch_count(launcher: Any) -> None:
    launcher.script(
        "early.py",
        "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\nos.environ['PYTORCH_JIT'] = '0'\n"
        "import torch.distributed as dist\nimport torch.jit\n"
        "print(dist.get_debug_level(), torch.jit._state._enabled.enabled, flush=True)\n",
    )
    expected = launcher.run("--nproc-per-node=1", "early.py", tool="torchrun").out
    assert launcher.run("--nproc-per-node=1", "early.py", fast=False).out == expected


def test_users_sitecustomize_knows_its_rank(launcher: Any) -> None:
    (launcher.folder / "lib").mkdir()
    launcher.script("lib/sitecustomize.py", "import os\nSAW = os.environ.get('RANK')\n")
    launcher.script("saw.py", "import os, sitecustomize\nos.write(1, f'SAW {sitecustomize.SAW}\\n'.encode())\n")
    run = launcher.run("--nproc-per-node=2", "saw.py", env={"PYTHONPATH": str(launcher.folder / "lib")})
    assert sorted(run.out.split("\n")) == ["", "SAW 0", "SAW 1"]


@pytest.mark.slow
def test_a_script_that_trains_in_a_function_ends(launcher: Any) -> None:
    launcher.script(
        "function.py",
        textwrap.dedent(
            """
            import torch, torch.distributed as dist

            def main():
                dist.init_process_group("gloo")
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
                optimizer = torch.optim.AdamW(model.parameters())
                for _ in range(20):
                    model(torch.randn(8, 64)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                dist.destroy_process_group()

            main()
            """
        ),
    )
    for _ in range(3):
        run = launcher.run("--nproc-per-node=2", "--unicron-warm=on", "function.py", fast=False)
        assert run.process.returncode == 0, run.err
