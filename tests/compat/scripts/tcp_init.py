"""The older way to start: init_method="tcp://..." with rank and world size given by hand."""

import os

import torch
import torch.distributed as dist

address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)
value = torch.tensor([rank + 1])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.item()}")
dist.barrier()
dist.destroy_process_group()
