"""The agent's side of log capture: it never waits for the pump, whatever the pump does."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from log_rig import PATIENCE_S, Console, Rig, wait_for

import closeranks
from closeranks.agent.logs import LogPump
from closeranks.config import LogConfig
from closeranks.errors import CloseranksError, ConfigError


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as made:
        yield made


def stop(rig: Rig) -> int:
    """Freeze the pump once it is up; returns its pid."""
    rig.drain(99)
    pid = rig.pump.pid
    assert pid is not None
    rig.pump.handle_readable()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3], "a stopped pump")
    return pid


def put(rig: Rig, rank: int, text: bytes, generation: int = 0) -> None:
    out, err = rig.attach(rank, generation)
    os.write(out, text)
    os.close(out)
    os.close(err)


def test_the_pump_starts_with_few_imports() -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1]); import closeranks.agent.log_pump; "
        "print([m for m in ('torch', 'dataclasses', 'pathlib', 'subprocess', 'asyncio', 'logging')"
        " if m in sys.modules])"
    )
    root = str(Path(closeranks.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, root], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_nothing_but_its_own_channel_is_leaked_into_the_pump(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.set_inheritable(write_fd, True)
    try:
        with Rig(tmp_path) as rig:
            rig.drain(99)
            links = [os.readlink(fd) for fd in Path(f"/proc/{rig.pump.pid}/fd").iterdir()]  # noqa: PTH115
            assert f"pipe:[{os.fstat(write_fd).st_ino}]" not in links
            assert sorted(link.split("[")[0].rstrip(":") for link in links) == [
                "/dev/null", "anon_inode", "anon_inode", "pipe", "pipe", "socket",
            ]  # fmt: skip
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_write_ends_block_as_usual_and_are_not_inherited(rig: Rig) -> None:
    fds = rig.attach(0)
    for fd in fds:
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_pipes_get_smaller_as_they_become_many(rig: Rig) -> None:
    sizes = []
    for rank in range(40):
        for fd in rig.attach(rank):
            sizes.append(fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ))
            os.close(fd)
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= 32 << 20
    assert sizes[0] > sizes[-1]


def test_fileno_is_readable_when_there_is_a_message(rig: Rig) -> None:
    poller = select.poll()
    poller.register(rig.pump.fileno(), select.POLLIN)
    assert poller.poll(0) == []
    assert rig.pump.handle_readable() == []
    rig.pump.request_drain(7)
    assert poller.poll(PATIENCE_S * 1000)
    assert rig.pump.handle_readable() == [{"type": "drained", "generation": 7}]
    assert poller.poll(0) == []


def test_say_comes_after_what_was_drained_and_in_one_piece(rig: Rig) -> None:
    put(rig, 0, b"rank\n" * 100)
    rig.drain()
    screen = b"".join(b"| incident line %d\n" % i for i in range(200))
    rig.pump.say(screen)
    rig.pump.say(b"")
    rig.pump.say(b"no line feed")
    rig.out.wait_for(b"no line feed\n")
    assert rig.out.bytes == b"[0] rank\n" * 100 + screen + b"no line feed\n"


def test_a_long_say_is_cut_at_line_ends_and_arrives_whole(rig: Rig) -> None:
    text = b"".join(b"%d " % i + b"x" * 1000 + b"\n" for i in range(200)) + b"y" * 100_000
    rig.pump.say(text)
    wait_for(lambda: rig.poll() or rig.out.bytes.count(b"y") == 100_000, "all of it")
    assert rig.out.bytes.startswith(text[:200_000])
    pieces = rig.out.bytes[rig.out.bytes.index(b"y") :].splitlines()
    assert b"".join(pieces) == b"y" * 100_000, "a line that is too long is split"
    assert len(pieces) <= 5


def test_a_frozen_pump_holds_nothing_up_and_gets_all_when_it_wakes(rig: Rig) -> None:
    pid = stop(rig)
    started_s = time.monotonic()
    for number in range(300):
        put(rig, number, b"from %d\n" % number)
        rig.pump.say(b"said %d " % number + b"x" * 2000)
    assert rig.pump.handle_readable() == []
    assert time.monotonic() - started_s < PATIENCE_S
    poller = select.poll()
    poller.register(rig.pump.fileno(), select.POLLIN)
    assert poller.poll(0) == [], "nothing to do, so no busy loop"
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: poller.poll(0) or not rig.pump._outbox, "the channel to take more")
    rig.drain()
    rig.shown(b"said 299 ")
    said = [line.split()[1] for line in rig.out.lines if line.startswith("said")]
    assert said == [str(number) for number in range(300)]
    for number in range(300):
        assert rig.path(number).read_bytes() == b"from %d\n" % number


def test_what_is_said_to_a_frozen_pump_is_bounded_and_the_loss_is_told(rig: Rig) -> None:
    pid = stop(rig)
    for number in range(5000):
        rig.pump.say(b"said %d " % number + b"x" * 1000)
    assert sum(len(entry[0]) for entry in rig.pump._outbox) <= 1 << 20
    os.kill(pid, signal.SIGCONT)
    rig.shown(b"of its own lines are not shown here]\n")
    said = [line for line in rig.out.lines if line.startswith("said ")]
    (notice,) = (line for line in rig.out.lines if line.startswith("[closeranks: "))
    assert said[0].startswith("said 0 ")
    wait_for(
        lambda: sum(line.startswith("said ") for line in rig.out.lines) + int(notice.split()[1]) == 5000,
        "each line shown or counted",
    )


def test_close_kills_a_frozen_pump_in_time(rig: Rig) -> None:
    pid = stop(rig)
    rig.pump.say(b"last words")
    started_s = time.monotonic()
    assert not rig.pump.close(0.3)
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert not Path(f"/proc/{pid}").exists()
    assert rig.pump.pid is None
    rig.pump.close()


def test_close_shows_what_no_pump_could(rig: Rig) -> None:
    pid = stop(rig)
    os.kill(pid, signal.SIGKILL)
    rig.message("died")
    rig.pump.say(b"the exit reason")
    rig.pump.close(1.0)
    rig.out.wait_for(b"the exit reason\n")


def test_close_after_the_pump_died_saves_what_the_pipes_hold(rig: Rig) -> None:
    pid = stop(rig)
    put(rig, 0, b"precious\n")
    os.kill(pid, signal.SIGKILL)
    rig.message("died")
    assert rig.pump.close(PATIENCE_S)
    assert rig.path(0).read_bytes() == b"precious\n"


def test_a_pump_that_keeps_dying_is_given_up(rig: Rig) -> None:
    with pytest.raises(CloseranksError, match="log pump died 10 times"):
        for _ in range(11):
            assert rig.pump.pid is not None
            os.kill(rig.pump.pid, signal.SIGKILL)
            rig.pump.restart()
    assert rig.pump.close(0.1) in (True, False)


def test_a_drain_under_way_is_answered_by_the_next_pump(rig: Rig) -> None:
    pid = stop(rig)
    put(rig, 0, b"hello\n")
    rig.pump.request_drain(0)
    os.kill(pid, signal.SIGKILL)
    rig.message("died")
    assert not rig.pump.drain(0, PATIENCE_S), "no pump, no wait"
    rig.pump.restart()
    rig.message("drained")
    rig.drain(0)
    assert rig.path(0).read_bytes() == b"hello\n"


def test_forget_lets_go_of_the_pipes(rig: Rig) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    pid = stop(rig)
    for rank in range(100):
        put(rig, rank, b"x\n", 3)
    rig.pump.forget(3)
    rig.pump.forget(3)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.kill(pid, signal.SIGCONT)
    put(rig, 0, b"next\n", 4)
    rig.drain(4)
    assert rig.path(0, "out", 4).read_bytes() == b"next\n"


def test_no_descriptors_left_is_a_clear_error_and_leaks_none(rig: Rig) -> None:
    rig.drain(99)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd.name) for fd in Path("/proc/self/fd").iterdir()}
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
    spare = []
    try:
        while True:  # fill the holes, up to three free ones
            try:
                spare.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(min(3, len(spare))):
            os.close(spare.pop())
        for _ in range(20):
            with pytest.raises(ConfigError, match="output pipes of rank 12: Too many open files; raise"):
                rig.attach(12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
    assert {int(fd.name) for fd in Path("/proc/self/fd").iterdir()} <= used | {max(used) + 1}
    put(rig, 12, b"works again\n")
    rig.drain()
    assert rig.path(12).read_bytes() == b"works again\n"


def test_a_missing_interpreter_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="can't start the log pump"):
        LogPump.start(LogConfig())


def test_a_closed_stdout_is_no_obstacle(tmp_path: Path) -> None:
    err = Console()
    pump = LogPump.start(LogConfig(), 12345, err.write_fd)
    out, other = pump.attach(0, 0, 0, tmp_path / "0.out", tmp_path / "0.err", world_size=1)
    os.write(out, b"unseen\n")
    os.write(other, b"seen\n")
    os.close(out)
    os.close(other)
    assert pump.drain(0, PATIENCE_S)
    assert pump.close(PATIENCE_S)
    err.close()
    assert err.bytes == b"seen\n"
    assert (tmp_path / "0.out").read_bytes() == b"unseen\n"


@pytest.mark.parametrize("name", ["with space and 'quotes'", "new\nline", "undecodable \udcff", "日本"])
def test_hostile_directory_names(tmp_path: Path, name: str) -> None:
    with Rig(tmp_path / name) as rig:
        put(rig, 0, b"hello\n")
        rig.finish()
        assert rig.path(0).read_bytes() == b"hello\n"


def test_a_relative_path_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Rig(Path("runs")) as rig:
        put(rig, 0, b"hello\n")
        rig.finish()
    assert (tmp_path / "runs" / "logs" / "0" / "0.out").read_bytes() == b"hello\n"
