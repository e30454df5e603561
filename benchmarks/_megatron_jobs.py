"""The jobs of the benchmark of Megatron-Core: how the model is split, and how each launcher is started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from _launchers import TORCHRUN, UNICRON, Launcher
from _recovery_competitors import WORKERS, Command, Job

# Megatron-Core imports all of torch.compile, for nothing here, and warns of what is not installed.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


@dataclass(frozen=True)
class Split:
    """Of ``ranks`` processes into replicas of ``tensor`` times ``pipeline``; ``batch_size`` sequences a micro-batch."""

    name: str
    ranks: int
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 8
    batch_size: int = 4
    is_distributed: bool = False  # the optimizer

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.ranks // (self.tensor * self.pipeline)

    def replica_of(self, rank: int) -> int:
        """In which a rank is, in Megatron-Core's order: tensor, data, pipeline."""
        return rank // self.tensor % self.replicas

    def survivors_of(self, rank: int) -> list[int]:
        """The ranks of the other replicas."""
        return [each for each in range(self.ranks) if self.replica_of(each) != self.replica_of(rank)]

    def counts(self, rank: int) -> bool:
        """Whether it is the one of its replica by which micro-batches are counted."""
        return rank % self.tensor == 0 and rank // (self.tensor * self.replicas) == 0

    @property
    def options(self) -> tuple[str, ...]:
        """For the workers."""
        numbers = {"tensor": self.tensor, "pipeline": self.pipeline, "micro-batches": self.micro_batches}
        numbers["batch-size"] = self.batch_size
        own = ("--distributed-optimizer",) if self.is_distributed else ()
        return (*(f"--{name}={number}" for name, number in numbers.items()), *own)


SPLITS = {
    "DP4": Split("DP4", 4),
    "DP2 x TP2": Split("DP2 x TP2", 4, tensor=2, micro_batches=4),
    "DP2 x PP2": Split("DP2 x PP2", 4, pipeline=2),
}


@dataclass(frozen=True)
class Launched:
    """A launcher with the worker script; as a competitor of the benchmark of recovery, but with options of its own."""

    name: str
    launcher: Launcher
    worker: str = "megatron_steps.py"
    launcher_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()
    restarts: int = 50
    replaces: bool = True
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))

    def problem(self) -> str | None:
        """What is missing."""
        if not self.launcher.path.exists():
            return f"{self.launcher.path} does not exist"
        if importlib.util.find_spec("megatron") is None:
            return "megatron-core is not installed: pip install -e '.[megatron]'"
        return None

    def commands(self, job: Job) -> list[Command]:
        """The launcher alone."""
        own = (f"--nproc-per-node={job.ranks}", f"--max-restarts={self.restarts}", f"--log-dir={job.folder / 'logs'}")
        script = (str(WORKERS / self.worker), *job.options, *self.worker_options)
        words = (str(self.launcher.path), "--standalone", *own, *self.launcher_options, *script)
        return [Command(words, {**self.environment, **self.launcher.environment})]

    def replacement(self, job: Job, slot: int) -> None:
        """The launcher sees to it."""


def unicron(*worker_options: str, worker: str = "megatron_steps.py", attaches: bool = True) -> Launched:
    """Tier 2 for Megatron-Core."""
    # So many faults of one node within an hour would isolate it.
    preload = f"--unicron-preload={','.join(PRELOADED)}"
    own = ("--attach",) if attaches else ()
    options = (preload, "--unicron-isolate-after=0")
    return Launched(UNICRON.name, UNICRON, worker, options, (*own, *worker_options))


def torchrun(*worker_options: str, worker: str = "megatron_steps.py") -> Launched:
    """Megatron-Core as it is."""
    return Launched(TORCHRUN.name, TORCHRUN, worker, (), worker_options)
