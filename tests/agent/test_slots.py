"""The ready workers of a node: real processes, which import json in torch's place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from closeranks import linux
from closeranks.agent import slots as slots_module
from closeranks.agent.slots import Slots, modules_to_preload
from closeranks.agent.spares import Spare
from closeranks.config import Entrypoint, RunConfig
from conftest import eventually

SCRIPT = Entrypoint("script", "train.py")


@pytest.fixture(autouse=True)
def _as_an_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    linux.become_subreaper()
    monkeypatch.setattr(slots_module, "modules_to_preload", lambda config: ["json", *config.preload])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield


def module(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source)
    return name


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def with_slots(
    body: Callable[[Slots], Awaitable[None]],
    *,
    count: int = 2,
    notices: list[str] | None = None,
    **config: object,
) -> None:
    """Run ``body`` with open slots, and see that nothing of them is left."""

    async def main() -> None:
        slots = Slots(RunConfig(SCRIPT, **config), count)  # type: ignore[arg-type]
        slots.open()
        heard: list[str] = [] if notices is None else notices
        slots.speak_to(heard.append)
        try:
            await body(slots)
        finally:
            pids = slots.pids()
            slots.close()
        assert eventually(lambda: not any(map(lives, pids)), 5.0), pids

    asyncio.run(main())


def let_go(spares: list[Spare]) -> None:
    for spare in spares:
        spare.close()


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("zygote", [True, False])
def test_a_whole_world_is_taken_and_another_one_made_when_asked(zygote: bool) -> None:
    async def body(slots: Slots) -> None:
        first = await slots.take()
        assert slots.kind == ("zygote" if zygote else "exec") and not slots.ready
        slots.refill()
        await until(lambda: slots.ready)
        second = await slots.take()
        pids = [spare.pid for spare in (*first, *second)]
        assert len(set(pids)) == 4 and all(map(lives, pids))
        let_go([*first, *second])

    with_slots(body, zygote=zygote)


def test_a_spare_that_died_is_not_handed_out() -> None:
    async def body(slots: Slots) -> None:
        await until(lambda: slots._making is None or slots._making.done())
        slots.refill()
        await until(lambda: slots.ready)
        dead = slots._spares[1].pid
        os.kill(dead, signal.SIGKILL)
        await until(lambda: not lives(dead))
        taken = await slots.take()
        assert len(taken) == 2 and dead not in {spare.pid for spare in taken}
        assert all(lives(spare.pid) for spare in taken)
        let_go(taken)

    with_slots(body)


def test_a_dead_zygote_is_replaced_and_the_fourth_is_the_last() -> None:
    notices: list[str] = []

    async def body(slots: Slots) -> None:
        let_go(await slots.take())
        for _ in range(slots_module._MAX_ZYGOTES):
            assert slots.kind == "zygote"
            (zygote,) = slots.pids()
            os.kill(zygote, signal.SIGKILL)
            await until(lambda pid=zygote: not lives(pid))
            let_go(await slots.take())
        assert slots.kind == "exec"

    with_slots(body, notices=notices)
    assert sum("starting another one" in text for text in notices) == slots_module._MAX_ZYGOTES - 1
    assert "workers are started one by one" in notices[-1]


def test_a_preload_that_starts_a_thread_is_not_forked(tmp_path: Path) -> None:
    name = module(
        tmp_path,
        "threaded",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    )
    notices: list[str] = []

    async def body(slots: Slots) -> None:
        let_go(await slots.take())
        assert slots.kind == "exec" and "2 threads" in slots.fallback_reason

    with_slots(body, preload=(name,), notices=notices)
    assert len(notices) == 1 and "2 threads after its imports" in notices[0]


def test_a_preload_that_ends_its_process_is_left_out(tmp_path: Path) -> None:
    name = module(tmp_path, "deadly", "import os\nos._exit(3)\n")
    notices: list[str] = []

    async def body(slots: Slots) -> None:
        let_go(await slots.take())
        assert slots.kind == "exec"

    with_slots(body, preload=(name,), notices=notices)
    assert "exited with code 3" in notices[0] and notices[0].endswith("without preloading deadly")


def test_what_a_script_turned_out_to_need_is_imported_ahead(tmp_path: Path) -> None:
    name = module(
        tmp_path, "learned", f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
    )

    async def body(slots: Slots) -> None:
        let_go(await slots.take())
        slots.refill()
        await until(lambda: slots.ready)
        before = {spare.pid for spare in slots._spares}
        await slots.learn([name, "json"])
        await until(lambda: slots.ready)
        assert (tmp_path / "imported").exists()
        assert before.isdisjoint(spare.pid for spare in slots._spares), "old spares have not learned"

    with_slots(body)


def test_where_no_worker_can_live_that_is_said(tmp_path: Path) -> None:
    from closeranks.errors import ZygoteError

    async def body(slots: Slots) -> None:
        with pytest.raises(ZygoteError, match="a new worker did not report: it exited with code 1"):
            await slots.take()

    with_slots(body, python="/bin/false", zygote=False)


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("print(1)", ["torch", "torch.distributed"]),
        ("opt = torch.optim.SGD(p)", ["torch", "torch.distributed", "torch._dynamo"]),
        ("from accelerate import Accelerator", ["torch", "torch.distributed", "torch._dynamo"]),
    ],
)
def test_what_a_script_will_surely_import_is_imported_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, modules: list[str]
) -> None:
    monkeypatch.undo()
    (tmp_path / "train.py").write_text(source)
    script = str(tmp_path / "train.py")
    assert modules_to_preload(RunConfig(Entrypoint("script", script), preload=("mine",))) == [
        *modules,
        "mine",
    ]
    assert modules_to_preload(RunConfig(Entrypoint("command", script))) == []
    assert modules_to_preload(RunConfig(Entrypoint("script", "gone.py"))) == ["torch", "torch.distributed"]
