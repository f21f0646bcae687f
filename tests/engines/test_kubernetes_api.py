"""The client against a server that answers, forgets, hangs, drips, lies and floods; over real TLS."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.engines import kubernetes_api, kubernetes_http
from closeranks.engines.kubernetes_api import Change, KubernetesApi
from closeranks.engines.kubernetes_http import in_cluster
from closeranks.errors import ConfigError, EngineError

from .kubernetes_rig import TOKEN, FakeApi, Handler, Misbehaviour, authority, node, pod, served

T = TypeVar("T")
SELECTOR = "closeranks/job=llama-7b,closeranks/role=agent"


class Cluster:
    """The server, and a client of it with what it had to tell."""

    def __init__(self, api: FakeApi, env: dict[str, str], directory: Path) -> None:
        self.api, self.env, self.directory = api, env, directory
        self.told: list[str] = []
        self.access = in_cluster(env, directory)
        self.client = KubernetesApi(self.access, random.Random(1).random, self.told.append)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with served(tmp_path) as (api, env):
        yield Cluster(api, env, tmp_path)


def run(task: Awaitable[T], timeout_s: float = 30) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(task, timeout_s)

    return asyncio.run(bounded())


async def changes_until(client: KubernetesApi, enough: Callable[[list[Change]], bool]) -> list[Change]:
    found: list[Change] = []
    async with aclosing(client.follow_pods(SELECTOR)) as changes:
        async for change in changes:
            found.append(change)
            if enough(found):
                return found
    raise AssertionError("a watch has ended")


def names(change: Change) -> list[str]:
    return [each["metadata"]["name"] for each in change.objects]


# --- what it asks -----------------------------------------------------------------------------------


def test_lists_come_in_pages_and_only_of_this_job(cluster: Cluster) -> None:
    cluster.api.put(*(pod(f"p{index}", "n") for index in range(8)), pod("other", job="other"))
    assert len(run(cluster.client.pods(SELECTOR))) == 8
    paths = [line for line in cluster.api.requests if line.startswith("GET")]
    assert len(paths) == 3 and all("/api/v1/namespaces/research/pods?" in path for path in paths)


def test_delete_means_this_very_pod(cluster: Cluster) -> None:
    cluster.api.put(pod("p", "n"))
    assert run(cluster.client.delete_pod("p", "uid-of-an-earlier-one")) is False
    assert run(cluster.client.delete_pod("p", "uid-p")) is True
    assert run(cluster.client.delete_pod("q", "uid-q")) is False
    assert "deletionTimestamp" in cluster.api.objects["pods"]["p"]["metadata"]


def test_cordon_and_back(cluster: Cluster) -> None:
    cluster.api.put(node("n"))
    run(cluster.client.cordon("n", on=True, reason="r" * 1000))
    found = cluster.api.objects["nodes"]["n"]
    assert (
        found["spec"]["unschedulable"] is True
        and len(found["metadata"]["annotations"]["closeranks/cordoned"]) == 200
    )
    run(cluster.client.cordon("n", on=False))
    found = cluster.api.objects["nodes"]["n"]
    assert (
        found["spec"]["unschedulable"] is False
        and found["metadata"]["annotations"]["closeranks/cordoned"] is None
    )


@pytest.mark.parametrize("name", ["../../secrets/x", "a b", "a\r\nX: y", "ü", "a?watch=1", "a#b", "%2e"])
def test_a_name_stays_one_part_of_a_path(cluster: Cluster, name: str) -> None:
    run(cluster.client.delete_pod(name, "u"))
    (line,) = cluster.api.requests
    assert line.startswith("DELETE /api/v1/namespaces/research/pods/")
    assert len(line.split("/")) == 7 and " " not in line[7:] and "?" not in line and "#" not in line


def test_nobody_is_asked_without_the_token_of_now(cluster: Cluster) -> None:
    assert run(cluster.client.pods(SELECTOR)) == ()
    cluster.api.token = "rotated.token.x"
    with pytest.raises(EngineError, match=r"401 to GET .*Unauthorized"):
        run(cluster.client.pods(SELECTOR))
    (cluster.directory / "token").write_text("rotated.token.x\n")
    assert run(cluster.client.pods(SELECTOR)) == ()


@pytest.mark.parametrize("text", ["", "a b", "a\nX-Evil: 1", "é", "\0"])
def test_a_token_that_is_none_goes_nowhere(cluster: Cluster, text: str) -> None:
    (cluster.directory / "token").write_text(text)
    with pytest.raises(EngineError):
        run(cluster.client.pods(SELECTOR))
    assert not cluster.api.requests


def test_an_authority_that_is_replaced_is_read_anew(cluster: Cluster, tmp_path_factory: Any) -> None:
    run(cluster.client.pods(SELECTOR))
    good = (cluster.directory / "ca.crt").read_text()
    other, _ = authority(tmp_path_factory.mktemp("other"))
    (cluster.directory / "ca.crt").write_text(other.read_text())
    with pytest.raises(EngineError, match="can't prove itself"):
        run(cluster.client.pods(SELECTOR))
    (cluster.directory / "ca.crt").write_text(good)
    run(cluster.client.pods(SELECTOR))
    assert len(cluster.api.requests) == 2, "an impostor sees no token"


def test_a_server_by_another_name_is_none(cluster: Cluster) -> None:
    cluster.access.host = "localhost"  # the certificate is for 127.0.0.1
    with pytest.raises(EngineError, match="can't prove itself"):
        run(cluster.client.pods(SELECTOR))
    assert not cluster.api.requests


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
def test_missing_files_are_named(cluster: Cluster, missing: str) -> None:
    (cluster.directory / missing).unlink()
    with pytest.raises(EngineError, match=f"can't read .*{missing}"):
        run(cluster.client.pods(SELECTOR))


def test_outside_of_a_pod(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="isn't in a pod"):
        in_cluster({}, tmp_path)
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


def test_no_server(cluster: Cluster) -> None:
    cluster.access.port = 1
    with pytest.raises(EngineError, match="broke"):
        run(cluster.client.pods(SELECTOR))


# --- what it takes ----------------------------------------------------------------------------------


def raw(*parts: bytes, pause_s: float = 0) -> Misbehaviour:
    def misbehave(handler: Handler) -> None:
        for part in parts:
            handler.wfile.write(part)
            handler.wfile.flush()
            time.sleep(pause_s)

    return misbehave


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([b""], "ended in the middle"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "doesn't speak HTTP"),
        ([b"HTTP/1.1 999 X\r\n\r\n"], "doesn't speak HTTP"),
        ([b"X" * 100_000], "too long"),
        ([OK + b"A: " + b"x" * 100_000 + b"\r\n\r\n"], "too long"),
        ([OK + b"Content-Length: 10\r\n\r\n{}"], "ended in the middle"),
        ([OK + b"Content-Length: 2\r\n\r\n{}"], "no list"),
        ([OK + b"Content-Length: 9\r\n\r\n<html>x</"], "no JSON"),
        ([OK + b"Content-Length: 2\r\n\r\n[]"], "no object"),
        ([OK + b"Content-Length: 4\r\n\r\n\xff\xfe{}"], "no JSON"),
        ([OK + b"\r\n" + b"[" * 100_000], "no JSON"),
        ([OK + b"\r\n" + b'{"items":' * 50_000], "no JSON"),
        ([OK + b'\r\n{"items": 1e999999}'], "no list"),
        ([CHUNKED + b"zz\r\n{}\r\n"], "breaks off"),
        ([CHUNKED + b"2\r\n{}XX0\r\n\r\n"], "breaks off"),
        ([CHUNKED + b"2\r\n{}\r\n"], "ended in the middle"),
        ([CHUNKED + b"-2\r\n{}\r\n"], "breaks off"),
        ([CHUNKED + b"1" * 9 + b"\r\n"], "breaks off"),
        (
            [b"HTTP/1.1 302 Found\r\nLocation: https://evil.example/\r\nContent-Length: 0\r\n\r\n"],
            "answers 302",
        ),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 6\r\n\r\n<html>"], "doesn't say why"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_answers_that_make_no_sense(cluster: Cluster, answer: list[bytes], says: str) -> None:
    cluster.api.misbehave.append(raw(*answer))
    with pytest.raises(EngineError, match=says) as error:
        run(cluster.client.pods(SELECTOR))
    assert len(str(error.value)) < 500 and TOKEN not in str(error.value)


def test_an_answer_without_an_end_is_cut_off(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_MAX_PAGE_BYTES", 1 << 20)
    cluster.api.misbehave.append(raw(OK + b"\r\n", *[b" " * (1 << 18)] * 40))
    with pytest.raises(EngineError, match="over 1,048,576 bytes"):
        run(cluster.client.pods(SELECTOR))


@pytest.mark.parametrize("parts", [[], [OK, b"A: b\r\n"], [CHUNKED, *[b"1\r\n \r\n"] * 100]])
def test_an_answer_that_drips_has_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]
) -> None:
    monkeypatch.setattr(kubernetes_api, "_REQUEST_TIMEOUT_S", 0.5)
    parts = parts or [b"" for _ in range(20)]
    cluster.api.misbehave.append(raw(*parts, *[b""] * 10, pause_s=0.1))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"didn't answer within 0\.5 s"):
        run(cluster.client.pods(SELECTOR))
    assert time.monotonic() - began < 5


def test_a_list_without_an_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_MAX_PAGES", 3)

    def onward(handler: Handler) -> None:
        handler.answer(200, {"items": [], "metadata": {"continue": "more"}})

    cluster.api.misbehave.extend([onward] * 3)
    with pytest.raises(EngineError, match="over 600 objects"):
        run(cluster.client.pods(SELECTOR))


def test_a_proxy_that_quotes_escapes_says_nothing_to_terminals(cluster: Cluster) -> None:
    cluster.api.misbehave.append(lambda handler: handler.refuse(500, "\x1b[31mred\nline" + "x" * 10_000))
    with pytest.raises(EngineError) as error:
        run(cluster.client.pods(SELECTOR))
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_server_that_never_shakes_hands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_http, "_CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster.access.port = silent.getsockname()[1]
        with pytest.raises(EngineError, match=r"no connection to the API server within 0\.3 s"):
            run(cluster.client.pods(SELECTOR), 5)


@given(
    st.lists(
        st.sampled_from([OK, CHUNKED, b"\r\n", b"2\r\n{}\r\n", b"0\r\n\r\n"]) | st.binary(max_size=20),
        max_size=6,
    )
)
def test_bytes_of_any_kind_are_an_answer_or_an_error(parts: list[bytes]) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader(limit=1024)
        reader.feed_data(b"".join(parts))
        reader.feed_eof()
        try:
            status, headers = await kubernetes_http._answer_head(reader)
            assert 100 <= status < 600
            async for part in kubernetes_http._body(reader, headers):
                assert len(part) <= sum(map(len, parts))
        except (EngineError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass

    asyncio.run(scenario())


# --- watch ------------------------------------------------------------------------------------------


def test_a_watch_tells_what_changes(cluster: Cluster) -> None:
    cluster.api.put(pod("a", "n"), pod("other", "n", job="other"))

    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 4))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.put(pod("b"), pod("other", "n", job="other", phase="Failed"), pod("b", "n"))
        cluster.api.remove("pods", "a")
        return await task

    found = run(scenario())
    assert [(change.kind, names(change)) for change in found] == [
        ("LISTED", ["a"]), ("ADDED", ["b"]), ("MODIFIED", ["b"]), ("DELETED", ["a"]),
    ]  # fmt: skip
    assert not cluster.told


def test_a_forgotten_version_means_a_new_list(cluster: Cluster) -> None:
    cluster.api.put(pod("a", "n"))

    def gone(handler: Handler) -> None:
        handler.chunk(
            json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410}}).encode() + b"\n"
        )

    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 2))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.misbehave.append(gone)
        return await task

    found = run(scenario())
    assert [(change.kind, names(change)) for change in found] == [("LISTED", ["a"])] * 2
    assert not cluster.told, "that is what happens, and nothing to tell people"


def test_a_watch_that_comes_too_late_lists_anew(cluster: Cluster) -> None:
    cluster.api.put(pod("a", "n"))

    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 2))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.misbehave.append(raw())  # a broken connection, and meanwhile:
        cluster.api.put(pod("b", "n"))
        cluster.api.forget()
        return await task

    first, second = run(scenario())
    assert (first.kind, names(first)) == ("LISTED", ["a"])
    assert (second.kind, names(second)) == ("LISTED", ["a", "b"])


def test_a_broken_connection_goes_on_where_it_was(cluster: Cluster) -> None:
    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 3))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.put(pod("a", "n"))
        await asyncio.sleep(0.2)
        cluster.api.misbehave.append(raw())
        await asyncio.sleep(0.1)
        cluster.api.put(pod("b", "n"))
        return await task

    found = run(scenario())
    assert [(change.kind, names(change)) for change in found] == [
        ("LISTED", []),
        ("ADDED", ["a"]),
        ("ADDED", ["b"]),
    ]
    lists = [line for line in cluster.api.requests if "watch" not in line]
    assert len(lists) == 1
    assert any("trying again" in line for line in cluster.told)


@pytest.mark.parametrize(
    "garbage",
    [
        b"5\r\nnull\n\r\n", b"3\r\n{}\n\r\n", b"9\r\nnot json\n\r\n", b"zz\r\n", b"4\r\n{\"ty\r\n0\r\n\r\n",
        b"1f\r\n{\"type\":\"ADDED\",\"object\":\"a\"}  \n\r\n",
    ],
    ids=repr,
)  # fmt: skip
def test_garbage_in_a_watch_is_told_and_left_behind(cluster: Cluster, garbage: bytes) -> None:
    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 2))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.misbehave.append(raw(garbage))
        await asyncio.sleep(0.1)
        cluster.api.put(pod("a", "n"))
        return await task

    assert names(run(scenario())[-1]) == ["a"]
    assert cluster.told and all(line.isprintable() for line in cluster.told)


def test_an_object_without_an_end_is_cut_off(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_MAX_LINE_BYTES", 100_000)
    flood = raw(*[b"10000\r\n" + b"x" * 0x10000 + b"\r\n"] * 50)

    async def scenario() -> list[Change]:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 2))
        await asyncio.to_thread(cluster.api.wait_for_watchers, 1)
        cluster.api.misbehave.append(flood)
        await asyncio.sleep(0.1)
        cluster.api.put(pod("a", "n"))
        return await task

    assert names(run(scenario())[-1]) == ["a"]
    assert any("over 100,000 bytes" in line for line in cluster.told)


def test_a_watch_that_says_nothing_is_left(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_WATCH_S", 0)
    monkeypatch.setattr(kubernetes_api, "_WATCH_SLACK_S", 0.3)

    def silent(handler: Handler) -> None:
        handler.begin_chunks()
        time.sleep(2)

    async def scenario() -> None:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: len(found) == 2))
        while not cluster.told:
            await asyncio.sleep(0.05)
        task.cancel()

    cluster.api.misbehave.extend([lambda handler: handler._list("pods", {}), silent])
    run(scenario(), 10)
    assert "neither says anything nor ends" in cluster.told[0]


def test_a_server_that_refuses_isnt_flooded(cluster: Cluster) -> None:
    cluster.api.token = "another"

    async def scenario() -> None:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: False))
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
    assert 2 <= len(cluster.api.requests) <= 12, cluster.api.requests
    assert "401" in cluster.told[0] and "Unauthorized" in cluster.told[0]


def test_a_server_that_ends_each_watch_isnt_flooded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_WATCH_S", 0)
    monkeypatch.setattr(kubernetes_api, "_WATCH_SLACK_S", 30)

    async def scenario() -> None:
        task = asyncio.create_task(changes_until(cluster.client, lambda found: False))
        await asyncio.sleep(1.5)
        task.cancel()

    run(scenario())
    assert len(cluster.api.requests) < 60
