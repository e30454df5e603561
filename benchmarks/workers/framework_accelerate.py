"""A script with Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from framework_log import StepTimes, parse_arguments
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train."""
    times = StepTimes(parse_arguments().log_dir)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    loader = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    while True:
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            times.step()


if __name__ == "__main__":
    main()
