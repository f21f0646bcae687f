"""Who leads: one at a time, for no longer than etcd lets it, and what others wrote is never written over."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time

import pytest

from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.etcd import Etcd, delete, get, put
from closeranks.controller.leadership import Campaign, Ended, Leadership, boottime_s, job_prefix
from closeranks.controller.shared_state import SharedState, _shift_s
from closeranks.errors import EtcdError, JournalError
from closeranks.events import Finish, RunStarted
from closeranks.linux import boot_id
from closeranks.policy.cluster_state import Link

from .etcd_rig import EtcdServer, Line, etcd_server

JOB = "20261201-042655-train-a1b2"


@pytest.fixture
def server(tmp_path):
    with etcd_server(tmp_path) as found:
        yield found


class Candidate:
    """A controller without a job: campaigns, keeps its lease, writes."""

    def __init__(self, server: EtcdServer, url: str = "", **changes: object) -> None:
        self.config = server.config(**({"urls": (url,)} if url else {}), **changes)
        self.etcd, self.renewer = Etcd(self.config), Etcd(self.config)
        self.told: list[str] = []
        self.leadership: Leadership | None = None
        self.shared: SharedState | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def win(self, *, begins: bool = True, keep: bool = True):
        campaign = Campaign(self.renewer, self.config, JOB, begins=begins, tell=self.told.append)
        won = await campaign.run()
        if isinstance(won, Ended):
            return won
        self.leadership = won
        self.shared = SharedState(self.etcd, won, JOB, self.told.append)
        if keep:
            self.tasks.append(asyncio.create_task(won.keep()))
        found = await self.shared.load()
        self.tasks.append(asyncio.create_task(self.shared.run()))
        return found

    def write(self, **parts: object) -> None:
        assert self.shared is not None
        gone = [name for name, part in parts.items() if part is None]
        changed = {name: part for name, part in parts.items() if part is not None}
        self.shared.decided([{"set": changed, "gone": gone, "last": True}], ())

    async def settled(self, timeout_s: float = 5.0) -> None:
        assert self.shared is not None
        await asyncio.wait_for(self.shared.settled(), timeout_s)

    async def die(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        self.etcd.close()
        self.renewer.close()


def test_the_second_leads_once_the_first_is_gone_for_certain(server):
    async def main() -> None:
        first, second = Candidate(server), Candidate(server)
        assert await first.win() is None
        first.shared.began({"argv": ["a.py"]})
        first.write(a=1, b=[2])
        await first.settled()
        winning = asyncio.create_task(second.win(begins=False))
        await asyncio.sleep(3.5)  # renewed again and again
        assert not winning.done() and first.leadership.is_held
        await first.die()
        stopped_s = time.monotonic() + first.leadership.left_s
        found = await asyncio.wait_for(winning, 10)
        assert time.monotonic() > stopped_s + first.config.margin_s
        assert found.parts == {"a": 1, "b": [2]} and found.began == {"argv": ["a.py"]}
        assert found.shift_s == 0
        assert second.leadership.term > first.leadership.term
        await second.die()

    asyncio.run(main())


def test_a_standby_begins_nothing(server):
    async def main() -> None:
        standby, first = Candidate(server), Candidate(server)
        winning = asyncio.create_task(standby.win(begins=False))
        await asyncio.sleep(0.5)
        assert not winning.done()
        await first.win()
        first.shared.began({})
        first.write(a=1)
        await first.settled()
        await first.leadership.resign()
        assert (await asyncio.wait_for(winning, 5)).parts == {"a": 1}
        await first.die()
        await standby.die()

    asyncio.run(main())


def test_a_job_that_has_ended_is_led_by_nobody(server):
    async def main() -> None:
        first, second = Candidate(server), Candidate(server)
        await first.win()
        first.write(a=1)
        winning = asyncio.create_task(second.win())
        await first.settled()
        await first.shared.end(Finish(7, "the script says so"))
        assert await asyncio.wait_for(winning, 5) == Ended(7, "the script says so")
        assert not first.leadership.is_held
        left = [row.key for row in await second.etcd.read_prefix(job_prefix(JOB), 5)]
        assert left == [job_prefix(JOB) + b"ended", job_prefix(JOB) + b"stamp"]
        await first.die()
        await second.die()

    asyncio.run(main())


def test_who_is_cut_off_from_etcd_leads_no_more_before_its_lease_ends_there(server):
    async def main() -> None:
        async with Line(server.port) as line:
            first, second = Candidate(server, line.url), Candidate(server)
            await first.win()
            first.shared.began({})
            first.write(a=1)
            await first.settled()
            line.hold()
            first.write(a=2)
            acted: list[int] = []
            first.shared.then(lambda: acted.append(2))
            winning = asyncio.create_task(second.win())
            await asyncio.wait_for(first.leadership.lost.wait(), 5)
            assert not winning.done()
            assert (
                "did not answer" in first.leadership.lost_because
                or "in time" in first.leadership.lost_because
            )
            found = await asyncio.wait_for(winning, 10)
            assert found.parts == {"a": 1}
            second.write(a=3)
            await second.settled()
            line.release()  # its last words arrive, and count for nothing
            await asyncio.sleep(0.3)
            rows = {row.key: row.value for row in await second.etcd.read_prefix(job_prefix(JOB), 5)}
            assert rows[job_prefix(JOB) + b"state/a"] == b"3"
            assert acted == []
            await first.die()
            await second.die()

    asyncio.run(main())


def test_a_lease_that_was_revoked_is_lost_at_once_and_writes_nothing(server):
    async def main() -> None:
        first, other = Candidate(server), Candidate(server)
        await first.win()
        first.write(a=1)
        await first.settled()
        await other.etcd.txn([], [delete(first.leadership.key)], [], 5)
        first.write(a=2)
        await asyncio.wait_for(first.leadership.lost.wait(), 2)
        assert "another controller leads" in first.leadership.lost_because
        rows = {row.key: row.value for row in await other.etcd.read_prefix(job_prefix(JOB), 5)}
        assert rows[job_prefix(JOB) + b"state/a"] == b"1"
        await first.die()
        await other.die()

    asyncio.run(main())


def test_an_attempt_that_was_given_up_does_nothing_when_it_comes_late(server):
    """Two etcds to ask; one holds the request back until a newer decision is kept."""

    async def main() -> None:
        async with Line(server.port) as slow:
            one = Candidate(server)
            one.etcd.close()
            one.etcd = Etcd(server.config(urls=(slow.url, server.url)))
            await one.win()
            one.write(a=1)
            await one.settled()
            slow.hold()
            one.write(a=2)
            await one.settled()
            one.write(a=3)
            await one.settled()
            slow.release()
            await asyncio.sleep(0.3)
            rows = {row.key: row.value for row in await one.renewer.read_prefix(job_prefix(JOB), 5)}
            assert rows[job_prefix(JOB) + b"state/a"] == b"3"
            assert one.leadership.is_held
            await one.die()

    asyncio.run(main())


def test_etcd_that_is_killed_and_comes_back_in_time_costs_nothing(server):
    async def main() -> None:
        one = Candidate(server, ttl_s=5.0)
        await one.win()
        one.write(a=1)
        await one.settled()
        server.kill()
        one.write(a=2)
        acted: list[int] = []
        one.shared.then(lambda: acted.append(2))
        await asyncio.sleep(1.2)
        assert acted == [] and one.leadership.is_held
        server.start()
        await one.settled(8.0)
        assert acted == [2] and one.leadership.is_held
        await asyncio.sleep(5.0)
        assert one.leadership.is_held
        assert any("etcd takes no decisions" in text for text in one.told)
        await one.die()

    asyncio.run(main())


# --- what is written --------------------------------------------------------------------------------


def test_orders_wait_for_their_decisions_and_keep_their_order(server):
    async def main() -> None:
        one = Candidate(server)
        await one.win()
        acted: list[object] = []
        one.shared.then(lambda: acted.append("at once"))
        assert acted == ["at once"]
        for n in range(300):
            one.write(**{f"p{n % 7}": n})
            one.shared.then(lambda n=n: (acted.append(n), one.shared.then(lambda: acted.append(-n))))
        assert acted == ["at once"]
        await one.settled()
        await one.settled()
        assert [x for x in acted if isinstance(x, int) and x > 0] == list(range(1, 300))
        assert sorted(x for x in acted if isinstance(x, int) and x < 0) == sorted(-n for n in range(1, 300))
        await one.die()

    asyncio.run(main())


@pytest.mark.parametrize("count", [100, 500])
def test_a_decision_too_large_for_one_transaction_counts_whole_or_not_at_all(server, count, monkeypatch):
    """The leader dies after each of the transactions that it takes."""
    monkeypatch.setattr("closeranks.controller.shared_state._MAX_TXN_BYTES", 30_000)

    async def main() -> None:
        old = {f"node/{n}": "old" for n in range(count)}
        new = {f"node/{n}": "new" + "x" * 300 for n in range(count - 1)} | {"extra": 1}
        for after in range(200):
            if not await once(server, old, new, after):
                assert after > 5
                return
        pytest.fail("it never came to its end")

    async def once(server: EtcdServer, old: dict, new: dict, after: int) -> bool:
        first, second = Candidate(server), Candidate(server)
        await first.etcd.txn([], [delete(job_prefix(JOB), prefix=True)], [], 5)
        await first.win()
        first.shared.decided([{"set": old, "gone": [], "last": True}], ())
        await first.settled()
        real, left, acted = first.etcd.txn, after, []

        async def dying(*arguments):
            nonlocal left
            if left == 0:
                raise asyncio.CancelledError
            left -= 1
            return await real(*arguments)

        first.etcd.txn = dying
        halves = [
            {"set": dict(list(new.items())[: count // 2]), "gone": [], "last": False},
            {"set": dict(list(new.items())[count // 2 :]), "gone": [f"node/{count - 1}"], "last": True},
        ]
        first.shared.decided(halves, ())
        first.shared.then(lambda: acted.append(True))
        deadline_s = time.monotonic() + 10
        while not first.tasks[-1].done() and not (acted and not first.shared._busy):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.005)
        died = first.tasks[-1].done()
        await first.leadership.resign()
        await first.die()
        found = await asyncio.wait_for(second.win(), 10)
        assert found.parts in (old, new)
        assert not acted or found.parts == new
        keys = [row.key for row in await second.etcd.read_prefix(job_prefix(JOB), 5)]
        assert not [key for key in keys if b"/staged/" in key or b"/counts" in key]
        await second.leadership.resign()
        await second.die()
        return died

    monkeypatch.setattr("closeranks.controller.leadership._RESIGN_S", 2.0)
    asyncio.run(main())


def test_a_value_that_makes_no_sense_is_an_error(server):
    async def main() -> None:
        one = Candidate(server)
        for value in (b"{", b"\xff", b"[" * 100_000):
            await one.etcd.txn([], [put(job_prefix(JOB) + b"state/job", value)], [], 5)
            with pytest.raises(JournalError, match="makes no sense"):
                await one.win()
            await one.leadership.resign()
            await one.die()
            one = Candidate(server)
        await one.etcd.txn([], [put(job_prefix(JOB) + b"ended", b"7")], [], 5)
        with pytest.raises(EtcdError, match="doesn't say how"):
            await Campaign(one.etcd, one.config, JOB, begins=True, tell=one.told.append)._look()
        await one.die()

    asyncio.run(main())


def test_times_go_over_to_another_host_by_its_wall_clock(monkeypatch):
    now_ns, second_ns = time.time_ns(), 1_000_000_000
    stamp = {"boot": "another", "wall_ns": now_ns - 5 * second_ns, "mono_ns": 100 * second_ns}
    shift_s = _shift_s(stamp)  # what was 100 s there was 5 s ago here
    assert 100.0 + shift_s == pytest.approx(time.monotonic() - 5.0, abs=0.5)
    ahead = {**stamp, "wall_ns": now_ns + 3600 * second_ns}
    assert 100.0 + _shift_s(ahead) == pytest.approx(time.monotonic(), abs=0.5)
    assert _shift_s({**stamp, "boot": boot_id()}) == 0.0
    assert _shift_s({}) == _shift_s({**stamp, "wall_ns": "x"}) == 0.0


def test_a_job_goes_on_from_what_another_has_left(server, tmp_path):
    async def main() -> None:
        first, second = Candidate(server), Candidate(server)
        config, budget = ClusterConfig(max_nodes=2, min_nodes=2), BudgetConfig()
        found = await first.win()
        job = ClusterJob.lead(tmp_path / "a.db", config, budget, first.shared, found)
        assert not job.resumed
        first.shared.began({"argv": ["train.py"]})
        from closeranks.cluster_events import NodeAttached

        job.handle(RunStarted())
        for name in "ab":
            job.handle(NodeAttached(name, f"s{name}", 4, "10.0.0.1"))
        await first.settled()
        before = job.state
        await first.leadership.resign()
        await first.die()
        job.close()
        found = await asyncio.wait_for(second.win(begins=False), 5)
        (tmp_path / "b").mkdir()
        after = ClusterJob.lead(tmp_path / "b" / "b.db", config, budget, second.shared, found)
        assert after.resumed
        assert set(after.state.nodes) == {"a", "b"}
        assert {node.link for node in after.state.nodes.values()} == {Link.AWAITED}
        assert after.state.job.generation == before.job.generation
        after.close()
        from closeranks.controller.journal import read

        records = list(read(tmp_path / "b" / "b.db"))
        assert [r.kind for r in records][:3] == ["controller_started", "run_started", "cluster_state"]
        assert records[1].data == {"argv": ["train.py"]}
        await second.die()

    asyncio.run(main())


# --- the property -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3))])
def test_never_two_leaders_that_both_get_a_decision_through(server, seed):
    """Three that write as fast as they may, on lines that are held, cut and let go again at random."""
    asyncio.run(rivalry(server, seed, rounds_s=25.0))


async def rivalry(server: EtcdServer, seed: int, rounds_s: float) -> None:
    chance = random.Random(seed)
    acts: list[tuple[float, int]] = []  # when, and in which term, something was done
    reigns: list[tuple[int, float, float]] = []  # a term, and from when to when its leader thought it led

    async def live(line: Line) -> None:
        while True:
            one = Candidate(server, line.url)
            try:
                await one.win()
                term, began_s, n = one.leadership.term, boottime_s(), 0
                one.shared.began({})
                while one.leadership.is_held:
                    n += 1
                    one.write(counter=[term, n])
                    one.shared.then(lambda term=term: acts.append((time.monotonic(), term)))
                    await asyncio.sleep(chance.random() * 0.02)
                    if chance.random() < 0.002:
                        break
                # This loop may notice late that it is over; whoever asks is told at once.
                reigns.append((term, began_s, min(boottime_s(), one.leadership._held_until_s)))
                await one.leadership.resign()
            except EtcdError:
                await asyncio.sleep(0.05)
            finally:
                await one.die()

    async with Line(server.port) as a, Line(server.port) as b, Line(server.port) as c:
        lives = [asyncio.create_task(live(line)) for line in (a, b, c)]
        until_s = time.monotonic() + rounds_s
        while time.monotonic() < until_s:
            line = chance.choice((a, b, c))
            match chance.randrange(6):
                case 0 | 1 | 2:
                    line.hold()
                case 3:
                    line.cut()
                case _:
                    line.release()
            await asyncio.sleep(chance.random())
        for task in lives:
            task.cancel()
        await asyncio.wait(lives)
        for task in lives:
            assert task.cancelled(), task.exception()
    terms = [term for _, term in sorted(acts)]
    assert terms == sorted(terms), "a leader acted after its successor had"
    assert len(set(terms)) >= 3, "too few changes to say anything"
    reigns.sort()
    for (_, _, end_s), (_, began_s, _) in itertools.pairwise(reigns):
        assert end_s <= began_s, "two thought that they lead"
    await check_history(server)


async def check_history(server: EtcdServer) -> None:
    """Every write to the state, in etcd's own order: terms never go back, and none skips a number."""
    etcd = Etcd(server.config())
    key = job_prefix(JOB) + b"stamp"
    newest = (await etcd.txn([], [get(key)], [], 5)).revision
    stamps = []
    for revision in range(2, newest + 1):
        body = {"key": "L2Nsb3NlcmFua3Mv", "range_end": "L2Nsb3NlcmFua3Mw", "revision": str(revision)}
        answer = await etcd._call("/v3/kv/range", body, 5)
        from base64 import b64decode

        for row in answer.get("kvs", ()):
            if b64decode(row["key"]) == key and int(row["mod_revision"]) == revision:
                stamp = json.loads(b64decode(row["value"]))
                stamps.append((stamp["term"], stamp["n"]))
    assert stamps == sorted(stamps) and len(set(stamps)) == len(stamps)
    for (term, n), (next_term, next_n) in itertools.pairwise(stamps):
        assert next_n == (n + 1 if next_term == term else 1)
    etcd.close()
