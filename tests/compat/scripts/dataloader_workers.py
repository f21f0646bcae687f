"""DataLoader workers: forked and spawned, persistent and not, with a DistributedSampler."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        assert info is not None and info.num_workers == 2
        return index, index * index, info.id


def epoch(loader):
    seen, workers = [], set()
    for indices, squares, ids in loader:
        assert torch.equal(indices * indices, squares)
        seen += indices.tolist()
        workers |= set(ids.tolist())
    return seen, sorted(workers)


def main():
    dist.init_process_group("gloo")
    data = Squares()
    for context in ("fork", "spawn"):
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(
            data,
            batch_size=2,
            sampler=sampler,
            num_workers=2,
            multiprocessing_context=context,
            persistent_workers=True,
            prefetch_factor=2,
        )
        first, workers = epoch(loader)
        second, _ = epoch(loader)
        assert first == second
        print(f"{context}: {first} by workers {workers}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
