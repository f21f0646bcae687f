"""Messages round a ring, without an optimizer; rank 1 receives once more than it is sent."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
before, after = (rank - 1) % size, (rank + 1) % size
message = torch.ones(4)
for turn in range(60):
    time.sleep(0.01)
    if turn == 40 and rank == 1:
        dist.recv(message, before)
    if rank % 2 == 0:
        dist.send(message, after)
        dist.recv(message, before)
    else:
        dist.recv(message, before)
        dist.send(message, after)
dist.destroy_process_group()
