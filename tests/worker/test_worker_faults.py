"""Injected faults inside a real process: each does what it says, once, at its step, and says so first."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from rank_harness import Ranks

from closeranks.errors import UsageError
from closeranks.faults import KINDS, TAMPER_KINDS, parse_spec
from closeranks.progress import Phase
from closeranks.worker.faults import FaultInjector


class Said(list):
    """A control line that keeps what is sent."""

    def send(self, message):
        self.append(message)
        return True

    def receive(self):
        return None


def steps(writer, control, specs, count=8, pace_s=0.0):
    """A training of ``count`` optimizer steps with the faults ``specs``; returns their times."""
    injector = FaultInjector([(n, parse_spec(spec)) for n, spec in enumerate(specs)], writer, control)
    times = []
    for _ in range(count):
        start = time.monotonic()
        time.sleep(pace_s)
        writer.step_done(0)
        injector.optimizer_step(writer.step)
        times.append(time.monotonic() - start)
    return times


def one(tmp_path, spec, **options):
    return Ranks(lambda w, c: steps(w, c, [spec], **options), 1, tmp_path, with_torch=False)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("kill:step=3", -signal.SIGKILL),
        ("segv:step=3", -signal.SIGSEGV),
        ("exit:step=3,code=7", 7),
        ("exit:step=3", 1),
        ("os-exit:step=3,code=9", 9),
    ],
)
def test_a_rank_ends_as_asked_at_its_step(tmp_path, spec, code):
    with one(tmp_path, spec) as ranks:
        assert ranks.wait() == [code]
        assert ranks.page(0).step == 3
        assert ranks.page(0).faults_fired == 1  # marked before: the process could not do it any more
        kind = spec.partition(":")[0]
        assert ranks.heard(0, "fault_fired") == [{"type": "fault_fired", "id": 0, "kind": kind, "step": 3}]


def test_an_exception_carries_its_message(tmp_path):
    with one(tmp_path, 'exception:step=2,message="no, thanks"') as ranks:
        assert ranks.wait() == [1]
        assert "RuntimeError: no, thanks" in ranks.describe()
        assert ranks.page(0).step == 2


def test_stop_freezes_the_process(tmp_path):
    with one(tmp_path, "stop:step=2") as ranks:
        ranks.until(lambda: state_of(ranks.pids[0]) == "T")
        assert ranks.page(0).step == 2
        os.kill(ranks.pids[0], signal.SIGCONT)
        assert ranks.wait() == [0]  # and once it is continued it goes on as if nothing had been
        assert ranks.page(0).step == 8


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def hanging(writer, control, spec):
    """Steps beside a thread that shows whether Python can run at all."""
    import threading

    def beat():
        while True:
            writer.absolute_step(writer._ticks)
            time.sleep(0.005)

    threading.Thread(target=beat, daemon=True).start()
    steps(writer, control, [spec], pace_s=0.02)


@pytest.mark.parametrize(
    ("kind", "python_runs", "burns"),
    [("hang-python", True, False), ("hang-c", False, False), ("spin", True, True)],
)
def test_a_hang_is_of_the_kind_that_was_asked_for(tmp_path, kind, python_runs, burns):
    with Ranks(lambda w, c: hanging(w, c, f"{kind}:step=2"), 1, tmp_path, with_torch=False) as ranks:
        ranks.until(lambda: ranks.heard(0, "fault_fired"))
        os.kill(ranks.pids[0], signal.SIGCONT)  # a signal doesn't end it
        time.sleep(0.2)
        before, used_s = ranks.page(0).ticks, cpu_s(ranks.pids[0])
        ranks.until(lambda: ranks.page(0).ticks > before + 5 or not python_runs, 20)
        time.sleep(0.6)
        assert (ranks.page(0).ticks > before) == python_runs
        assert ranks.page(0).step == 2 and ranks.status == [None]
        if burns:
            ranks.until(lambda: cpu_s(ranks.pids[0]) > used_s + 0.2, 60)
        else:
            assert cpu_s(ranks.pids[0]) < used_s + 0.3


def test_oom_stops_at_its_limit(tmp_path):
    def body(writer, control):
        with pytest.raises(MemoryError, match="held 48 MB and was not killed"):
            steps(writer, control, ["oom:step=1,limit_mb=48"])
        score = int(Path("/proc/self/oom_score_adj").read_text())
        return [score, peak_mb()]

    with Ranks(body, 1, tmp_path, with_torch=False) as ranks:
        (score, peak) = ranks.results()[0]
    assert score == 1000, "the killer might have taken somebody else"
    assert peak >= 48


def peak_mb():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_leak_grows_at_every_step_for_as_long_as_asked(tmp_path):
    def body(writer, control):
        ctypes.CDLL(None).malloc_trim(0)  # or the first leak may go where memory lies free already
        before = resident_mb()
        injector = FaultInjector([(0, parse_spec("leak:step=2,mb=32,for=3"))], writer, control)
        sizes = []
        for step in range(1, 8):
            injector.optimizer_step(step)
            sizes.append(round((resident_mb() - before) / 32))
        return [sizes, injector.idle]

    with Ranks(body, 1, tmp_path, with_torch=False) as ranks:
        assert ranks.results() == [[[0, 0, 1, 2, 3, 3, 3], True]]


def test_slow_adds_time_and_breaks_nothing(tmp_path):
    with one(tmp_path, "slow:step=2,ms=80,for=2", pace_s=0.001) as ranks:
        times = ranks.results()[0]
        assert ranks.page(0).step == 8
    assert [n for n, took in enumerate(times, 1) if took >= 0.08][:2] == [3, 4]
    assert min(times[4:]) < 0.08


def test_slow_by_a_factor_is_a_factor_of_the_step_itself(tmp_path):
    with one(tmp_path, "slow:step=1,factor=4", pace_s=0.03) as ranks:
        times = ranks.results()[0]
    assert all(took >= 0.11 for took in times[1:])
    assert min(times[1:]) < 0.03 * 4 * 3  # of the step, not of the step as it was slowed down before


def test_at_a_time_it_happens_at_the_next_sign_of_life(tmp_path):
    def body(writer, control):
        injector = FaultInjector([(5, parse_spec("os-exit:after=300ms,code=3"))], writer, control)
        start = time.monotonic()
        while time.monotonic() < start + 30:
            injector.poll()
            writer.absolute_step(int((time.monotonic() - start) * 1000))
            time.sleep(0.01)

    with Ranks(body, 1, tmp_path, with_torch=False) as ranks:
        assert ranks.wait() == [3]
        assert 250 <= ranks.page(0).absolute_step < 20_000
        assert ranks.page(0).faults_fired == 1 << 5


def test_with_neither_step_nor_time_it_happens_at_once(tmp_path):
    def body(writer, control):
        FaultInjector([(0, parse_spec("os-exit:code=4"))], writer, control).poll()

    with Ranks(body, 1, tmp_path, with_torch=False) as ranks:
        assert ranks.wait() == [4]


class Pretend:
    """Enough of a PageWriter for what follows."""

    step = 0

    def __init__(self):
        self.fired = []

    def fault_fired(self, number):
        self.fired.append(number)


def test_each_fires_once_and_in_no_wrong_order():
    writer, said = Pretend(), Said()
    specs = [
        parse_spec("agent-kill:step=3"),
        parse_spec("agent-kill:step=1"),
        parse_spec("agent-kill:step=3"),
    ]
    injector = FaultInjector(list(enumerate(specs)), writer, said)
    for step in range(1, 7):
        injector.optimizer_step(step)
    assert writer.fired == [1, 0, 2]
    assert [message["step"] for message in said] == [1, 3, 3]
    assert injector.idle


def test_a_step_that_has_passed_counts_as_reached():
    writer = Pretend()
    injector = FaultInjector([], writer, Said())
    injector.optimizer_step(10)
    injector.arm(2, parse_spec("agent-kill:step=5"))
    assert writer.fired == []
    injector.optimizer_step(11)
    assert writer.fired == [2]


def test_the_best_measure_of_a_step_wins():
    writer = Pretend()
    injector = FaultInjector([(0, parse_spec("agent-kill:step=3"))], writer, Said())
    for _ in range(10):
        injector.collective_done("broadcast")  # set-up
        injector.collective_done("barrier")
    injector.collective_done("all_reduce")
    injector.script_step(1)
    for _ in range(10):
        injector.collective_done("all_reduce")  # there are better ones now
    injector.optimizer_step(1)
    injector.script_step(50)
    injector.optimizer_step(2)
    assert writer.fired == []
    injector.optimizer_step(3)
    assert writer.fired == [0]


@pytest.mark.parametrize("source", ["script_step", "collective_done"])
def test_without_an_optimizer_the_next_best_is_taken(source):
    writer = Pretend()
    injector = FaultInjector([(0, parse_spec("agent-kill:step=3"))], writer, Said())
    for n in range(1, 4):
        assert writer.fired == []
        getattr(injector, source)(n if source == "script_step" else "all_reduce")
    assert writer.fired == [0]


def test_a_fault_without_a_bit_is_refused():
    injector = FaultInjector([], Pretend(), Said())
    for number in (-1, 64):
        with pytest.raises(ValueError, match="not 0 to 63"):
            injector.arm(number, parse_spec("kill"))


def test_every_kind_can_be_carried_out():
    from closeranks.worker import faults

    assert set(faults._ACTIONS) | TAMPER_KINDS | {"slow", "leak", "agent-kill"} == set(KINDS)


@pytest.mark.parametrize("limit", ["max", "104857600", "garbage"])
def test_the_memory_limit_is_the_cgroup_s_or_all_there_is(monkeypatch, tmp_path, limit):
    from closeranks.worker import faults

    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": limit}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(faults.Path, "read_text", read_text)
    assert faults._memory_limit_bytes() == (104857600 * 11 // 10 if limit.isdigit() else everything)


# --- in a script, through the hooks ---------------------------------------------------------------------


torch = pytest.importorskip("torch")


def train(count=8):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return count


@pytest.mark.torch
def test_the_hooks_count_the_optimizer_s_steps(tmp_path):
    with Ranks(lambda rank: train(), 1, tmp_path, faults={0: ["os-exit:step=5,code=6"]}) as ranks:
        assert ranks.wait() == [6]
        assert ranks.page(0).step == 5 and ranks.page(0).phase is Phase.TRAIN


@pytest.mark.torch
def test_an_injected_exception_leaves_from_the_script_s_own_line(tmp_path):
    def body(rank):
        try:
            train()
        except RuntimeError as error:
            import traceback

            return [str(error), traceback.extract_tb(error.__traceback__)[1].line]

    with Ranks(body, 1, tmp_path, faults={0: ["exception:step=2,message=boom"]}) as ranks:
        assert ranks.results() == [["boom", "optimizer.step()"]]


@pytest.mark.torch
@pytest.mark.parametrize("where", ["script steps", "collectives", "data", "init"])
def test_scripts_of_every_shape_can_be_hit(tmp_path, where):
    def body(rank):
        from rank_harness import init

        import closeranks

        if where == "script steps":
            for _ in range(9):
                closeranks.step()
        elif where == "data":
            list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1))))
        else:
            init(rank)
            torch.distributed.barrier()
            for _ in range(9):
                torch.distributed.all_reduce(torch.ones(2))

    spec = "os-exit:code=8" if where in ("data", "init") else "os-exit:code=8,step=4"
    with Ranks(body, 1, tmp_path, faults={0: [spec]}) as ranks:
        assert ranks.wait() == [8]
        done = sum(record.done for record in ranks.page(0).collectives)
        assert done == (5 if where == "collectives" else 0)


@pytest.mark.torch
def test_a_fault_that_cannot_be_read_is_refused_at_once(tmp_path):
    from closeranks.worker import hooks

    for bad in ({"id": 1}, {"id": "1", "spec": "kill"}, {"id": 1, "spec": "kil"}):
        with pytest.raises(UsageError):
            hooks.install(None, Said(), [bad])


@pytest.mark.torch
def test_skipping_an_iteration_s_gradients_in_ddp(tmp_path):
    """DDP's all-reduce comes from C++: a skip there is an iteration that isn't synchronised."""

    def body(rank):
        from rank_harness import init

        init(rank)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gradients = []
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
            gradients.append(model.module.weight.grad[0, 0].item())
            optimizer.step()
        return [gradients, model.require_backward_grad_sync]

    # Both ranks skip the same one: nobody waits for anybody, and each keeps its own gradient.
    faults = {rank: ["skip:step=3"] for rank in range(2)}
    with Ranks(body, 2, tmp_path, faults=faults) as ranks:
        results = ranks.results()
        assert [len(ranks.heard(rank, "fault_fired")) for rank in range(2)] == [1, 1]
    for rank in range(2):
        assert results[rank] == [[0.5, 0.5, 0.5, float(rank), 0.5, 0.5], True]


@pytest.mark.torch
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_skipped_collective_leaves_its_tensor_alone(tmp_path, asynchronous):
    def body(rank):
        from rank_harness import init

        init(rank)
        dist = torch.distributed
        tensors = [torch.ones(1) for _ in range(4)]
        for tensor in tensors:
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if asynchronous:
                work.wait()
        return [tensor.item() for tensor in tensors]

    faults = {rank: ["skip:step=2"] for rank in range(2)}
    with Ranks(body, 2, tmp_path, faults=faults) as ranks:
        assert ranks.results() == [[2.0, 2.0, 1.0, 2.0]] * 2


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "changes"), [("dtype", "int32"), ("size", "float32"), ("op", "float32")])
def test_a_changed_collective_is_recorded_as_it_was_issued(tmp_path, kind, changes):
    """On both ranks at once, so that it goes through; a barrier has nothing to change, and is passed over."""

    def body(rank):
        from rank_harness import init

        init(rank)
        dist = torch.distributed
        dist.all_reduce(torch.ones(4))
        if kind != "op":
            dist.barrier()
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(4))
        return tensor.tolist()

    faults = {rank: [f"{kind}:step=1"] for rank in range(2)}
    with Ranks(body, 2, tmp_path, faults=faults) as ranks:
        assert ranks.results() == [[1.0] * 4] * 2  # the script's own tensor was not touched
        records = ranks.page(0).collectives
    if kind != "op":
        records = records[:1] + records[2:]
    assert [(record.op, record.dtype, record.numel) for record in records] == [
        ("all_reduce", "float32", 4),
        ("broadcast" if kind == "op" else "all_reduce", changes, 8 if kind == "size" else 4),
        ("all_reduce", "float32", 4),
    ]
