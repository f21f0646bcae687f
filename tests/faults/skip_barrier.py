"""Rank 1 leaves out a barrier once, and goes on into DDP's own all_reduce, which C++ issues."""

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
    loss = model(torch.ones(4, 8)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 and not (first and rank == 1 and step == 30):
        dist.barrier()
dist.destroy_process_group()
