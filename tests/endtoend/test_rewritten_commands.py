"""Workers run under a debugger that changes the commands of all processes beneath it, as debugpy does."""

from __future__ import annotations

import sys
from typing import Any

# Has itself imported by the keeper, and puts the debugger in front of each script that this one starts.
REWRITING = """
import os, runpy, subprocess, sys
EXEC, POPEN = os.execvpe, subprocess.Popen.__init__

def popen(self, args, *more, **options):
    if "-c" in args:
        args = [*args[:2], "import rewriting\\n" + args[2], *args[3:]]
    POPEN(self, args, *more, **options)

def execvpe(program, argv, env):
    if argv[:2] == [sys.executable, "-u"]:
        argv = [*argv[:2], os.environ["PROBE"] + "/debugger.py", "--client", "127.0.0.1", "--file", *argv[2:]]
    EXEC(program, argv, env)

subprocess.Popen.__init__, os.execvpe = popen, execvpe
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
DEBUGGER = """
import os, runpy, sys
options, _, words = " ".join(sys.argv[1:]).partition(" --file ")
if options != "--client 127.0.0.1":
    sys.exit(print("usage: debugger.py --client HOST --file SCRIPT ...", sys.argv, file=sys.stderr))
sys.argv = words.split()
os.environ["DEBUGGED"] = "1"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_each_worker_is_started_by_the_debugger(launcher: Any) -> None:
    launcher.script("rewriting.py", REWRITING)
    launcher.script("debugger.py", DEBUGGER)
    launcher.script("say.py", "import os, sys\nos.write(1, f'{sys.argv} {os.environ[\"DEBUGGED\"]}\\n'.encode())\n")
    arguments = ("--nproc-per-node=2", "say.py", "-x", "${local_rank}")
    wrap = f'PYTHONPATH=. exec {sys.executable} rewriting.py "$@"'
    run = launcher.run(*arguments, wrap=wrap)
    assert run.process.returncode == 0, run.err
    assert sorted(run.out.splitlines()) == [f"['say.py', '-x', '{local}'] 1" for local in range(2)], run.err
    assert run.err.count("on the way its command became") == 1, run.err
    assert "--client" not in run.err
