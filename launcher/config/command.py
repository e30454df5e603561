"""What a worker runs, as torchrun builds it (torch.distributed.run, config_from_args)."""

from __future__ import annotations

import argparse
import os
import sys


def warm_command(args: argparse.Namespace) -> list[str] | None:
    """The workers' command if it is a script or module run by this interpreter, else None: it cannot start warm."""
    if args.no_python or args.run_path or args.numa_binding is not None or not getattr(args, "use_env", True):
        return None
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return None
    module = ["-m"] if args.module else []
    return [sys.executable, "-u", *module, args.training_script, *args.training_script_args]
