"""Threads of the script's own, some of them issuing collectives."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist


def summed(group, value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def main():
    dist.init_process_group("gloo")
    groups = [dist.new_group() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        print(list(pool.map(summed, groups, range(4))))
    local = threading.local()
    local.value = 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(hasattr(local, "value")))
    thread.start()
    thread.join()
    print(seen, threading.current_thread() is threading.main_thread(), threading.main_thread().name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
