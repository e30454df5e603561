"""Stacks that the agent can ask for, from real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from unicron_elastic.worker.process.stacks import FILE_NAME, STACK_SIGNAL


def run(code: str) -> list[str]:
    """The lines that a script prints which has imported ``offer_stacks``."""
    head = "import faulthandler, os, signal, threading, time\n"
    head += "from unicron_elastic.worker.process.stacks import FILE_NAME, STACK_SIGNAL, offer_stacks\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_signal_writes_the_stacks_of_all_threads_into_the_file() -> None:
    lines = run(
        """
        begun = threading.Event()
        def in_the_thread():
            begun.set()
            time.sleep(600)
        def in_the_main_thread():
            os.kill(os.getpid(), STACK_SIGNAL)
        fd = offer_stacks()
        threading.Thread(target=in_the_thread, daemon=True).start()
        begun.wait()
        in_the_main_thread()
        print(os.readlink(f"/proc/self/fd/{fd}"))
        print(os.get_inheritable(fd))
        print(os.pread(fd, 100000, 0).decode())
        os._exit(__import__("sys").stdout.flush() or 0)
        """
    )
    assert FILE_NAME in lines[0]
    assert lines[1] == "False"
    text = "\n".join(lines[2:])
    assert "in in_the_thread" in text
    assert "in in_the_main_thread" in text


def test_a_process_that_waits_in_c_with_the_interpreters_lock_writes_too() -> None:
    lines = run(
        """
        import ctypes, subprocess, sys
        fd = offer_stacks()
        reader = f'''
        import os, signal, time
        fd = os.open("/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY)
        os.kill({os.getpid()}, {int(STACK_SIGNAL)})
        while not os.fstat(fd).st_size:
            time.sleep(0.001)
        os.kill({os.getpid()}, signal.SIGCONT)
        '''
        import textwrap
        child = subprocess.Popen([sys.executable, "-S", "-c", textwrap.dedent(reader)])
        def wait_in_c():
            status = ctypes.c_int()
            libc = ctypes.PyDLL(None)
            while libc.waitpid(child.pid, ctypes.byref(status), 0) != child.pid:
                pass
        wait_in_c()
        child.returncode = 0
        print(os.pread(fd, 100000, 0).decode())
        """
    )
    assert "in wait_in_c" in "\n".join(lines)


def test_a_script_that_uses_the_signal_keeps_it() -> None:
    lines = run(
        """
        heard = []
        signal.signal(STACK_SIGNAL, lambda *_: heard.append(1))
        before = os.listdir("/proc/self/fd")
        print(offer_stacks())
        os.kill(os.getpid(), STACK_SIGNAL)
        print(len(heard), os.listdir("/proc/self/fd") == before)
        """
    )
    assert lines == ["None", "1 True"]


def test_it_is_a_real_time_signal_that_torch_and_python_leave_alone() -> None:
    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX
    assert signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL
