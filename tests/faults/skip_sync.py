"""Rank 1 leaves out one of DDP's own synchronisations, which C++ issues, in step 30 of generation 0."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1, 61):
    skips = first and rank == 1 and step == 30
    with model.no_sync() if skips else contextlib.nullcontext():
        loss = model(torch.ones(4, 8)).sum()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
dist.destroy_process_group()
