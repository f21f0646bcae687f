"""A script that opens a TCPStore of its own, next to the launcher's port, and hands it to torch."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]) + 1,
    world_size,
    is_master=rank == 0,
    timeout=timedelta(seconds=60),
)
store.set(f"hello/{rank}", f"from {rank}")
store.wait([f"hello/{peer}" for peer in range(world_size)])
print([store.get(f"hello/{peer}").decode() for peer in range(world_size)], store.add("count", 0))
dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=world_size)
value = torch.tensor([rank + 1])
dist.all_reduce(value)
print(value.item())
dist.barrier()
dist.destroy_process_group()
