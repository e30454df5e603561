"""A script with DeepSpeed's engine, on the CPU."""

from __future__ import annotations

import deepspeed
import torch
from framework_log import StepTimes, parse_arguments


def main() -> None:
    """Train."""
    times = StepTimes(parse_arguments().log_dir)
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    while True:
        engine.backward(engine(torch.randn(8, 32)).square().mean())
        engine.step()
        times.step()


if __name__ == "__main__":
    main()
