"""What a case launches: one rank under ``unicron-run``, or alone.

worker.py FOLDER    # in which case.json is
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import unicron_elastic
from differential.case import Case
from differential.parts import flat, make
from differential.script import Script
from differential.strikes import Recorder, Witness


def main() -> None:
    """Trains as one rank, and keeps what came out."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked if the job does not end
    folder = Path(sys.argv[1])
    case = Case.from_json((folder / "case.json").read_text())
    place = f"{os.environ.get('UNICRON_NODE_NAME', 'a')}{os.environ.get('LOCAL_RANK', '0')}"
    recorder = Recorder(case, folder, place)
    try:
        train(case, folder, recorder)
    except BaseException as error:
        recorder.log("raised", type=type(error).__name__, text=str(error)[:2000], ours=is_ours(error))
        raise


def train(case: Case, folder: Path, recorder: Recorder) -> None:
    """All of the script. Each rank begins with weights of its own, as rank 0's are trained."""
    parts = make(case, seed=0 if case.same_seed else int(os.environ.get("RANK", "0")))
    run = unicron_elastic.Run(
        **parts.registered(),
        reproducible=case.reproducible,
        join_patience_s=case.join_patience_s,
        snapshot_every=case.snapshot_every,
        witness=Witness(folder, case.load_s),
    )
    Script(case, parts, run, recorder, folder, reference=False).main()
    target = folder / f"final.{recorder.place}.{os.getpid()}"
    torch.save(flat(parts), f"{target}.part")
    os.rename(f"{target}.part", target)
    recorder.log("end")


def is_ours(error: BaseException) -> bool:
    """Whether the product raised it, and not what the script does or calls."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(unicron_elastic.__file__).parent)
    return bool(frames) and frames[-1].filename.startswith(package)


if __name__ == "__main__":
    main()
