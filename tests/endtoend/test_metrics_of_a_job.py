"""A real job is asked for its metrics while it runs, and a worker of it is killed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from free_port import free_port
from scraping import asked, scraped

pytestmark = pytest.mark.trains

# Rank 1 kills itself once, after its tenth step; all go on until there is a file "stop".
TRAIN = """
import os, signal, time
import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
where = os.environ["PROBE"]
for step in range(1_000_000):
    weight.grad = torch.ones(1)
    optimizer.step()
    if step == 10 and os.environ["RANK"] == "1" and not os.path.exists(os.path.join(where, "killed")):
        open(os.path.join(where, "killed"), "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(os.path.join(where, "stop")):
        break
    time.sleep(0.01)
"""
KILLED = ("unicron_incidents_total", "2", "killed by signal")


@pytest.fixture
def options(launcher: Any) -> list[str]:
    launcher.script("train.py", TRAIN)
    return [
        "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=run",
        "--max-restarts=3", "train.py",
    ]  # fmt: skip


def test_a_killed_worker_is_seen_by_who_scrapes(launcher: Any, options: list[str]) -> None:
    port = free_port()
    run = launcher.start(f"--metrics-port={port}", *options)
    run.until(lambda: asked(port, "/healthz") == (200, "ok\n"), "an answer")

    def recovered() -> dict[tuple[str, ...], float] | None:
        found = scraped(port, without="run_id")
        return found if found.get(("unicron_recovery_time_seconds_count",)) == 1 else None

    found = run.until(recovered, "a recovery")
    assert found[KILLED] == 1
    assert sum(value for (name, *_), value in found.items() if name == "unicron_incidents_total") == 1
    lost = {labels[1]: value for labels, value in found.items() if labels[0] == "unicron_lost_gpu_seconds_total"}
    assert set(lost) == {"noticed", "stopped", "regrouped", "first_step"}
    seconds = found["unicron_recovery_time_seconds_sum",]
    assert sum(lost.values()) == pytest.approx(2 * seconds)  # by two workers
    assert 0 < seconds < 60
    assert found["unicron_restarts_used",] == 1
    assert found["unicron_generation",] == 2

    def stepped() -> dict[tuple[str, ...], float] | None:
        later = scraped(port, without="run_id")
        return later if later.get(("unicron_step",), 0) > 20 else None

    later = run.until(stepped, "steps after it")
    assert later["unicron_last_step_timestamp_seconds",] > found["unicron_job_start_timestamp_seconds",]
    assert later["unicron_iteration_time_seconds",] >= 0.01
    assert (later["unicron_worker_up", "0"], later["unicron_worker_up", "1"]) == (1, 1)
    assert later["unicron_job_phase", "running"] == 1
    assert asked(port, "/readyz") == (200, "ok\n")
    (launcher.folder / "stop").touch()
    assert run.wait() == 0
    assert asked(port, "/healthz") == (0, "")


@pytest.mark.slow
def test_a_new_launch_counts_on_and_one_whose_port_is_taken_goes_on(launcher: Any, options: list[str]) -> None:
    port = free_port()
    env = {"UNICRON_METRICS_PORT": str(port)}
    first = launcher.start(*options, env=env)
    first.until(lambda: scraped(port, without="run_id").get(KILLED) == 1, "an incident")
    (launcher.folder / "stop").touch()
    assert first.wait() == 0
    (launcher.folder / "stop").unlink()
    second = launcher.start(*options, env=env)
    second.until(lambda: scraped(port, without="run_id").get(KILLED) == 1, "the incident of before")
    third = launcher.start("--standalone", "--nproc-per-node=1", "train.py", env=env)
    sentence = f"No metrics are served: 127.0.0.1:{port} cannot be listened on (Address already in use)."
    third.until(lambda: sentence in third.err, "a sentence")
    (launcher.folder / "stop").touch()
    assert (second.wait(), third.wait()) == (0, 0)
