"""Who looks at the main thread from another one holds up nobody, whatever garbage there is."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from unicron_elastic.worker.process.main_frame import main_frame

LOOKS = """
import gc, threading, time
from unicron_elastic.worker.process.main_frame import main_frame

class Circle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)  # lets go of the interpreter

def look():
    while True:
        Circle()
        main_frame()

gc.set_threshold(2)
threading.Thread(target=look, daemon=True).start()
for _ in range(2000):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
print("ended", flush=True)
"""


def test_threads_begin_while_another_one_looks_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_behind_it_as_before(*, collects: bool) -> None:
    try:
        (gc.enable if collects else gc.disable)()
        frame = main_frame()
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    assert frame is not None
    assert threading.current_thread() is threading.main_thread()
