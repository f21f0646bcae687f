"""The log pump as a process: real ranks, pipes, terminals, full disks, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from log_rig import PATIENCE_S, Console, Rig, wait_for

from closeranks.config import LogConfig, StdStreams


def test_lines_of_each_stream_arrive_in_order_in_file_and_on_the_console(tmp_path: Path) -> None:
    with Rig(tmp_path, out=Console(), err=Console()) as rig:
        for rank in range(4):
            rig.rank(rank, f"for i in range(500):\n print({rank}, i)\n print('e', i, file=sys.stderr)")
        rig.finish()
        for rank in range(4):
            assert rig.path(rank).read_text() == "".join(f"{rank} {i}\n" for i in range(500))
            assert rig.path(rank, "err").read_text() == "".join(f"e {i}\n" for i in range(500))
            out = [line for line in rig.out.lines if line.startswith(f"[{rank}] ")]
            assert out == [f"[{rank}] {rank} {i}" for i in range(500)]
            err = [line for line in rig.err.lines if line.startswith(f"[{rank}] ")]
            assert err == [f"[{rank}] e {i}" for i in range(500)]
        assert rig.poll() == [{"type": "drained", "generation": 0}]


def test_binary_and_non_utf8_output_is_byte_exact_in_the_file(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.rank(0, "b = bytes(range(256)) * 4096\nwhile b: b = b[os.write(1, b):]")
        rig.rank(1, "os.write(2, b'\\xff\\xfe caf\\xe9\\x00\\n')")
        rig.finish()
        assert rig.path(0).read_bytes() == bytes(range(256)) * 4096
        assert rig.path(1, "err").read_bytes() == b"\xff\xfe caf\xe9\x00\n"
        assert b"[1] \xff\xfe caf\xe9\x00\n" in rig.out.bytes


def test_a_single_rank_goes_to_the_console_byte_for_byte(tmp_path: Path) -> None:
    with Rig(tmp_path, world_size=1) as rig:
        bar = "for i in range(0, 101, 10): os.write(2, b'\\r %d%%|\\xe2\\x96\\x88|' % i)"
        script = bar + "\nos.write(1, b'\\nend')"
        rig.rank(0, script)
        rig.finish()
        bars = b"".join(b"\r %d%%|\xe2\x96\x88|" % i for i in range(0, 101, 10))
        assert sorted(rig.out.bytes) == sorted(bars + b"\nend")
        assert bars in rig.out.bytes
        assert rig.path(0, "err").read_bytes() == bars


def test_the_template_of_torchrun_sets_the_prefix_even_for_one_rank(tmp_path: Path) -> None:
    config = LogConfig(prefix_template="[${role_name}/${local_rank}/${rank}/$$/${what}]:")
    with Rig(tmp_path, config, world_size=1, role="trainer") as rig:
        out, err = rig.attach(5, local_rank=1)
        os.write(out, b"a\nb\n")
        os.close(out)
        os.close(err)
        rig.finish()
        assert rig.out.lines == [f"[trainer/1/5/$/${{what}}]:{letter}" for letter in "ab"]


# --- where a stream is shown ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (LogConfig(), {"0 out", "0 err", "1 out", "1 err"}),
        (LogConfig(redirects=StdStreams(3)), set()),
        (LogConfig(redirects=StdStreams(1)), {"0 err", "1 err"}),
        (LogConfig(redirects=StdStreams(3), tee=StdStreams(2)), {"0 err", "1 err"}),
        (LogConfig(redirects=StdStreams(0, {0: 1, 1: 2})), {"0 err", "1 out"}),
        (LogConfig(redirects=StdStreams(3), tee=StdStreams(0, {1: 3})), {"1 out", "1 err"}),
        (LogConfig(console_ranks=frozenset({1})), {"1 out", "1 err"}),
        (LogConfig(console_ranks=frozenset({0}), tee=StdStreams(3)), {"0 out", "0 err"}),
    ],
)
def test_console_follows_redirects_tee_and_ranks_and_files_hold_all(
    tmp_path: Path, config: LogConfig, shown: set[str]
) -> None:
    with Rig(tmp_path, config, out=Console(), err=Console()) as rig:
        for local_rank in (0, 1):
            out, err = rig.attach(local_rank + 4, local_rank=local_rank)
            os.write(out, b"%d out\n" % local_rank)
            os.write(err, b"%d err\n" % local_rank)
            os.close(out)
            os.close(err)
        rig.finish()
        assert {line.partition("] ")[2] for line in rig.out.lines} == {s for s in shown if "out" in s}
        assert {line.partition("] ")[2] for line in rig.err.lines} == {s for s in shown if "err" in s}
        for local_rank in (0, 1):
            assert rig.path(local_rank + 4).read_text() == f"{local_rank} out\n"
            assert rig.path(local_rank + 4, "err").read_text() == f"{local_rank} err\n"


def test_matching_lines_are_duplicated_per_generation(tmp_path: Path) -> None:
    config = LogConfig(stdout_filters=("apple", "orange"), stderr_filters=("café",), redirects=StdStreams(3))
    with Rig(tmp_path, config) as rig:
        rig.rank(0, "print('an apple'); print('pear'); print('orange'); print('apple', file=sys.stderr)")
        rig.rank(1, "print('pineapple'); os.write(2, 'un café'.encode())", generation=1)
        for process in rig.processes:
            process.wait()
        rig.drain(1)
        rig.finish()
        logs = tmp_path / "logs"
        assert (logs / "0" / "filtered_stdout.log").read_text() == "[0] an apple\n[0] orange\n"
        assert (logs / "1" / "filtered_stdout.log").read_text() == "[1] pineapple\n"
        assert (logs / "1" / "filtered_stderr.log").read_text() == "[1] un café\n"
        assert not (logs / "0" / "filtered_stderr.log").exists()


@pytest.mark.parametrize(
    ("kind", "environment", "coloured"),
    [
        ("pipe", {}, False),
        ("pty", {}, True),
        ("pty", {"NO_COLOR": "1"}, False),
        ("pty", {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_on_a_terminal_and_never_in_files(
    tmp_path: Path, kind: str, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = LogConfig(stdout_filters=("hello",))
    with Rig(tmp_path, config, out=Console(kind)) as rig:
        rig.rank(2, "print('hello \\x1b[31mred\\x1b[0m')").wait()
        rig.out.wait_for(b"\x1b[0m\n")
        prefix = b"\x1b[33m[2]\x1b[0m " if coloured else b"[2] "
        assert rig.out.bytes == prefix + b"hello \x1b[31mred\x1b[0m\n"
        rig.finish()
        assert rig.path(2).read_bytes() == b"hello \x1b[31mred\x1b[0m\n"
        filtered = tmp_path / "logs" / "0" / "filtered_stdout.log"
        assert filtered.read_bytes().startswith(b"[2] hello")


def test_a_partial_line_shows_by_itself_and_is_not_torn_by_others(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        out, err = rig.attach(0)
        other = rig.attach(1)
        os.write(out, b"Password: ")
        rig.out.wait_for(b"[0] Password: ")
        os.write(other[0], b"meanwhile\n")
        rig.out.wait_for(b"[1] meanwhile\n")
        rig.pump.say(b"and the agent")
        rig.out.wait_for(b"and the agent\n")
        os.write(out, b"thanks\n")
        rig.out.wait_for(b"thanks\n")
        assert rig.out.lines == ["[0] Password: ", "[1] meanwhile", "and the agent", "[0] thanks"]
        for fd in (out, err, *other):
            os.close(fd)
        rig.finish()
        assert rig.path(0).read_bytes() == b"Password: thanks\n"


def test_progress_bars_of_several_ranks_become_lines(tmp_path: Path) -> None:
    script = "for i in range(41): os.write(2, b'\\r %d%%' % i); time.sleep(0.02)\nos.write(2, b'\\n')"
    with Rig(tmp_path) as rig:
        for rank in (0, 1):
            rig.rank(rank, script)
        rig.finish()
        for rank in (0, 1):
            lines = [line for line in rig.out.lines if line.startswith(f"[{rank}] ")]
            assert lines[-1] == f"[{rank}]  40%"
            assert 2 <= len(lines) <= 41
        assert b"\r" not in rig.out.bytes


# --- floods and bounds ----------------------------------------------------------------------------------

FLOOD = "b = (b'x' * 99 + b'\\n') * 640\nfor _ in range({blocks}): os.write(1, b)\n"


def test_a_flood_is_bounded_on_disk_and_stalls_no_other_rank(tmp_path: Path) -> None:
    bound = 1 << 20
    with Rig(tmp_path, LogConfig(max_file_bytes=bound)) as rig:
        flood = rig.rank(0, FLOOD.format(blocks=1500) + "print('the end')")  # 96 MB
        other = rig.rank(1, "for i in range(100): print(i); time.sleep(0.002)")
        other.wait(PATIENCE_S)
        rig.out.wait_for(b"[1] 99\n")
        flood.wait(PATIENCE_S)
        rig.finish()
        files = sorted(rig.path(0).parent.glob("0.out*"))
        assert [file.name for file in files] == ["0.out", "0.out.tail", "0.out.tail.1"]
        assert bound // 2 <= sum(file.stat().st_size for file in files) <= bound + 1000
        assert files[0].read_text().startswith("x" * 99 + "\n")
        assert files[1].read_text().endswith("\nthe end\n")
        assert rig.path(1).read_text() == "".join(f"{i}\n" for i in range(100))
        assert [line for line in rig.out.lines if line.startswith("[1] ")] == [f"[1] {i}" for i in range(100)]


def test_a_console_nobody_reads_blocks_no_rank_and_tells_what_it_left_out(tmp_path: Path) -> None:
    console = Console(read=False)
    config = LogConfig(console_buffer_bytes=1 << 20)
    with Rig(tmp_path, config, out=console) as rig:
        blocks = 400  # 25.6 MB
        rig.rank(3, FLOOD.format(blocks=blocks)).wait(PATIENCE_S)
        rig.rank(1, "print('still here')").wait(PATIENCE_S)
        rig.drain()
        assert rig.path(3).stat().st_size == blocks * 64_000, "the file has it all"
        assert rig.path(1).read_text() == "still here\n"
        console.start_reading()
        dropped = rig.message("dropped")
        rig.finish()
        lines = console.lines
        assert "[1] still here" in lines
        shown = lines.count("[3] " + "x" * 99)
        count = f"{dropped['lines']:,}"
        path = rig.path(3)
        assert f"[closeranks: {count} lines of rank 3 not shown here; all of it is in {path}]" in lines
        assert len(lines) == shown + 2, "only whole lines"
        assert shown + dropped["lines"] == blocks * 640
        assert shown * 104 <= (1 << 20) + 4 * 65536
        assert (dropped["generation"], dropped["rank"], dropped["stream"]) == (0, 3, "stdout")


def test_a_reader_that_comes_late_gets_all_of_it_and_what_was_left_out(tmp_path: Path) -> None:
    console = Console(read=False)
    with Rig(tmp_path, LogConfig(console_buffer_bytes=1 << 20), out=console) as rig:
        rig.rank(0, FLOOD.format(blocks=100)).wait(PATIENCE_S)
        rig.rank(1, "print('the reason')").wait(PATIENCE_S)
        threading.Timer(4.0, console.start_reading).start()
        assert rig.pump.close(PATIENCE_S)
        console.wait_for(b"[1] the reason\n")
        shown = console.lines.count("[0] " + "x" * 99)
        (notice,) = [line for line in console.lines if "not shown here" in line]
        assert notice.startswith(f"[closeranks: {100 * 640 - shown:,} lines of rank 0 not shown here;")
        assert shown > 5000, "what fits into the buffer is shown"


def test_close_does_not_wait_for_ever_for_a_console_nobody_reads(tmp_path: Path) -> None:
    with Rig(tmp_path, LogConfig(console_patience_s=0.5), out=Console(read=False)) as rig:
        rig.rank(0, FLOOD.format(blocks=20)).wait(PATIENCE_S)
        started_s = time.monotonic()
        assert rig.pump.close(PATIENCE_S)
        assert time.monotonic() - started_s < PATIENCE_S / 2
        assert rig.path(0).stat().st_size == 20 * 64_000


def test_a_stopped_terminal_blocks_nothing(tmp_path: Path) -> None:
    """Ctrl-S."""
    console = Console("pty")
    with Rig(tmp_path, out=console) as rig:
        rig.rank(0, "print('before')").wait()
        rig.out.wait_for(b"before\n")
        termios.tcflow(console.write_fd, termios.TCOOFF)
        rig.rank(0, "for i in range(20000): print(i)").wait(PATIENCE_S)
        rig.drain()
        assert rig.path(0).read_text().endswith("\n19999\n")
        termios.tcflow(console.write_fd, termios.TCOON)
        rig.out.wait_for(b" 19999\n")
        rig.finish()


def test_a_reader_that_left_ends_the_tee_but_not_the_files(tmp_path: Path) -> None:
    console = Console(read=False)
    with Rig(tmp_path, out=console) as rig:
        console.stop_reading()
        rig.rank(0, "for i in range(20000): print(i)").wait(PATIENCE_S)
        message = rig.message("console")
        assert message["gone"]
        assert message["error"] == "Broken pipe"
        rig.finish()
        assert rig.path(0).read_text().endswith("\n19999\n")
        assert sum(m["type"] == "console" for m in rig.messages) <= 2


def test_a_console_that_is_a_file_loses_no_line(tmp_path: Path) -> None:
    target = tmp_path / "console.log"
    console = Console(read=False)
    pipe_fd, console.write_fd = console.write_fd, os.open(target, os.O_WRONLY | os.O_CREAT)
    os.close(pipe_fd)
    with Rig(tmp_path, LogConfig(console_buffer_bytes=1 << 20), out=console) as rig:
        for rank in (0, 1):
            rig.rank(rank, FLOOD.format(blocks=300))
        rig.finish()
        assert target.stat().st_size == 2 * 300 * 640 * 104
        assert [m for m in rig.messages if m["type"] != "drained"] == []


# --- disks ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    small = tmp_path / "logs"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "closeranks-test", str(small)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with Rig(tmp_path) as rig:
            for rank in (0, 1):
                rig.rank(rank, "for i in range(20000): print('line', i)")
            for process in rig.processes:
                assert process.wait(PATIENCE_S) == 0
            rig.drain()
            assert rig.message("disk")["error"] == os.strerror(28)
            for rank in (0, 1):
                rig.out.wait_for(b"[%d] line 19999\n" % rank)
            rig.finish()
            assert sum(m["type"] == "disk" for m in rig.messages) == 1
            assert rig.path(0).read_text().startswith("line 0\nline 1\n")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_log_directory_that_cannot_be_made_is_told_and_the_console_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with Rig(tmp_path) as rig:
        rig.rank(0, "print('hello')").wait()
        rig.out.wait_for(b"[0] hello\n")
        message = rig.message("disk")
        assert message["error"] == os.strerror(20)
        assert message["path"] == str(rig.path(0))
        rig.finish()


def test_a_file_size_limit_is_an_error_like_any_other(tmp_path: Path) -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "sys.path.insert(0, sys.argv[1]); import pathlib; from log_rig import Rig\n"
        "with Rig(pathlib.Path(sys.argv[2])) as rig:\n"
        " rig.rank(0, 'for i in range(30000): print(i)').wait()\n"
        " rig.drain()\n"
        " assert rig.message('disk')['error'] == 'File too large'\n"
        " rig.out.wait_for(b'[0] 29999\\n')\n"
        " rig.finish()\n"
        " assert rig.path(0).stat().st_size <= 100_000\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, here, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- life and death -------------------------------------------------------------------------------------


def test_the_pump_is_killed_and_a_new_one_goes_on_while_the_rank_writes(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        writer = rig.rank(0, "for i in range(3000): print(i); time.sleep(0.0005)")
        rig.out.wait_for(b"[0] 100\n")
        assert rig.pump.pid is not None
        os.kill(rig.pump.pid, signal.SIGKILL)
        rig.message("died")
        assert not rig.pump.alive
        rig.pump.say(b"said while there was none")
        time.sleep(0.3)
        assert writer.poll() is None, "no SIGPIPE"
        rig.pump.restart()
        rig.out.wait_for(b"said while there was none\n")
        assert writer.wait(PATIENCE_S) == 0
        rig.finish()
        numbers = [int(line) for line in rig.path(0).read_text().splitlines()]
        assert numbers[-1] == 2999
        assert numbers == sorted(numbers)
        # Only what the dead one had in its hands can be missing.
        assert len(numbers) >= 2900


def test_a_pump_that_hangs_can_be_replaced_too(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.rank(0, "print('first')").wait()
        rig.out.wait_for(b"first\n")
        assert rig.pump.pid is not None
        os.kill(rig.pump.pid, signal.SIGSTOP)
        rig.rank(1, "print('second')").wait()
        assert not rig.pump.drain(0, 0.2)
        rig.pump.restart()
        rig.drain()
        assert rig.path(1).read_text() == "second\n"
        rig.finish()


def test_drain_does_not_wait_for_a_grandchild_that_holds_the_pipe(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        script = (
            "import subprocess\nprint('from the rank', flush=True)\n"
            "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
            "print(p.pid)\n"
        )
        rig.rank(0, script).wait()
        rig.drain()
        first, pid = rig.path(0).read_text().split("\n")[:2]
        assert first == "from the rank"
        try:
            started_s = time.monotonic()
            assert rig.pump.close(PATIENCE_S)
            assert time.monotonic() - started_s < PATIENCE_S / 2, "nor does close"
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_drain_is_bounded_by_what_was_there_when_a_stray_process_never_stops_writing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        process = rig.rank(0, "while True: print('again and again')")
        rig.out.wait_for(b"again")
        for _ in range(3):
            rig.drain()
        process.kill()
        process.wait()
        rig.finish()


def test_everything_in_the_pipes_is_in_the_file_when_drained(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        for generation in range(5):
            rig.rank(0, "print('x' * 700000)", generation).wait(PATIENCE_S)
            rig.drain(generation)
            assert rig.path(0, "out", generation).stat().st_size == 700_001
            rig.pump.forget(generation)
        assert rig.pump.close(PATIENCE_S)


def test_the_terminal_and_the_scheduler_cannot_stop_it_before_the_last_line(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.rank(0, "print('up')").wait()
        rig.out.wait_for(b"up\n")
        assert rig.pump.pid is not None
        assert os.getsid(rig.pump.pid) == rig.pump.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            os.kill(rig.pump.pid, number)
        rig.rank(0, "print('last')").wait()
        rig.out.wait_for(b"last\n")
        rig.finish()


AGENT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import pathlib
from log_rig import Console, Rig
console = Console(read=False)
os.dup2(1, console.write_fd)
rig = Rig(pathlib.Path(sys.argv[2]), out=console)
out, err = rig.attach(0)
os.set_inheritable(out, True)
import subprocess
subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3]], stdout=out, stderr=err)
print(rig.pump.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def run_agent(tmp_path: Path, worker: str) -> int:
    """An agent that is SIGKILLed while a worker of it lives on; returns the pump's pid."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AGENT, here, str(tmp_path), worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        assert agent.wait(PATIENCE_S) == -9
        agent.stdout.read()  # until the pump, the last to hold it, has ended
    return pid


def test_it_outlives_the_agent_until_the_ranks_are_done(tmp_path: Path) -> None:
    pid = run_agent(tmp_path, "import time; time.sleep(0.3); print('after the agent')")
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the pump to end")
    assert (tmp_path / "logs" / "0" / "0.out").read_text() == "after the agent\n"


def test_it_outlives_the_agent_by_two_seconds_at_most(tmp_path: Path) -> None:
    started_s = time.monotonic()
    worker = "import os, time\nopen(os.devnull)\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)"
    pid = run_agent(tmp_path, worker)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the pump to end")
    assert time.monotonic() - started_s < PATIENCE_S / 2
    os.kill(int((tmp_path / "logs" / "0" / "0.out").read_text()), signal.SIGKILL)


def test_many_ranks_and_generations_leave_no_descriptor_behind(tmp_path: Path) -> None:
    with Rig(tmp_path, world_size=64) as rig:
        before = len(list(Path("/proc/self/fd").iterdir()))
        rig.drain(99)
        in_pump = len(list(Path(f"/proc/{rig.pump.pid}/fd").iterdir()))
        for generation in range(10):
            for rank in range(64):
                out, err = rig.attach(rank, generation)
                os.write(out, b"hello from %d\n" % rank)
                os.close(out)
                os.close(err)
            rig.drain(generation)
            rig.pump.forget(generation)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        wait_for(lambda: len(list(Path(f"/proc/{rig.pump.pid}/fd").iterdir())) == in_pump, "fds to close")
        assert len(list((tmp_path / "logs").glob("*/*.out"))) == 640
        assert rig.pump.close(PATIENCE_S)
