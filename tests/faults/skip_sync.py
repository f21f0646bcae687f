"""Rank 1 leaves out one of DDP's own synchronisations, which C++ issues, in step 30 of generation 0.

A number is that of its DataLoader's workers.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
workers = int(sys.argv[1]) if len(sys.argv) > 1 else 0
data = torch.utils.data.DataLoader(torch.ones(61 * 4, 8), 4, num_workers=workers)
for step, batch in zip(range(1, 61), data, strict=False):
    skips = first and rank == 1 and step == 30
    with model.no_sync() if skips else contextlib.nullcontext():
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
dist.destroy_process_group()
