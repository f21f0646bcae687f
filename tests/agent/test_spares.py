"""One contract for both ways of making workers: real processes, no torch (they import json instead)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from closeranks import linux, wire
from closeranks.agent.spares import ExecSource, Source, Spare, ZygoteSource
from closeranks.errors import ZygoteError
from closeranks.progress import PAGE_BYTES, read_page

KINDS = ("zygote", "exec")


def make_source(kind: str, modules: list[str], notices: list[str] | None = None) -> Source:
    environment = {**os.environ, "CLOSERANKS_TEST": "yes"}
    room = ["x" * 200]
    if kind == "exec":
        return ExecSource(modules, environment, room)
    return ZygoteSource(modules, environment, room, (notices if notices is not None else []).append)


@pytest.fixture(autouse=True, scope="module")
def _subreaper() -> Iterator[None]:
    """As the agent is: workers forked twice become our children."""
    linux.become_subreaper()
    yield


def go(spare: Spare, script: Path, *args: str) -> tuple[int, int, int]:
    """Send the order; returns (stdout read end, stderr read end, pages memfd)."""
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    pages = os.memfd_create("pages")
    os.ftruncate(pages, PAGE_BYTES)
    stacks = os.memfd_create("stacks")
    order = {
        "type": "go",
        "generation": 3,
        "rank": 0,
        "local_rank": 0,
        "local_world_size": 1,
        "entry": {"kind": "script", "target": str(script), "args": list(args)},
        "env": {"RANK": "0", "WORLD_SIZE": "1"},
        "store": "",
        "faults": [],
        "numa_binding": None,
    }
    spare.socket.setblocking(True)
    wire.send(spare.socket, order, [out_w, err_w, pages, stacks])
    for fd in (out_w, err_w, stacks):
        os.close(fd)
    return out_r, err_r, pages


def read_all(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        return file.read().decode()


def wait(spare: Spare) -> int:
    info = os.waitid(os.P_PIDFD, spare.pidfd, os.WEXITED)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def with_source(kind: str, modules: list[str], body: Callable[[Source], Awaitable[None]]) -> None:
    async def run() -> None:
        source = make_source(kind, modules)
        try:
            await source.start()
            await body(source)
        finally:
            source.close()
            for pid in source.pids():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
def test_a_spare_becomes_an_ordinary_script(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text(
        "import os, sys, pickle\n"
        "class Thing: pass\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "print(__name__, __file__, sys.argv, os.environ['RANK'], os.environ['CLOSERANKS_TEST'])\n"
        "print('json' in sys.modules, sys.path[0], sys.modules['__main__'].Thing is Thing)\n"
        "print(open('/proc/self/cmdline').read().replace(chr(0), ' ').strip(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )

    async def body(source: Source) -> None:
        (spare,) = await source.make(1)
        assert os.getpid() == int(Path(f"/proc/{spare.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        out, err, pages = go(spare, script, "--x", "a b")
        assert wait(spare) == 7
        text = read_all(out)
        assert text.splitlines() == [
            f"__main__ {script} {[str(script), '--x', 'a b']} 0 yes",
            f"True {tmp_path} True",
        ]
        assert read_all(err).strip() == f"python -u {script} --x a b"
        page = read_page(memoryview(os.pread(pages, PAGE_BYTES, 0)))
        os.close(pages)
        assert page is not None
        assert (page.rank, page.generation, page.pid) == (0, 3, spare.pid)
        spare.close()

    with_source(kind, ["json"], body)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_shows_the_scripts_own_traceback_and_is_reported(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("def f():\n    raise KeyError('lost')\n\nf()\n")

    async def body(source: Source) -> None:
        (spare,) = await source.make(1)
        out, err, pages = go(spare, script)
        os.close(pages)
        assert wait(spare) == 1
        read_all(out)
        text = read_all(err)
        assert text.splitlines()[0] == "Traceback (most recent call last):"
        assert text.splitlines()[1] == f'  File "{script}", line 4, in <module>'
        assert "bootstrap" not in text and text.rstrip().endswith("KeyError: 'lost'")
        received = wire.receive(spare.socket)
        assert received is not None
        assert received[0]["type"] == "raised"
        assert received[0]["error"]["type"] == "KeyError"
        assert received[0]["error"]["place"] == f"{script}:2"
        spare.close()

    with_source(kind, ["json"], body)


@pytest.mark.parametrize("kind", KINDS)
def test_spares_die_when_their_maker_is_killed(kind: str) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from closeranks import linux\n"
        "linux.become_subreaper()\n"
        "from tests.agent.test_spares import make_source\n"
        "async def run():\n"
        f"    source = make_source({kind!r}, ['json'])\n"
        "    await source.start()\n"
        "    spares = await source.make(2)\n"
        "    print(*[s.pid for s in spares], *source.pids(), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, text=True
    ) as maker:
        assert maker.stdout is not None
        pids = [int(pid) for pid in maker.stdout.readline().split()]
        assert len(pids) >= 2
        fds = [os.pidfd_open(pid) for pid in pids]
        maker.send_signal(signal.SIGKILL)
        for fd in fds:  # a pidfd is readable once its process has ended
            assert select.select([fd], [], [], 5.0)[0], "a spare outlived its maker"
            os.close(fd)


def test_a_zygote_with_threads_refuses_to_fork(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )

    async def run() -> str:
        os.environ["PYTHONPATH"] = str(tmp_path)
        source = make_source("zygote", ["starts_a_thread"])
        try:
            await source.start()
        except ZygoteError as error:
            return str(error)
        finally:
            del os.environ["PYTHONPATH"]
            source.close()
        return ""

    assert "2 threads" in asyncio.run(run())


def test_a_module_that_can_not_be_preloaded_is_a_notice() -> None:
    async def run() -> list[str]:
        notices: list[str] = []
        source = make_source("zygote", ["json", "no_such_module_here"], notices)
        try:
            await source.start()
            (spare,) = await source.make(1)
            spare.close()
        finally:
            source.close()
        return notices

    (notice,) = asyncio.run(run())
    assert "no_such_module_here" in notice


def test_many_spares_at_once() -> None:
    threads = threading.active_count()  # other tests of this process may have left some

    async def body(source: Source) -> None:
        spares = await source.make(150)
        assert len({spare.pid for spare in spares}) == 150
        for spare in spares:
            spare.close()

    with_source("zygote", ["json"], body)
    assert threading.active_count() == threads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("source", "threshold"), [("", str(gc.get_threshold()[0])), ("import gc; gc.set_threshold(123)", "123")]
)
def test_garbage_is_not_looked_for_while_modules_are_imported(
    kind: str, source: str, threshold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as ever afterwards, or as a module wants it."""
    (tmp_path / "preloaded.py").write_text(f"import gc\nseen = gc.get_threshold()[0]\n{source}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(
        "import gc, preloaded\nprint(gc.isenabled(), preloaded.seen > 10**6, gc.get_threshold()[0])\n"
    )

    async def body(made: Source) -> None:
        (spare,) = await made.make(1)
        out, err, pages = go(spare, script)
        assert wait(spare) == 0, read_all(err)
        assert read_all(out) == f"True True {threshold}\n"
        os.close(pages)
        os.close(err)
        spare.close()

    with_source(kind, ["json", "preloaded"], body)
