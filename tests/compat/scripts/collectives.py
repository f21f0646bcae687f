"""Every collective that gloo knows, called as scripts call them: positional, by name, async, imported."""

import torch
import torch.distributed as dist
from torch.distributed import all_reduce


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}

    value = torch.tensor([rank + 1.0])
    all_reduce(value)
    results["all_reduce"] = value
    value = torch.tensor([rank + 1.0])
    work = dist.all_reduce(tensor=value, op=dist.ReduceOp.MAX, async_op=True)
    results["async"] = (work.wait(), work.is_completed(), value.item())
    value = torch.tensor([rank])
    dist.broadcast(value, src=1)
    results["broadcast"] = value
    value = torch.tensor([rank + 1])
    dist.reduce(value, dst=0)
    results["reduce"] = value if rank == 0 else "-"
    pieces = [torch.empty(2) for _ in range(size)]
    dist.all_gather(pieces, torch.full((2,), float(rank)))
    results["all_gather"] = torch.cat(pieces)
    whole = torch.empty(2 * size)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    results["all_gather_into_tensor"] = whole
    piece = torch.empty(2)
    dist.reduce_scatter_tensor(piece, torch.arange(2.0 * size) + rank)
    results["reduce_scatter_tensor"] = piece
    for name, width, out in (("all_gather_single", 1, size), ("reduce_scatter_single", size, 1)):
        collective = getattr(dist, name, None)  # the names that torch 2.13 gave the two above
        whole = torch.empty(out)
        if collective:
            collective(whole, torch.full((width,), rank + 1.0))
        results[name] = whole if collective else "-"
    received = torch.empty(size)
    dist.all_to_all_single(received, torch.arange(float(size)) + 10 * rank)
    results["all_to_all_single"] = received
    pieces = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), pieces, dst=0)
    results["gather"] = torch.cat(pieces) if pieces else "-"
    piece = torch.empty(1)
    dist.scatter(piece, [torch.tensor([5.0 + i]) for i in range(size)] if rank == 0 else None, src=0)
    results["scatter"] = piece
    objects = [{"from": rank}, None]
    dist.broadcast_object_list(objects, src=0)
    results["broadcast_object_list"] = objects
    gathered = [None] * size
    dist.all_gather_object(gathered, (rank, "x" * rank))
    results["all_gather_object"] = gathered
    scattered = [None]
    dist.scatter_object_list(scattered, [f"for {i}" for i in range(size)] if rank == 0 else None, src=0)
    results["scatter_object_list"] = scattered
    dist.monitored_barrier()
    dist.barrier()
    try:
        dist.all_reduce("not a tensor")
    except TypeError as error:
        results["error"] = type(error).__name__

    for name, result in results.items():
        print(name, result.tolist() if isinstance(result, torch.Tensor) else result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
