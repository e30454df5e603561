"""The configuration that ``ft_launcher`` would read: time-outs, above all. Here they advise our own detection."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# The variables that hold the file's path: NeMo-Run's, and that of ``ft_launcher --ft-cfg-path``.
CONFIG_PATHS = ("FAULT_TOL_CFG_PATH", "PET_FT_CFG_PATH")
_SECTION = "fault_tolerance"


@dataclass
class FaultToleranceConfig:
    """NVIDIA's settings that concern workers, with NVIDIA's defaults; times in seconds, None: no limit."""

    workload_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    safety_factor: float = 5.0  # a learned time-out is so many times the longest that was measured
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = logging.INFO
    skip_section_response: bool = True
    install_exception_hook: bool = False
    num_warmup_iterations: int = 5

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> FaultToleranceConfig:
        """Takes the settings that it knows. Raises ValueError for others unless they are to be ignored."""
        known = {setting.name for setting in fields(FaultToleranceConfig)}
        unknown = kwargs.keys() - known
        if unknown and not ignore_not_recognized:
            raise ValueError(f"unknown settings of fault tolerance: {', '.join(sorted(unknown))}")
        return FaultToleranceConfig(**{name: value for name, value in kwargs.items() if name in known})

    @staticmethod
    def from_yaml_file(cfg_path: str, ignore_not_recognized: bool = True) -> FaultToleranceConfig:
        """Reads the section ``fault_tolerance``, however deep it stands. Raises ValueError if there is none.

        Raises ImportError without PyYAML, which is the script's affair, not ours.
        """
        yaml = importlib.import_module("yaml")
        with open(cfg_path, encoding="utf-8") as file:
            try:
                found = _find(yaml.safe_load(file))
            except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
                words = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(f"the configuration file {cfg_path} is not YAML: {words}") from None
        if not found:
            raise ValueError(f"no section {_SECTION!r} in the configuration file {cfg_path}")
        return FaultToleranceConfig.from_kwargs(ignore_not_recognized, **found)

    @staticmethod
    def from_environment() -> FaultToleranceConfig:
        """What the user configured for ``ft_launcher`` in a file; without one, or if it is unfit, the defaults."""
        path = next((os.environ[name] for name in CONFIG_PATHS if os.environ.get(name)), None)
        if path is not None and os.path.exists(path):
            try:
                return FaultToleranceConfig.from_yaml_file(path)
            except Exception as error:  # the time-outs only advise: not worth the job
                logging.getLogger(__name__).warning("%s is not used: %s: %s", path, type(error).__name__, error)
        return FaultToleranceConfig()


def _find(data: object) -> dict[str, Any] | None:
    if isinstance(data, dict):
        if isinstance(data.get(_SECTION), dict):
            return dict(data[_SECTION])
        data = list(data.values())
    if isinstance(data, list):
        return next((found for part in data if (found := _find(part))), None)
    return None
