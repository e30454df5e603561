"""Run by Python's own ``site`` at the start of a worker's interpreter, before the script.

The worker's command stays exactly torchrun's (``python -u script.py ...``), so everything a script can observe of its
start is made by the interpreter itself. This file takes itself out of the way, attaches the in-band parts, and, in a
warm process, waits here: each worker forked from it returns from this import and goes on as that ordinary command.
Whatever fails here costs one warning and nothing else.
"""

import sys

_LOADED_BEFORE = frozenset(sys.modules)  # what an interpreter has without us; nothing may be imported above this line

import os  # noqa: E402

_WARM_FD = "UNICRON_WARM_FD"  # as in unicron_elastic.worker.start.bootstrap


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


def _users_sitecustomize() -> str | None:
    """The file of the sitecustomize that this one hides, if there is one."""
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.origin is not None:
            return spec.origin
    return None


def _run_users_sitecustomize() -> None:
    """Imports the sitecustomize that this file hides, under its own name."""
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    finally:
        sys.modules.setdefault("sitecustomize", ours)


def _is_of_python(path: str) -> bool:
    """Whether a distribution ships this file with Python (Debian does), for all programs and all users alike."""
    return os.path.dirname(path) == os.path.dirname(os.__file__)


def _take_standard_numbers() -> list[int]:
    """A script whose standard streams are closed must not find a descriptor of ours, or libffi's, under their numbers.

    A warm process, whose forks get streams of their own, begins only where all are open.
    """
    taken = []
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < 3:
        taken.append(fd)
    os.close(fd)
    return taken


def _attach(refusal: str | None = None) -> None:
    warm_pid = os.getpid() if _WARM_FD in os.environ else None
    taken = _take_standard_numbers()
    try:
        from unicron_elastic.worker.start import bootstrap

        bootstrap.start(_LOADED_BEFORE, refusal)
    except Exception as error:
        sys.stderr.write(f"unicron: in-band parts are off in this worker: {type(error).__name__}: {error}\n")
        if os.getpid() == warm_pid:  # no worker: the script is not for it to run
            os._exit(1)
    finally:
        for fd in taken:
            os.close(fd)


def _main() -> None:
    _step_aside()
    users = _users_sitecustomize()
    if users is not None and _WARM_FD in os.environ and not _is_of_python(users):
        _attach(f"{users} is to run in each worker")  # does not come back
    try:
        if users is not None:
            _run_users_sitecustomize()
    finally:
        _attach()
    if users is None:
        # Python's site expects this where there is none, and the script then finds none either.
        raise ImportError("no sitecustomize", name="sitecustomize")


_main()
