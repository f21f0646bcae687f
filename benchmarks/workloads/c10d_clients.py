"""torchrun's rendezvous, as its agents do it, with many clients: the peer of the controller's benchmark.

    c10d_clients.py --clients 64 --limit 60

Each client is a process with the handler that torchrun makes (c10d backend, default settings); the first one
hosts the store. All join at once; once all have, they all join again at once, as they do when a rank or a
node has failed. Processes are forked with torch imported. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

ROUNDS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client(number: int, clients: int, port: int, ready: int, starts: list[int]) -> None:
    """Makes its handler, then joins whenever it is told to; tells when it has."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"localhost:{port}",
        run_id="benchmark",
        min_nodes=clients,
        max_nodes=clients,
        is_host=number == 0,
    )
    handler = get_rendezvous_handler(parameters)
    os.write(ready, b"r")
    for start in starts:
        os.read(start, 1)
        handler.next_rendezvous()
        os.write(ready, b"r")
    time.sleep(3600)  # its keep-alives go on


def wait_for(ready: int, count: int, deadline_s: float) -> bool:
    """Whether so many have told in time."""
    while count:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([ready], [], [], left_s)[0]:
            return False
        count -= len(os.read(ready, count))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds, for each step")
    arguments = parser.parse_args()
    clients: int = arguments.clients
    port, (ready, tell) = free_port(), os.pipe()
    starts = [os.pipe() for _ in range(ROUNDS)]
    pids: list[int] = []
    result: dict[str, object] = {"clients": clients}
    sys.stdout.flush()
    try:
        for number in range(clients):
            pid = os.fork()
            if pid == 0:
                try:
                    client(number, clients, port, tell, [start for start, _ in starts])
                finally:
                    os._exit(1)
            pids.append(pid)
            if number == 0 and not wait_for(ready, 1, time.monotonic() + arguments.limit):
                break
        if wait_for(ready, clients - 1, time.monotonic() + arguments.limit):
            for name, (_, start) in zip(("join_s", "again_s"), starts, strict=True):
                began_s = time.monotonic()
                os.write(start, b"g" * clients)
                if not wait_for(ready, clients, began_s + arguments.limit):
                    break
                result[name] = time.monotonic() - began_s
                time.sleep(1.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
