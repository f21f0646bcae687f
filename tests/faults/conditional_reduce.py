"""A collective under a condition on the rank, in step 31 of generation 0, of a script whose others are DDP's.

Arguments: "all-but N" and "only N" for an all_reduce, "barrier N" for a barrier of rank N alone.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
what, number = sys.argv[1], int(sys.argv[2])
first, mine = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", dist.get_rank() == number
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 61):
    time.sleep(0.01)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 31 and first and what == "barrier" and mine:
        dist.barrier()
    elif step == 31 and first and what in ("only", "all-but") and mine == (what == "only"):
        dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
