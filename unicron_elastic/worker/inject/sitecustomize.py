"""Run by Python's own ``site`` at the start of a worker's interpreter, before the script.

The worker's command stays exactly torchrun's (``python -u script.py ...``), so everything a script can observe of its
start is made by the interpreter itself. This file takes itself out of the way, attaches the in-band parts, and, in a
warm process, waits here: each worker forked from it returns from this import and goes on as that ordinary command.
Whatever fails here costs one warning and nothing else.
"""

import os
import sys


def _step_aside() -> None:
    """Removes this folder from the path and the environment, as if it had never been there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    before = os.environ.pop("UNICRON_PYTHONPATH", None)
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before


def _run_users_sitecustomize() -> None:
    """Imports the sitecustomize that this file hides, if there is one, under its own name."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _main() -> None:
    _step_aside()
    try:
        _run_users_sitecustomize()
    finally:
        try:
            from unicron_elastic.worker import bootstrap

            bootstrap.start()
        except Exception as error:
            sys.stderr.write(f"unicron: in-band parts are off in this worker: {type(error).__name__}: {error}\n")


_main()
