"""unicron-elastic keeps large-model training alive.

Importing this package costs milliseconds: it imports neither torch nor anything else that is slow.
"""

TYPE_CHECKING = False  # to import typing would take longer than all of this
if TYPE_CHECKING:
    from unicron_elastic.training.replica_mesh import replica_mesh
    from unicron_elastic.training.run import Run
    from unicron_elastic.training.step.wrong_use import WrongUseError
    from unicron_elastic.worker.flops_per_step import flops_per_step
    from unicron_elastic.worker.phases import phase

__all__ = ["Run", "WrongUseError", "__version__", "flops_per_step", "phase", "replica_mesh"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "phase":  # imported when it is first used: most who import this package do not
        from unicron_elastic.worker.phases import phase

        return phase
    if name == "flops_per_step":
        from unicron_elastic.worker.flops_per_step import flops_per_step

        return flops_per_step
    if name == "Run":
        from unicron_elastic.training.run import Run

        return Run
    if name == "replica_mesh":
        from unicron_elastic.training.replica_mesh import replica_mesh

        return replica_mesh
    if name == "WrongUseError":
        from unicron_elastic.training.step.wrong_use import WrongUseError

        return WrongUseError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
