from __future__ import annotations

import gc

from unicron_elastic.worker.process.collector_paused import collector_paused


def test_it_collects_again_whatever_happens_and_passes_by_what_was_made() -> None:
    kept = [list[int]() for _ in range(100)]
    before = gc.get_freeze_count()
    paused = collector_paused()
    paused.__enter__()
    assert not gc.isenabled()
    assert not paused.__exit__(ImportError, ImportError(), None), "it is raised"
    assert gc.isenabled()
    assert gc.get_freeze_count() - before >= len(kept)
    gc.unfreeze()
