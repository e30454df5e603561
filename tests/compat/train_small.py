"""Trains for six steps; the last rank is lost in the fourth of the first attempt. Rank 0 prints what came out."""

import hashlib
import os
import signal

import pretend  # noqa: F401 - first of all
import torch

import unicron_elastic

last = int(os.environ["WORLD_SIZE"]) - 1
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
for step in run.steps(total=6, micro_batches=4):
    for index in step:
        if run.rank == last and step.number == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step.number * 4 + index)
        step.backward(model(torch.randn(16, 8, generator=generator)).square().mean())
    optimizer.step()
if run.rank == 0:
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"DONE {run.step} {hashlib.sha256(bits).hexdigest()}", flush=True)
