"""Who looks at the main thread from another one holds up nobody, and keeps nothing alive."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from unicron_elastic.worker.process.main_stack import in_ascii, main_stack

LOOKS = """
import gc, threading, time
from unicron_elastic.worker.process.main_stack import main_stack

class Circle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)  # lets go of the interpreter

def look():
    while True:
        Circle()
        main_stack()
        time.sleep(0.001)  # else threads hardly get to begin beside it

gc.set_threshold(2)
threading.Thread(target=look, daemon=True).start()
for _ in range(2000):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
print("ended", flush=True)
"""

KEEPS = """
import sys, threading
from unicron_elastic.worker.process.main_stack import main_stack

class Ends:
    def __del__(self):
        ended.append(threading.current_thread())

def leaves():
    left_to_end_here = Ends()

def look():
    while True:
        main_stack()

ended, late = [], 0
sys.setswitchinterval(1e-6)
threading.Thread(target=look, daemon=True).start()
for _ in range(20000):
    leaves()
    late += ended != [threading.main_thread()]
    ended.clear()
print(late, flush=True)
"""


def _said(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_threads_begin_while_another_one_looks_again_and_again() -> None:
    assert _said(LOOKS) == "ended\n"


def test_what_is_left_to_end_with_a_function_does_while_another_thread_looks() -> None:
    assert _said(KEEPS) == "0\n"


def test_it_is_that_of_the_main_thread_the_innermost_call_first() -> None:
    assert threading.current_thread() is threading.main_thread()

    def waits() -> list[str]:
        with ThreadPoolExecutor(1) as pool:
            return [call.function for call in pool.submit(main_stack).result() if call.file == __file__]

    assert waits() == ["waits", test_it_is_that_of_the_main_thread_the_innermost_call_first.__name__]
    assert all(call.line > 0 for call in main_stack())


def test_a_file_is_called_as_in_ascii() -> None:
    file, names = "/home/josé/数据.py", {"main_stack": main_stack}
    exec(compile("def looks():\n    return main_stack()", file, "exec"), names)
    assert in_ascii(file) in [call.file for call in names["looks"]()]  # type: ignore[operator]
