"""What snapshots in memory cost a training step, and how soon a killed job steps again with them.

``snapshots.py cost``: blocks of steps with a snapshot at every step alternate with blocks without, in one process.
``snapshots.py kill``: rank 1 of 2 is killed; unicron-run with snapshots in memory alternates with torchrun and a
checkpoint of torch.save on tmpfs. The worker of both is this file, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from _exit_when_told import exit_when_told

STEP_S = 0.2
BLOCK_STEPS = 8  # of which the first does not count: nothing is copied in it yet
TMPFS = Path("/dev/shm")


def make_training(state_bytes: int) -> tuple[Any, Any]:
    """A model and AdamW with about that much state: a third each of parameters and two moments, fp32."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(state_bytes / 3 / 4 / width**2))
    width = width if state_bytes > 3 * 4 * width**2 else int((state_bytes / 12) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def do_step(model: Any, width: int, optimizer: Any, work: Any, products: int) -> None:
    """Forward and backward pass, as much computation again as ``products`` take, and the optimizer step."""
    import torch

    loss = model(torch.ones(1, width)).sum()
    optimizer.zero_grad()
    loss.backward()
    for _ in range(products):
        work @ work
    optimizer.step()


def calibrated(model: Any, optimizer: Any, work: Any) -> int:
    """How many products make a step of STEP_S."""
    for _ in range(3):
        do_step(model, model[0].in_features, optimizer, work, 0)
    began = time.perf_counter()
    for _ in range(5):
        do_step(model, model[0].in_features, optimizer, work, 0)
    left_s = STEP_S - (time.perf_counter() - began) / 5
    began = time.perf_counter()
    for _ in range(20):
        work @ work
    return max(0, int(left_s / ((time.perf_counter() - began) / 20)))


def clocks() -> tuple[float, float, float]:
    """Time, CPU time of this thread, and CPU time of the process, in seconds."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def cost_worker(state_bytes: int, blocks: int) -> None:
    """Prints the time of each step that counts, with and without snapshots, in ms."""
    import torch

    import unicron_elastic

    model, optimizer = make_training(state_bytes)
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    work = torch.ones(384, 384)
    products = calibrated(model, optimizer, work)
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    step = 0
    for block in range(2 * blocks + 2):
        is_with = block % 2 == 1
        for number in range(BLOCK_STEPS):
            began = clocks()
            do_step(model, model[0].in_features, optimizer, work, products)
            step += 1
            if is_with and not run.snapshot(step):
                raise SystemExit("run this under unicron-run")
            if number and block >= 2:  # the first two blocks make the files
                taken = [1000 * (now - then) for now, then in zip(clocks(), began, strict=True)]
                found["with" if is_with else "without"].append(taken)
        run._snapshots.wait()  # what is left of the last one does not count to the other kind
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())


def kill_worker(state_bytes: int, folder: Path, how: str) -> None:
    """Trains; rank 1 dies in generation 0 after its 6th step. Rank 0 writes down when the first step after is done."""
    import torch
    import torch.distributed as dist

    import unicron_elastic

    model, optimizer = make_training(state_bytes)
    dist.init_process_group("gloo")
    is_first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", dist.get_rank()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    run = unicron_elastic.Run(model=parallel, optimizer=optimizer)
    checkpoint, start = folder / "checkpoint", 0
    if how == "memory":
        start = run.restore()
    elif checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["step"]
    for step in range(start, start + 8):
        do_step(parallel, model[0].in_features, optimizer, work=None, products=0)
        if not is_first:
            if rank == 0:
                (folder / "stepped").write_text(json.dumps({"at": time.time(), "start": start}))
            break
        if step == 3:
            if how == "memory":
                run.snapshot(4)
                run._snapshots.wait()
            elif rank == 0:
                torch.save({"step": 4, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            dist.barrier()
        if step == 5 and rank == 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def launch(tool: str, options: list[str], arguments: list[str]) -> str:
    """Runs a launcher on this file; what came to stdout. Raises SystemExit with the end of its stderr."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [os.path.join(sysconfig.get_path("scripts"), tool), *options, __file__, *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=500)
        except BaseException:
            process.terminate()  # with its workers
            raise
    if process.returncode != 0:
        raise SystemExit(err[-3000:])
    return out


def summary(values: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def cost(megabytes: int, blocks: int, ranks: int) -> None:
    """Prints a line of the table."""
    text = launch(
        "unicron-run", ["--standalone", f"--nproc-per-node={ranks}"], ["cost-worker", str(megabytes), str(blocks)]
    )
    found = [json.loads(line.removeprefix("FOUND ")) for line in text.splitlines() if line.startswith("FOUND ")]
    for number, clock in enumerate(("time", "CPU time of the training", "CPU time of the process")):
        without = [step[number] for each in found for step in each["without"]]
        with_them = [step[number] for each in found for step in each["with"]]
        added = statistics.median(with_them) - statistics.median(without)
        share = f"{added:+.1f} ms, {100 * added / statistics.median(without):+.1f} %"
        print(f"| {megabytes} MB | {clock} | {summary(without)} | {summary(with_them)} | {share} |", flush=True)


def kill(megabytes: int, rounds: int) -> None:
    """Prints a line of the table for each launcher."""
    taken: dict[str, list[float]] = {"memory": [], "file": []}
    for _ in range(rounds):
        for how, times in taken.items():
            folder = Path(tempfile.mkdtemp(dir=TMPFS, prefix="unicron-bench-"))
            tool = "unicron-run" if how == "memory" else "torchrun"
            try:
                options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
                launch(tool, options, ["kill-worker", str(megabytes), str(folder), how])
                stepped = json.loads((folder / "stepped").read_text())
                assert stepped["start"] == 4, "it began anew"
                times.append(1000 * (stepped["at"] - float((folder / "killed").read_text())))
            finally:
                shutil.rmtree(folder)
    names = {"memory": "unicron-run, snapshot in memory", "file": "torchrun, torch.load from tmpfs"}
    for how, times in taken.items():
        print(f"| {megabytes} MB | {names[how]} | {summary(times)} |", flush=True)


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "kill", "cost-worker", "kill-worker"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 500])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if not options.what.endswith("-worker"):
        exit_when_told()
    match options.what:
        case "cost-worker":
            cost_worker(int(options.rest[0]) * 10**6, int(options.rest[1]))
        case "kill-worker":
            kill_worker(int(options.rest[0]) * 10**6, Path(options.rest[1]), options.rest[2])
        case "cost":
            for megabytes in options.megabytes:
                cost(megabytes, options.blocks, options.ranks)
        case "kill":
            for megabytes in options.megabytes:
                kill(megabytes, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
