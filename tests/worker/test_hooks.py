"""Hooks on real torch and gloo, under code as scripts have it: what is recorded, flagged, left alone."""

import contextlib
import copy
import importlib
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from rank_harness import Ranks, init  # noqa: E402

import closeranks  # noqa: E402
from closeranks.progress import OPS, Phase, key_of  # noqa: E402
from closeranks.worker import hooks, hooks_check, hooks_collectives, hooks_evidence  # noqa: E402
from closeranks.worker.hooks_state import STATE, THREAD_NAME  # noqa: E402

HERE = __file__
importlib.import_module("torch._dynamo")  # an optimizer imports it: seconds, in each forked rank


def line_of(function, text):
    """The number of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps, before_step=lambda model: None):
    model, optimizer = model_and_optimizer()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        before_step(model)
        optimizer.step()
    return model


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


# --- what is recorded -------------------------------------------------------------------------------


def every_op(rank, size, record):
    """Each collective once; ``record`` keeps the order."""
    t, others = torch.ones(4), [torch.zeros(4) for _ in range(size)]
    peer = {0: 1, 1: 0}.get(rank)

    def do(name, function, *args, **kwargs):
        record.append(name)
        function(*args, **kwargs)

    do("all_reduce", dist.all_reduce, t)
    do("broadcast", dist.broadcast, t, 0)
    do("reduce", dist.reduce, t, dst=0)
    do("all_gather", dist.all_gather, others, t)
    do("gather", dist.gather, t, others if rank == 0 else None)
    do("scatter", dist.scatter, t, others if rank == 0 else None)
    do("reduce_scatter", dist.reduce_scatter, t, others)
    do("all_to_all", dist.all_to_all, others, [torch.ones(4) for _ in range(size)])
    do("barrier", dist.barrier)
    if peer is not None:
        do("send" if rank == 0 else "recv", dist.send if rank == 0 else dist.recv, t, peer)
        work = None
        record.append("isend" if rank == 0 else "irecv")
        work = dist.isend(t, peer) if rank == 0 else dist.irecv(t, peer)
        work.wait()
        record.append("batch_isend_irecv")
        kind = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(kind, t, peer)]):
            work.wait()
    warnings.simplefilter("ignore", FutureWarning)
    do("all_gather_into_tensor", dist.all_gather_into_tensor, torch.zeros(4 * size), t)
    do("reduce_scatter_tensor", dist.reduce_scatter_tensor, t, torch.ones(4 * size))
    do("all_to_all_single", dist.all_to_all_single, torch.zeros(size), torch.ones(size))
    do("all_reduce_coalesced", dist.all_reduce_coalesced, [t, torch.ones(3)])
    do("all_gather_coalesced", dist.all_gather_coalesced, [[torch.zeros(4)] for _ in range(size)], [t])
    do("broadcast_object_list", dist.broadcast_object_list, [1, "x"], src=0)
    do("all_gather_object", dist.all_gather_object, [None] * size, {"rank": rank})
    do("gather_object", dist.gather_object, rank, [None] * size if rank == 0 else None)
    do("scatter_object_list", dist.scatter_object_list, [None], list(range(size)) if rank == 0 else None)
    do("monitored_barrier", dist.monitored_barrier)
    do("all_reduce", dist.all_reduce, t)


def test_every_collective_is_recorded_once_with_equal_numbers_on_all_ranks(tmp_path):
    def body(rank):
        init(rank)
        order = []
        every_op(rank, 3, order)
        return order

    with Ranks(body, 3, tmp_path) as ranks:
        orders = ranks.results()
        assert not ranks.all_heard("desync") and not ranks.all_heard("hooks_off")
        pages = [ranks.page(rank) for rank in range(3)]
    assert set(orders[0]) | set(orders[1]) == set(OPS) - {"unknown"}
    numbers = []
    for page, order in zip(pages, orders, strict=True):
        assert [record.op for record in page.collectives] == order
        assert all(record.done and record.group == 0 and record.file == HERE for record in page.collectives)
        assert not page.in_collective
        p2p = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
        numbers.append([(record.seq, record.op) for record in page.collectives if record.op not in p2p])
    assert numbers[0] == numbers[1] == numbers[2]
    seqs = [seq for seq, _ in numbers[0]]
    assert seqs == sorted(set(seqs)) and seqs[0] == 1
    shapes = {record.op: (record.dtype, record.numel) for record in pages[0].collectives}
    assert shapes["broadcast"] == shapes["reduce_scatter_tensor"] == ("float32", 4)
    assert shapes["all_reduce_coalesced"] == ("float32", 7)
    assert shapes["barrier"] == shapes["all_gather_object"] == ("none", 0)


def ddp_body(rank):
    init(rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = dist.group.WORLD
    loss = torch.ones(1)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        dist.all_reduce(loss)  # the line of the loss
        seen.append(group._get_sequence_number_for_group())
    return seen


def test_collectives_from_c_plus_plus_count(tmp_path):
    with Ranks(ddp_body, 2, tmp_path) as ranks:
        seen = ranks.results()
        page = ranks.page(1)
    records = page.collectives[-5:]
    assert [record.seq for record in records] == seen[1]  # torch's own count, C++ included
    assert records[1].seq - records[0].seq >= 2  # DDP's all-reduce lies between
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert {record.line for record in records} == {line_of(ddp_body, "the line of the loss")}
    assert page.step == 5
    assert [step.world_seq for step in page.steps] == [seq - 1 for seq in seen[1]]
    assert page.init_done and page.phase is Phase.TRAIN


def test_a_second_optimizer_is_no_second_step(tmp_path):
    def body(rank):
        model, main = model_and_optimizer()
        second = torch.optim.Adam(copy.deepcopy(model).parameters())
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            main.step()
            second.step()
        ticks = STATE.writer._ticks
        second.step()
        assert STATE.writer._ticks > ticks
        del main
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # the main one is gone: this is it now
        return STATE.writer.phase

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [Phase.TRAIN]
        assert ranks.page(0).step == 4


def test_subgroups_have_names_and_numbers_of_their_own(tmp_path):
    def body(rank):
        init(rank)
        pair = dist.new_group([0, 2])
        dist.all_reduce(torch.ones(1))
        if rank != 1:
            for _ in range(3):
                dist.all_reduce(torch.ones(2), group=pair)
            dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM, pair)  # by position
        else:
            dist.all_reduce(torch.ones(2), group=pair)  # torch warns: not a member
        dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
        return pair.group_name if rank != 1 else ""

    with Ranks(body, 3, tmp_path) as ranks:
        names = ranks.results()
        pages = [ranks.page(rank) for rank in range(3)]
    key = key_of(f"{names[0]}|0,2")
    assert pages[0].groups == pages[2].groups == {key: (names[0], (0, 2))}
    assert pages[1].groups == {}
    for page, subgroup in zip(pages, (4, 0, 4), strict=True):
        assert [record.seq for record in page.collectives if record.group == key] == [1, 2, 3, 4][:subgroup]
        assert [record.seq for record in page.collectives if record.group == 0] == [1, 2]


# --- how scripts get hold of it -----------------------------------------------------------------------


def test_every_way_to_import_a_collective_is_seen(tmp_path):
    def body(rank):
        init(rank)
        from torch.distributed import all_reduce as renamed
        from torch.distributed.distributed_c10d import all_reduce

        for function in (
            dist.all_reduce,
            renamed,
            all_reduce,
            dist.distributed_c10d.all_reduce,
            early.all_reduce,
        ):
            function(torch.ones(1))
        return [function.__name__ for function in (renamed, early.all_reduce)]

    early = types.ModuleType("imported_before_the_hooks")
    exec("from torch.distributed import all_reduce", early.__dict__)
    sys.modules[early.__name__] = early
    try:
        with Ranks(body, 1, tmp_path) as ranks:
            assert ranks.results() == [["all_reduce", "all_reduce"]]
            assert [record.op for record in ranks.page(0).collectives] == ["all_reduce"] * 5
    finally:
        del sys.modules[early.__name__]


def test_functions_stay_what_they_were(tmp_path):
    signatures = {
        name: inspect.signature(getattr(dist.distributed_c10d, name)) for name in ("all_reduce", "isend")
    }

    def body(rank):
        for name, signature in signatures.items():
            function = getattr(dist, name)
            assert inspect.signature(function) == signature
            assert function.__name__ == name and function.__doc__
            assert not hasattr(inspect.unwrap(function), "__wrapped__")
        for function in (dist.all_reduce, dist.broadcast_object_list, torch.save, torch.load, dist.new_group):
            assert pickle.loads(pickle.dumps(function)) is function
        _, optimizer = model_and_optimizer()
        optimizer.step()
        copy.deepcopy(optimizer)
        torch.jit.script(torch.nn.Linear(2, 2))
        return True

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [True]


def test_install_twice_wraps_once(tmp_path):
    def body(rank):
        init(rank)
        before = dist.all_reduce
        hooks.prepare()
        hooks.install(STATE.writer, STATE.control)
        assert dist.all_reduce is before
        dist.all_reduce(torch.ones(1))
        from torch.optim.optimizer import _global_optimizer_post_hooks

        return len(_global_optimizer_post_hooks)

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [1]
        assert len(ranks.page(0).collectives) == 1


def test_compiled_code_traces_through(tmp_path):
    def body(rank):
        init(rank)
        seen = []

        def backend(graph, inputs):
            seen.append({str(node.target) for node in graph.graph.nodes})
            return graph.forward

        @torch.compile(backend=backend, fullgraph=True)
        def reduced(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        assert reduced(torch.ones(3)).tolist() == [5.0] * 3
        assert any("all_reduce" in target for target in seen[0])
        model, optimizer = model_and_optimizer()

        @torch.compile(backend="eager")
        def step():
            optimizer.step()

        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            step()

        @torch.compile(backend="eager")
        def everything(x):
            loss = model(x).sum()
            loss.backward()
            dist.all_reduce(loss.detach())
            return loss

        assert torch.isfinite(everything(torch.ones(2, 4)))
        return True

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [True, True]
        assert not ranks.all_heard("desync") and not ranks.all_heard("hooks_off")


HOOKS_BEFORE_DYNAMO = """
import mmap, sys
import torch, torch.distributed as dist
from closeranks.progress import PAGE_BYTES
from closeranks.worker import hooks
from closeranks.worker.page import PageWriter

class Silence:
    def send(self, message): return True
    def receive(self): return None

hooks.install(PageWriter(mmap.mmap(-1, PAGE_BYTES), 0, 1, 0, 0), Silence())
assert "torch._dynamo" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
graphs = []

def backend(graph, inputs):
    graphs.append(str(graph.graph))
    return graph.forward

@torch.compile(backend=backend, fullgraph=True)
def reduced(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

assert reduced(torch.ones(3)).tolist() == [3.0] * 3
assert "all_reduce" in graphs[0], graphs
"""


def test_dynamo_may_be_imported_after_the_hooks():
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", HOOKS_BEFORE_DYNAMO],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


# --- asynchronous ones --------------------------------------------------------------------------------


def test_whoever_waits_is_in_the_collective_it_waits_for(tmp_path):
    def body(rank):
        init(rank)
        dist.barrier()
        if rank == 1:
            while not gate.exists():
                time.sleep(0.01)
        work = dist.all_reduce(torch.ones(5), async_op=True)
        ready.with_suffix(f".{rank}").touch()
        if rank == 0:
            while not early.exists():
                time.sleep(0.01)
        work.wait()
        assert work.is_completed()
        return True

    gate, ready, early = tmp_path / "gate", tmp_path / "ready", tmp_path / "early"
    with Ranks(body, 2, tmp_path) as ranks:
        ranks.until(lambda: ready.with_suffix(".0").exists())
        page = ranks.page(0)
        assert page.last().op == "all_reduce" and page.last().done and not page.in_collective
        early.touch()
        ranks.until(lambda: ranks.page(0).in_collective)
        assert ranks.page(0).last().op == "all_reduce" and not ranks.page(0).last().done
        gate.touch()
        ranks.results()
        assert ranks.page(0).last().done and not ranks.page(0).in_collective


def test_a_python_subclass_of_work_inherits_wait(tmp_path):
    class Mine(dist.distributed_c10d.Work):
        pass

    class Done(dist.distributed_c10d.Work):
        def wait(self, timeout=None):
            return True

    def body(rank):
        with pytest.raises(RuntimeError, match="timed out"):  # and no endless recursion
            Mine().wait(timedelta(milliseconds=20))
        return Done().wait()

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [True]


def test_a_collective_that_raises_stays_open(tmp_path):
    def body(rank):
        init(rank)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(TypeError):
            dist.all_reduce()
        return True

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0]
        page = ranks.page(0)
    assert not page.in_collective
    assert [(record.op, record.done) for record in page.collectives] == [
        ("barrier", True), ("all_reduce", False), ("all_reduce", False),
    ]  # fmt: skip


def test_coalesced_collectives_are_torch_s_own_affair(tmp_path):
    def body(rank):
        init(rank)
        tensors = [torch.ones(2), torch.ones(3)]
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        dist.all_reduce(tensors[0])
        return [tensor.tolist() for tensor in tensors]

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results()[0] == [[4.0] * 2, [2.0] * 3]
        assert [record.seq for record in ranks.page(0).collectives] == [2]


# --- mismatches are seen before they do harm ----------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("fault", ["skip", "dtype", "size", "op"])
def test_a_mismatch_is_flagged_before_harm(tmp_path, fault, culprit):
    def body(rank):
        init(rank)
        train(40, average)

    at = 12
    with Ranks(body, 3, tmp_path, faults={culprit: [f"{fault}:step={at}"]}) as ranks:
        codes = ranks.wait()
        flags = ranks.all_heard("desync")
        pages = [ranks.page(rank) for rank in range(3)]
    assert codes == [-9, -9, -9], "someone was hurt before the agent could act"
    assert flags and [message["id"] for message in ranks.heard(culprit, "fault_fired")] == [0]
    assert pages[culprit].faults_fired == 1
    for rank, message in flags:
        assert culprit in (rank, message["neighbour"])
        assert message["seq"] == 2 * at + 1
        assert pages[rank].desync_rank == message["neighbour"] and pages[rank].desync_seq == message["seq"]
    assert pages[culprit].step == at and all(page.step <= at for page in pages)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_skipped_lone_collective_shows_in_the_step(tmp_path, monkeypatch, culprit):
    """One all_reduce a step, always of the same shape and line: only the step tells."""
    monkeypatch.setattr(hooks_check.NeighbourCheck, "step_done", lambda *_: None)  # which would tell sooner

    def body(rank):
        init(rank)

        def once(model):
            dist.all_reduce(model.weight.grad)

        train(80, once)

    at = 40  # not every visit can be compared: by then enough have been
    with Ranks(body, 2, tmp_path, faults={culprit: [f"skip:step={at}"]}) as ranks:
        assert ranks.wait() == [-9, -9]
        assert ranks.all_heard("desync")
        steps = [ranks.page(rank).step for rank in range(2)]
    assert steps[1 - culprit] == at, "the other rank has taken a step with a wrong gradient"
    assert steps[culprit] == at + 1


def test_a_skipped_one_of_two_equal_collectives_shows_in_the_line(tmp_path):
    def body(rank):
        init(rank)

        def twice(model):
            dist.all_reduce(model.weight.grad)
            dist.all_reduce(model.weight.grad.clone())

        train(60, twice)

    # Not every visit can be compared: by then each line has met itself often enough all the same.
    with Ranks(body, 2, tmp_path, faults={1: ["skip:step=40"]}) as ranks:
        assert ranks.wait() == [-9, -9]
        assert {message["seq"] for _, message in ranks.all_heard("desync")} == {81}
        assert [ranks.page(rank).step for rank in range(2)] == [40, 40]


def test_lockstep_at_a_distance_is_lockstep_too(tmp_path):
    """Averaging every third step on all ranks: a skipped one shows once that rhythm is known."""

    def body(rank):
        init(rank)
        count = 0

        def sometimes(model):
            nonlocal count
            count += 1
            if count % 3 == 0:
                dist.all_reduce(model.weight.grad)

        train(200, sometimes)

    with Ranks(body, 2, tmp_path, faults={1: ["skip:step=150"]}) as ranks:
        assert ranks.wait() == [-9, -9]
        assert ranks.page(0).step == 152  # before its 51st averaging, in step 153


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_step_that_ddp_has_not_synchronised_is_not_saved(tmp_path, culprit):
    """Its all-reduce comes from C++, where nothing is compared: what a step issues is counted instead."""

    def body(rank):
        init(rank)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 60):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            (tmp_path / f"saved-{rank}").write_text(str(step))

    at = 20
    with Ranks(body, 3, tmp_path, faults={culprit: [f"skip:step={at}"]}) as ranks:
        ranks.until(lambda: ranks.heard(culprit, "short_step"))
        time.sleep(0.5)
        ranks.turn()
        assert ranks.status == [None] * 3
        assert ranks.page(culprit).short_step == (0, 1)
        for rank in range(3):
            assert ranks.page(rank).step == (at + 1 if rank == culprit else at)
            assert (tmp_path / f"saved-{rank}").read_text() == str(at)
            assert len(ranks.heard(rank, "short_step")) == (rank == culprit)
        (said,) = ranks.heard(culprit, "short_step")
        assert (said["step"], said["issued"], said["usual"]) == (at + 1, 0, 1)
        # What it waits with is what the agent takes for a wait without end.
        main = Path(f"/proc/{ranks.pids[culprit]}/task/{ranks.pids[culprit]}/wchan").read_text()
        assert "futex" in main


def test_a_step_without_its_lone_collective_is_not_saved(tmp_path):
    def body(rank):
        init(rank)
        model, optimizer = model_and_optimizer()
        for step in range(1, 60):
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            (tmp_path / f"saved-{rank}").write_text(str(step))

    with Ranks(body, 2, tmp_path, faults={0: ["skip:step=20"]}) as ranks:
        assert ranks.wait() == [-9, -9]
        said = ranks.heard(0, "short_step")
        assert said[-1]["proved_by"] == 1 and not ranks.all_heard("desync")
        assert ranks.page(0).step == 21 and ranks.page(0).short_step == (0, 1)
        assert int((tmp_path / "saved-0").read_text()) == 20


def test_a_hold_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks_check, "_HOLD_S", 0.3)
    monkeypatch.setattr(hooks_check, "_HOLD_STEPS", 0)

    def body(rank):
        init(rank)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30 + (rank == 1)):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return True

    with Ranks(body, 2, tmp_path, faults={1: ["skip:step=20"]}) as ranks:
        assert ranks.results() == [True, True]  # nobody acted: off by one, but not hanging
        assert ranks.page(1).short_step is None and len(ranks.heard(1, "short_step")) == 1


def test_without_an_agent_that_kills_the_script_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks_check, "_WAIT_FOR_KILL_S", 0.3)

    def body(rank):
        init(rank)
        for n in range(20):
            dist.all_reduce(torch.ones(2, dtype=torch.int32 if (rank, n) == (1, 10) else torch.float32))
        return time.monotonic()

    with Ranks(body, 2, tmp_path, kill_on_desync=False) as ranks:
        ranks.results()
        flags = ranks.all_heard("desync")
        assert flags and all(len(ranks.heard(rank, "desync")) <= 1 for rank in range(2))


# --- and nothing else is --------------------------------------------------------------------------------


def subgroup_only(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for n in range(30):
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pairs[0])
        if rank > 0:
            dist.broadcast(torch.ones(3 + n), 1, group=pairs[1])
    dist.barrier()


def optimizers_of_their_own(rank):
    _, optimizer = model_and_optimizer()
    for n in range(30):
        for _ in range(1 + rank * (n % 2)):
            optimizer.step()
        dist.all_reduce(torch.ones(2))


def one_rank_never_steps(rank):
    _, optimizer = model_and_optimizer()
    for _ in range(30):
        if rank != 1:
            optimizer.step()
        dist.all_reduce(torch.ones(2))


def one_rank_trains_for_all(rank):
    """As in reinforcement learning: the others never step, and not every step is sent to them."""
    weights, optimizer = model_and_optimizer()
    for n in range(40):
        if rank == 0:
            optimizer.step()
        if n < 20 or n % 5 == 0:
            dist.broadcast(weights.weight.data, 0)
            dist.all_reduce(torch.ones(1))


def uneven_all_to_all(rank):
    sizes = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for _ in range(20):
        dist.all_to_all_single(
            torch.zeros(sum(sizes[peer][rank] for peer in range(3))),
            torch.ones(sum(sizes[rank])),
            [sizes[peer][rank] for peer in range(3)],
            sizes[rank],
        )


def local_sgd_by_time(rank):
    import random

    mine = random.Random(rank)
    model, optimizer = model_and_optimizer()
    for _ in range(40):
        for _ in range(mine.choice([3, 3, 3, 4])):
            optimizer.step()
        dist.all_reduce(model.weight.data)


def a_rank_first_then_the_others(rank):
    """The usual pair of barriers, on different lines for different ranks."""
    for _ in range(20):
        if rank != 0:
            dist.barrier()
        torch.ones(3).sum()
        if rank == 0:
            dist.barrier()
        if rank == 0:
            dist.broadcast(torch.ones(4), 0)
        else:
            dist.broadcast(torch.zeros(4), 0)


def uneven_inputs_with_join(rank):
    from torch.distributed.algorithms.join import Join

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for _ in range(20 + 3 * rank):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def everything_with_p2p_between(rank):
    for _ in range(10):
        if rank == 0:
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            dist.recv(torch.ones(2), 0)
        dist.all_reduce(torch.ones(3))
        dist.monitored_barrier()
        if rank == 2:
            dist.isend(torch.ones(2), 0).wait()
        elif rank == 0:
            dist.irecv(torch.ones(2), 2).wait()
        dist.broadcast(torch.ones(3), 1)


def root_runs_ahead(rank):
    """A broadcast doesn't make its root wait: it may be far ahead."""
    for n in range(60):
        if rank == 1:
            time.sleep(0.002)
        dist.broadcast(torch.ones(1 + n % 5), 0)


def many_asynchronous(rank):
    for _ in range(10):
        works = [dist.all_reduce(torch.ones(1 + n), async_op=True) for n in range(10)]
        if rank == 2:
            time.sleep(0.01)
        for work in reversed(works):
            work.wait()


def a_byte_is_a_byte(rank):
    """Broadcasts into a buffer of another dtype of the same size."""
    for _ in range(20):
        dist.broadcast(torch.ones(8, dtype=torch.bool if rank == 0 else torch.uint8), 0)


def evaluation_on_one_rank(rank):
    model, optimizer = model_and_optimizer()
    for n in range(24):
        model(torch.ones(2, 4)).sum().backward()
        average(model)
        optimizer.step()
        if n % 6 == 5:
            if rank == 0:
                with closeranks.phase("eval"):
                    time.sleep(0.05)
            dist.barrier()


def uneven_objects(rank):
    for n in range(12):
        dist.all_gather_object([None] * 3, "x" * (rank * n))
        dist.broadcast_object_list([rank, "y" * n], src=n % 3)


def a_thread_that_averages_too(rank):
    """Its own thread, its own group, its own rhythm."""
    group = dist.new_group([0, 1, 2])

    def report():
        for _ in range(20):
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(0.001 * rank)

    thread = threading.Thread(target=report)
    thread.start()
    train(20, average)
    thread.join()


def synchronised_less_and_less(rank):
    """As in post-local SGD, and with accumulation: steps with fewer collectives than before, on all ranks."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(80):
        with contextlib.nullcontext() if n < 30 or n % 10 == 0 else model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if rank == 1 and n % 7 == 0:
            time.sleep(0.02)


HEALTHY = [
    subgroup_only, optimizers_of_their_own, one_rank_never_steps, one_rank_trains_for_all, uneven_all_to_all,
    local_sgd_by_time, a_rank_first_then_the_others, uneven_inputs_with_join, everything_with_p2p_between,
    root_runs_ahead, many_asynchronous, a_byte_is_a_byte, evaluation_on_one_rank, uneven_objects,
    a_thread_that_averages_too, synchronised_less_and_less,
]  # fmt: skip


@pytest.mark.parametrize("script", HEALTHY, ids=lambda script: script.__name__)
def test_a_healthy_script_is_left_alone(tmp_path, script):
    def body(rank):
        init(rank)
        script(rank)
        dist.barrier()
        return STATE.active

    with Ranks(body, 3, tmp_path) as ranks:
        assert ranks.results() == [True] * 3
        assert not ranks.all_heard("desync") and not ranks.all_heard("hooks_off")
        assert [ranks.page(rank).desync_rank for rank in range(3)] == [None] * 3


def test_groups_made_again_start_over(tmp_path):
    def body(rank):
        for turn in range(4):
            os.environ["STORE_TURN"] = str(turn)
            dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/again{turn}", rank=rank, world_size=2
            )
            for n in range(10 + turn):
                dist.all_reduce(torch.ones(1 + (turn + n) % 3))
            dist.destroy_process_group()
        return True

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [True, True]
        assert not ranks.all_heard("desync")
        assert ranks.page(0).world_seq == 12


def test_no_comparison_where_not_all_ranks_are_on_this_host(tmp_path):
    def body(rank):
        STATE.writer.local_world_size = 1  # as on a host with one rank of a larger world
        init(rank)
        for n in range(12):
            dist.broadcast(
                torch.ones(2, dtype=torch.float32 if rank or n < 11 else torch.int64), 0
            ) if n < 0 else None
            dist.all_reduce(torch.ones(2, dtype=torch.int32 if (rank, n) == (1, 11) else torch.float32))
        return STATE.recorder.groups.get(None).check is None

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [True, True]


# --- phases and signs of life ---------------------------------------------------------------------------


class Peek(torch.utils.data.Dataset):
    """Notes the phase in which it is asked for data."""

    def __init__(self):
        self.phases = []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.phases.append(int(STATE.writer.phase))
        return torch.ones(2)


class PeekOnPickle:
    """Notes the phase in which it is saved."""

    def __init__(self):
        self.phases = []

    def __reduce__(self):
        self.phases.append(int(STATE.writer.phase))
        return (str, ("x",))


def test_phases_of_a_training(tmp_path):
    def body(rank):
        writer = STATE.writer
        writer.set_phase(Phase.START)
        assert writer.phase == Phase.START
        data = Peek()
        for _ in torch.utils.data.DataLoader(data, batch_size=2):
            assert writer.phase == Phase.START
        model, _ = model_and_optimizer()
        inside = []
        loss = model(torch.ones(1, 4)).sum()
        loss.register_hook(lambda grad: inside.append(int(writer.phase)))
        loss.backward()

        class Watching(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                inside.append(int(writer.phase))

        Watching(model.parameters(), lr=0.1).step()
        inside.append(int(writer.phase))
        with closeranks.phase("warm-up"):
            buffer = io.BytesIO()
            saved = PeekOnPickle()
            torch.save(saved, buffer)
            inside.append(int(writer.phase))
        return [data.phases, inside, saved.phases, int(writer.phase)]

    with Ranks(body, 1, tmp_path) as ranks:
        data, inside, saving, last = ranks.results()[0]
        page = ranks.page(0)
    assert data == [Phase.DATA] * 4
    assert inside == [Phase.BACKWARD, Phase.OPTIMIZER, Phase.TRAIN, Phase.USER]
    assert saving and set(saving) == {Phase.CHECKPOINT}
    assert last == Phase.TRAIN and page.checkpoints == 1 and page.checkpoint_step == 1


def test_making_the_process_group_is_a_phase(tmp_path):
    def body(rank):
        STATE.writer.set_phase(Phase.START)
        while rank == 1 and not gate.exists():
            time.sleep(0.01)
        init(rank)
        return int(STATE.writer.phase)

    gate = tmp_path / "gate"
    with Ranks(body, 2, tmp_path) as ranks:
        ranks.until(lambda: ranks._pages[64] == Phase.INIT)
        assert not ranks.page(0).init_done
        gate.touch()
        assert ranks.results() == [Phase.TRAIN] * 2
        assert ranks.page(0).init_done


class Stepper(torch.utils.data.Dataset):
    """Data that does in the worker process what a rank's hooks would record."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        model, optimizer = model_and_optimizer()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), io.BytesIO())
        closeranks.step(10_000)
        with closeranks.phase("in a worker"):
            return int(STATE.active)


def test_forked_children_do_not_write_the_rank_s_page(tmp_path):
    def body(rank):
        loader = torch.utils.data.DataLoader(Stepper(), batch_size=2, num_workers=2)
        live = [int(flag) for batch in loader for flag in batch]
        pid = os.fork()
        if pid == 0:
            closeranks.step(5)
            STATE.control.send({"type": "raised"})
            os._exit(0 if STATE.why_off == "forked from the rank" else 1)
        return [live, os.waitpid(pid, 0)[1], STATE.active]

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [[[0] * 6, 0, True]]
        page = ranks.page(0)
        assert not ranks.all_heard("raised")
    assert (page.step, page.checkpoints, page.absolute_step) == (0, 0, None)
    assert page.pid == ranks.pids[0] and page.phase_name != "in a worker"


def test_background_threads_do_not_move_the_rank_s_phase(tmp_path):
    def body(rank):
        seen = []

        class Slow:
            def __reduce__(self):
                seen.append(int(STATE.writer.phase))
                return (str, ("x",))

        thread = threading.Thread(target=lambda: torch.save(Slow(), io.BytesIO()))
        thread.start()
        thread.join()
        return [seen, int(STATE.writer.phase)]

    with Ranks(body, 1, tmp_path) as ranks:
        (seen, last) = ranks.results()[0]
        assert seen and set(seen) == {Phase.WAITING} and last == Phase.WAITING
        assert ranks.page(0).checkpoints == 1


def test_distributed_checkpoints_count_once_however_many_parts(tmp_path):
    def body(rank):
        init(rank)
        assert "torch.distributed.checkpoint" not in sys.modules
        import torch.distributed.checkpoint as dcp

        state = {"a": torch.ones(4), "b": {"c": torch.ones(8), "d": 3}}
        train(2)
        dcp.save(state, checkpoint_id=tmp_path / "one")
        counts = [STATE.writer._checkpoints]
        future = dcp.async_save(state, checkpoint_id=tmp_path / "two")
        train(1)
        future.result()
        deadline = time.monotonic() + 10
        while STATE.writer._checkpoints < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(STATE.writer._checkpoints)
        dcp.load(state, checkpoint_id=tmp_path / "one")
        counts.append(STATE.writer._checkpoints)
        torch.save(state, tmp_path / f"three-{rank}")
        counts.append(STATE.writer._checkpoints)
        return [counts, STATE.dcp_saves, int(STATE.writer.phase)]

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [[[1, 2, 2, 3], 0, Phase.TRAIN]] * 2
        assert not ranks.all_heard("desync")


def test_a_save_that_fails_is_none(tmp_path):
    def body(rank):
        with pytest.raises(RuntimeError):
            torch.save(1, tmp_path / "no" / "such" / "directory")
        return int(STATE.writer.phase)

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [Phase.WAITING]
        assert ranks.page(0).checkpoints == 0


# --- the hooks never break the training -----------------------------------------------------------------


def test_an_unmapped_page_switches_the_hooks_off(tmp_path):
    def body(rank):
        init(rank)
        writer = STATE.writer
        for view in (writer._own, writer._own_u32, writer._bytes, writer.all_words, writer.all_u32):
            view.release()
        tensor = torch.ones(2)
        if rank == 0:
            dist.all_reduce(tensor)
        else:
            closeranks.step(3)
            dist.all_reduce(tensor)
        train(2, average)
        torch.save(1, io.BytesIO())
        return [tensor.tolist(), STATE.active, "released" in STATE.why_off or "memoryview" in STATE.why_off]

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [[[2.0, 2.0], False, True]] * 2
        assert len(ranks.all_heard("hooks_off")) == 2


def test_a_backend_that_does_not_count_is_recorded_without_numbers(tmp_path):
    def body(rank):
        init(rank)
        state = STATE.recorder.groups.get(None)

        def cannot(self):
            raise RuntimeError("not supported")

        dist.ProcessGroup._get_sequence_number_for_group = cannot
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
        return [STATE.active, state.check is None]

    with Ranks(body, 2, tmp_path) as ranks:
        assert ranks.results() == [[True, True]] * 2
        assert [record.seq for record in ranks.page(0).collectives] == [0, 0]


def test_without_install_nothing_happens():
    assert not STATE.active
    closeranks.step()
    closeranks.step(5)
    with closeranks.phase("eval"):
        pass
    with pytest.raises((TypeError, AttributeError)):
        closeranks.step("five")


# --- the public API ---------------------------------------------------------------------------------------


def test_steps_of_a_script_without_an_optimizer(tmp_path):
    def body(rank):
        for n in range(1, 4):
            closeranks.step(100 + n)
        before = STATE.writer.step
        train(2)
        closeranks.step()  # an optimizer has stepped: that is the count now
        return [before, STATE.writer.step]

    with Ranks(body, 1, tmp_path) as ranks:
        assert ranks.results() == [[3, 5]]
        assert ranks.page(0).absolute_step == 103


# --- the evidence thread ----------------------------------------------------------------------------------


def answers(ranks, kind):
    ranks.until(lambda: ranks.heard(0, kind))
    return ranks.heard(0, kind)[-1]


def test_the_evidence_thread_answers_while_the_rank_hangs(tmp_path):
    def body(rank):
        init(rank)
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            dist.all_reduce(torch.ones(5))
        time.sleep(60)

    with Ranks(body, 2, tmp_path) as ranks:
        ranks.until(lambda: len(ranks.page(0).collectives) == 2)
        names = [path.read_text().strip() for path in Path(f"/proc/{ranks.pids[0]}/task").glob("*/comm")]
        assert THREAD_NAME in names
        ranks.say(0, {"type": "ping", "id": 7})
        assert answers(ranks, "pong")["id"] == 7
        path = tmp_path / "0.json"
        ranks.say(0, {"type": "flight_recorder", "path": str(path)})
        reply = answers(ranks, "flight_recorder")
        assert reply["path"] == str(path) and "error" not in reply
        assert len(json.loads(path.read_text())["entries"]) == 2
        (group,) = reply["groups"]
        assert (group["last_enqueued"], group["last_completed"], group["pending_op"]) == (2, 1, "all_reduce")
        ranks.say(0, {"type": "flight_recorder", "path": str(tmp_path / "no" / "where")})
        ranks.until(lambda: len(ranks.heard(0, "flight_recorder")) == 2)
        assert "can't write" in ranks.heard(0, "flight_recorder")[1]["error"]
        ranks.say(0, {"type": "flight_recorder", "path": None})
        ranks.until(lambda: len(ranks.heard(0, "flight_recorder")) == 3)
        assert ranks.heard(0, "flight_recorder")[2]["groups"] == reply["groups"]
        ranks.say(0, {"type": "modules"})
        modules = answers(ranks, "modules")["names"]
        assert "torch.distributed" in modules and not [
            name for name in modules if not name.startswith("torch")
        ]
        ranks.say(0, {"type": "what?"})
        assert answers(ranks, "unknown_request")["request"] == "what?"
        for bad in (
            {"id": 0},
            {"id": "x", "spec": "kill"},
            {"id": 0, "spec": "kil"},
            {"id": 64, "spec": "kill"},
        ):
            ranks.say(0, {"type": "fault", **bad})
        ranks.until(lambda: len(ranks.heard(0, "fault_refused")) == 4)


def test_a_fault_sent_to_a_running_rank_is_carried_out(tmp_path):
    def body(rank):
        while True:
            train(1)
            time.sleep(0.01)

    with Ranks(body, 1, tmp_path) as ranks:
        ranks.until(lambda: ranks.page(0).step > 3)
        ranks.say(0, {"type": "fault", "id": 9, "spec": "os-exit:code=42"})
        assert ranks.wait() == [42]
        assert ranks.page(0).faults_fired == 1 << 9


def test_the_thread_ends_with_its_line(tmp_path):
    class Closed:
        def send(self, message):
            return False

        def receive(self):
            return None

    thread = hooks_evidence.start_evidence_thread(Closed())
    thread.join(10)
    assert not thread.is_alive() and thread.daemon


def entry(seq, op="gloo:all_reduce", *, retired=True, group="0", number=0, p2p=False):
    return {
        "pg_id": number, "process_group": [group, "default_pg"], "collective_seq_id": seq, "retired": retired,
        "profiling_name": op, "is_p2p": p2p,
    }  # fmt: skip


def test_group_statuses_count_what_is_equal_on_all_ranks():
    trace = {
        "entries": [
            entry(1), entry(2, retired=False, op="gloo:broadcast"), entry(3, retired=False),
            entry(7, group="1", number=1), entry(9, p2p=True),
        ],
        "pg_status": {
            "0": {"last_enqueued_collective": "24", "last_completed_collective": "23"},
            "2": {"last_enqueued_collective": "5", "last_completed_collective": "4"},
        },
    }  # fmt: skip
    assert hooks_evidence.group_statuses(trace) == [
        {"group": "0", "last_enqueued": 3, "last_completed": 1, "pending_op": "broadcast"},
        {"group": "1", "last_enqueued": 7, "last_completed": 7, "pending_op": ""},
        {"group": "pg 2", "last_enqueued": 5, "last_completed": 4, "pending_op": ""},
    ]


@pytest.mark.parametrize(
    "trace",
    [
        {}, {"entries": None}, {"entries": [None, 3, [], {}, {"process_group": []}]}, {"pg_status": [1]},
        {"pg_status": {"0": None, "1": {}}}, {"entries": [entry("x")]},
    ],
)  # fmt: skip
def test_group_statuses_of_an_unknown_dump_are_empty(trace):
    assert hooks_evidence.group_statuses(trace) == []


def test_every_hooked_function_exists_in_this_torch():
    names = [name for name, _ in hooks_collectives.calls()]
    assert {call.name for _, call in hooks_collectives.calls()} == set(OPS) - {"unknown"}
    assert all(hasattr(dist, name) for name in names)
