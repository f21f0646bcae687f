"""The rank that is named leaves out an all_reduce in step 50, and goes on into DDP's own, from C++."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
skips = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == int(sys.argv[1])
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 81):
    loss = model(torch.randn(2, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 50 and skips:
        continue
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
