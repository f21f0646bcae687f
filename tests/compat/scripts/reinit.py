"""Process groups made, torn down and made again in one script."""

import torch
import torch.distributed as dist

for turn in range(3):
    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + turn])
    dist.all_reduce(value)
    print(f"turn {turn}: {value.item()} {dist.is_initialized()}")
    dist.barrier()
    dist.destroy_process_group()
print(dist.is_initialized())
