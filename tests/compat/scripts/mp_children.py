"""Children of a rank: multiprocessing by fork and spawn, torch's own spawn, os.fork, a subprocess."""

import multiprocessing
import os
import subprocess
import sys

import torch
import torch.multiprocessing as mp


def double(value):
    return value * 2


def fill(tensor, queue):
    tensor.add_(1)
    queue.put(multiprocessing.current_process().name.split("-")[0])


def spawned(index, shared):
    shared[index] = index + 1


def main():
    rank = int(os.environ["RANK"])
    assert multiprocessing.parent_process() is None
    print("main process is", multiprocessing.current_process().name)

    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        with context.Pool(2) as pool:
            print(method, "pool", pool.map(double, range(rank, rank + 4)))
        shared, queue = torch.zeros(3).share_memory_(), context.SimpleQueue()
        child = context.Process(target=fill, args=(shared, queue))
        child.start()
        name = queue.get()
        child.join()
        print(method, "child", child.exitcode, name, shared.tolist())

    shared = torch.zeros(2).share_memory_()
    mp.spawn(spawned, args=(shared,), nprocs=2)
    print("torch.multiprocessing.spawn", shared.tolist())

    pid = os.fork()
    if pid == 0:
        os._exit(17)
    print("os.fork", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    code = "import os, sys; print(os.environ['RANK'], sys.stdin.read()); sys.exit(3)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="in", capture_output=True, text=True, check=False)
    print("subprocess", done.returncode, done.stdout.strip(), done.stderr)


if __name__ == "__main__":
    main()
