"""A 2 x 2 mesh with named dimensions: collectives in each row, each column and everywhere."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rank = dist.get_rank()
    sums = []
    for name in ("data", "tensor"):
        value = torch.tensor([float(10**rank)])
        dist.all_reduce(value, group=mesh.get_group(name))
        sums.append(f"{name} {int(value.item())}")
    everywhere = torch.tensor([float(10**rank)])
    dist.all_reduce(everywhere)
    odd = dist.new_group([1, 3])
    if rank % 2:
        value = torch.tensor([float(rank)])
        dist.broadcast(value, src=3, group=odd)
        sums.append(f"odd {int(value.item())}")
    print(f"rank {rank} at {tuple(mesh.get_coordinate())}: {', '.join(sums)}, all {int(everywhere.item())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
