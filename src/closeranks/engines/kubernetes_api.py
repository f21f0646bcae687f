"""What a job asks of Kubernetes' API: list and watch objects, delete a pod, cordon a node.

``follow`` is a list, then what changes, for as long as the job runs. A version that the server has
forgotten (410) means a new list; a connection that breaks is made again from the version that was seen
last; both after a back-off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from closeranks.backoff import Backoff
from closeranks.engines.kubernetes_http import Access, request, stream
from closeranks.errors import EngineError

__all__ = ["Change", "KubernetesApi", "Object", "at", "text_at"]

Object = Mapping[str, Any]

_REQUEST_TIMEOUT_S = 20.0
_WATCH_S = 60  # what the server is asked for; then a new one goes on from there
_WATCH_SLACK_S = 15.0
_PAGE = 200
_MAX_PAGES = 500
_MAX_PAGE_BYTES = 64 << 20
_MAX_LINE_BYTES = 8 << 20  # etcd takes objects of 1.5 MB
_MAX_ANSWER_BYTES = 4 << 20
_MAX_TEXT_CHARS = 200
_GONE = 410


@dataclass(frozen=True, slots=True)
class Change:
    """``LISTED``: these are all there are. ``ADDED``, ``MODIFIED``, ``DELETED``: this one."""

    kind: str
    objects: tuple[Object, ...]


class _Forgotten(Exception):
    """The server doesn't know any more what has changed since that version."""


class KubernetesApi:
    """The few calls. They raise EngineError, with what the server said, for what didn't work."""

    def __init__(self, access: Access, uniform: Callable[[], float], tell: Callable[[str], None]) -> None:
        self._access = access
        self._uniform = uniform
        self._tell = tell

    @property
    def namespace(self) -> str:
        return self._access.namespace

    def _pods(self) -> str:
        return f"/api/v1/namespaces/{quote(self._access.namespace, safe='')}/pods"

    async def pods(self, selector: str) -> tuple[Object, ...]:
        """The pods of this namespace with these labels."""
        try:
            found, _ = await self._list(self._pods(), selector)
        except _Forgotten:
            raise EngineError("the API server lost its place in a list of pods") from None
        return found

    def follow_pods(self, selector: str) -> AsyncGenerator[Change, None]:
        """Those pods and what becomes of them, without an end."""
        return self._follow(self._pods(), selector)

    def follow_nodes(self, selector: str = "") -> AsyncGenerator[Change, None]:
        """Node objects and what becomes of them, without an end."""
        return self._follow("/api/v1/nodes", selector)

    async def delete_pod(self, name: str, uid: str) -> bool:
        """Ask for the end of this very pod; False if it is gone already, or is another one by now."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        target = f"{self._pods()}/{quote(name, safe='')}"
        status, _ = await self._ask("DELETE", target, options, accept=(200, 202, 404, 409))
        return status in (200, 202)

    async def cordon(self, node: str, *, on: bool, reason: str = "") -> None:
        """Keep new pods away from a node, or let them come again; says why in an annotation."""
        note = reason[:_MAX_TEXT_CHARS] if on else None
        patch = {"metadata": {"annotations": {"closeranks/cordoned": note}}, "spec": {"unschedulable": on}}
        target = f"/api/v1/nodes/{quote(node, safe='')}"
        await self._ask("PATCH", target, patch, content_type="application/merge-patch+json", accept=(200,))

    async def _ask(
        self,
        method: str,
        target: str,
        body: Mapping[str, Any] | None = None,
        *,
        accept: tuple[int, ...],
        content_type: str = "application/json",
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> tuple[int, Object]:
        answer = await request(
            self._access, method, target,
            body=json.dumps(body).encode() if body is not None else b"",
            content_type=content_type, timeout_s=_REQUEST_TIMEOUT_S, max_bytes=max_bytes,
        )  # fmt: skip
        if answer.status not in accept:
            raise EngineError(_refusal(method, target, answer.status, answer.body))
        return answer.status, _parsed(answer.body)

    # --- list and watch -----------------------------------------------------------------------------

    async def _list(self, path: str, selector: str) -> tuple[tuple[Object, ...], str]:
        found: list[Object] = []
        onward = ""
        for _ in range(_MAX_PAGES):
            query = {"limit": str(_PAGE), "labelSelector": selector, "continue": onward}
            target = f"{path}?{urlencode({key: value for key, value in query.items() if value})}"
            status, page = await self._ask(
                "GET", target, accept=(200, _GONE), max_bytes=_MAX_PAGE_BYTES
            )  # fmt: skip
            if status == _GONE:
                raise _Forgotten
            items = page.get("items")
            if not isinstance(items, list):
                raise EngineError(f"the API server's answer to GET {path} is no list")
            found += [item for item in items if isinstance(item, dict)]
            onward = text_at(page, "metadata", "continue")
            if not onward:
                return tuple(found), text_at(page, "metadata", "resourceVersion")
        raise EngineError(f"GET {path} has over {_MAX_PAGES * _PAGE:,} objects; narrow it down with labels")

    async def _follow(self, path: str, selector: str) -> AsyncGenerator[Change, None]:
        backoff = Backoff(self._uniform, first_s=0.2, max_s=30.0)
        now_s = asyncio.get_running_loop().time
        version = ""
        while True:
            began_s = now_s()
            try:
                if not version:
                    objects, version = await self._list(path, selector)
                    yield Change("LISTED", objects)
                async with aclosing(self._watch(path, selector, version)) as changes:
                    async for seen, change in changes:
                        version = seen
                        backoff.reset()
                        if change is not None:
                            yield change
            except _Forgotten:
                version = ""
            except EngineError as error:
                self._tell(f"watching {path}: {error}; trying again")
            if now_s() - began_s > _WATCH_S / 2:  # it came to its end, with nothing to tell
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _watch(
        self, path: str, selector: str, version: str
    ) -> AsyncGenerator[tuple[str, Change | None], None]:
        """One connection's worth of changes, each with the version to go on from."""
        query = {
            "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S), "labelSelector": selector,
        }  # fmt: skip
        target = f"{path}?{urlencode({key: value for key, value in query.items() if value})}"
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _WATCH_S + _WATCH_SLACK_S
        async with stream(self._access, "GET", target) as (status, body):
            if status == _GONE:
                raise _Forgotten
            if status != 200:
                raise EngineError(_refusal("GET", path, status, await _start_of(body)))
            lines = _lines(body)
            while True:
                try:
                    async with asyncio.timeout_at(end_s):
                        line = await anext(lines)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise EngineError("the API server neither says anything nor ends the watch") from None
                yield _change(_parsed(line), version)


async def _lines(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    kept = bytearray()
    async for part in body:
        kept += part
        if b"\n" in part:
            *whole, rest = bytes(kept).split(b"\n")
            kept = bytearray(rest)
            for line in whole:
                if line.strip():
                    yield line
        if len(kept) > _MAX_LINE_BYTES:
            raise EngineError(f"an object in a watch is over {_MAX_LINE_BYTES:,} bytes")
    if kept.strip():
        raise EngineError("a watch ended in the middle of an object")


async def _start_of(body: AsyncIterator[bytes]) -> bytes:
    """As much of a refusal as says why."""
    found = b""
    async with asyncio.timeout(_REQUEST_TIMEOUT_S):
        async for part in body:
            found += part
            if len(found) > _MAX_ANSWER_BYTES:
                break
    return found


def _change(event: Object, version: str) -> tuple[str, Change | None]:
    kind, changed = event.get("type"), event.get("object")
    if not isinstance(changed, dict):
        raise EngineError("a watch sends something that is no change of an object")
    if kind == "ERROR":
        if changed.get("code") == _GONE:
            raise _Forgotten
        raise EngineError(f"the watch ends: {_words(changed)}")
    version = text_at(changed, "metadata", "resourceVersion") or version
    if kind in ("ADDED", "MODIFIED", "DELETED"):
        return version, Change(kind, (changed,))
    return version, None  # a bookmark, or a kind that isn't known here


def _parsed(data: bytes) -> Object:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the API server's answer is no JSON: {str(error)[:_MAX_TEXT_CHARS]}") from None
    if not isinstance(found, dict):
        raise EngineError("the API server's answer is no object")
    return found


def _refusal(method: str, target: str, status: int, body: bytes) -> str:
    try:
        words = _words(_parsed(body))
    except EngineError:  # a proxy's page, say
        words = "it doesn't say why"
    path = target.partition("?")[0]
    return f"the API server answers {status} to {method} {path}: {words}"


def _words(status: Object) -> str:
    text = text_at(status, "message") or text_at(status, "reason") or "it doesn't say why"
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_TEXT_CHARS])


def at(value: Any, *path: str) -> Any:
    """What lies there in nested objects, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def text_at(value: Any, *path: str) -> str:
    """The text that lies there, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""
