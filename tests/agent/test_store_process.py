"""The store of a generation in a process of its own: real torch on both ends of the line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from closeranks import linux
from closeranks.agent.spares import ExecSource, Spare
from closeranks.agent.store_process import StoreProcess
from closeranks.errors import ZygoteError
from conftest import eventually

pytestmark = pytest.mark.torch

MEETS = """
    import os, sys
    import torch, torch.distributed as dist
    from closeranks.worker import store
    rank = int(sys.argv[2])
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
                      GLOO_SOCKET_IFNAME="lo")
    store.register(sys.argv[1])
    for meeting in range(2):
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print(total.item(), flush=True)
        dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _as_an_agent() -> Iterator[None]:
    linux.become_subreaper()
    yield


def with_spare(
    body: Callable[[Spare], Awaitable[None]], modules: tuple[str, ...] = ("torch.distributed",)
) -> None:
    async def main() -> None:
        source = ExecSource(list(modules), dict(os.environ), ["room" * 50])
        (spare,) = await source.make(1)
        await body(spare)
        source.close()

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(main())
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "descriptors are left"


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_ranks_meet_in_it_again_and_again_and_it_ends_when_told() -> None:
    async def body(spare: Spare) -> None:
        lost: list[bool] = []
        opened = await StoreProcess.open(spare, lambda: lost.append(True), environment={})
        assert comm(opened.pid) == "cr-store"
        program = textwrap.dedent(MEETS)
        place = f"tcp://127.0.0.1:{opened.port}"
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                program,
                place,
                str(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            out, err = await asyncio.wait_for(rank.communicate(), 60)
            assert out.split() == [b"3.0", b"3.0"], err.decode()
        opened.close()
        opened.close()
        assert not comm(opened.pid) and lost == []

    with_spare(body)


def test_one_that_dies_is_missed_once() -> None:
    async def body(spare: Spare) -> None:
        lost = asyncio.Event()
        opened = await StoreProcess.open(spare, lost.set, environment={})
        os.kill(opened.pid, signal.SIGKILL)
        await asyncio.wait_for(lost.wait(), 10)
        opened.close()
        assert eventually(lambda: not comm(opened.pid), 5.0)

    with_spare(body)


def test_a_spare_that_is_gone_opens_none() -> None:
    async def body(spare: Spare) -> None:
        os.kill(spare.pid, signal.SIGKILL)
        with pytest.raises(ZygoteError, match="the store did not open"):
            await StoreProcess.open(spare, lambda: None, environment={})

    with_spare(body, ("json",))


def test_one_that_can_t_open_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def body(spare: Spare) -> None:
        with pytest.raises(ZygoteError, match=r"the store did not open: ModuleNotFoundError: .*torch"):
            await StoreProcess.open(spare, lambda: None, environment={})

    with_spare(body, ("json",))
