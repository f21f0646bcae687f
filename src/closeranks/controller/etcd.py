"""A small client of etcd v3: leases, transactions and ranges through its JSON gateway (POST /v3/...).

Every call is bounded in time and size, and tries the endpoints in turn, the one that answered last first.
A call that fails may have been carried out all the same: who writes has to compare, and to be able to repeat.
Keys and values are bytes, which the gateway wants as base64; its 64-bit numbers are text.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.config import EtcdConfig
from closeranks.controller.etcd_http import HttpLine, parse_endpoint
from closeranks.errors import ConfigError, EtcdError

__all__ = [
    "MAX_OPS",
    "Etcd",
    "KeyValue",
    "TxnResult",
    "created_at",
    "delete",
    "get",
    "modified_at",
    "prefix_end",
    "put",
]

MAX_OPS = 120  # of one transaction; etcd takes 128 unless told otherwise
_MAX_ANSWER_BYTES = 32 << 20
_MAX_SECRET_BYTES = 4096
_MAX_WORDS = 200  # of an error that etcd reports
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_UNAUTHENTICATED = 16  # gRPC's code; with an old token etcd says so

Op = Mapping[str, Any]
Compare = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it was read. ``lease`` 0: none."""

    key: bytes
    value: bytes
    created_revision: int
    modified_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class TxnResult:
    """``revision``: etcd's when it was carried out. ``found``: what each ``get`` of it found, in order."""

    succeeded: bool
    revision: int
    found: tuple[tuple[KeyValue, ...], ...]


# --- what transactions are made of ------------------------------------------------------------------


def created_at(key: bytes, revision: int) -> Compare:
    """That ``key`` was made at ``revision``; 0: it doesn't exist."""
    return {"key": _b64(key), "target": "CREATE", "create_revision": str(revision)}


def modified_at(key: bytes, revision: int) -> Compare:
    """That ``key`` was last written at ``revision``; 0: it doesn't exist."""
    return {"key": _b64(key), "target": "MOD", "mod_revision": str(revision)}


def put(key: bytes, value: bytes, lease: int = 0) -> Op:
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def get(key: bytes) -> Op:
    return {"request_range": {"key": _b64(key)}}


def delete(key: bytes, *, prefix: bool = False) -> Op:
    end = {"range_end": _b64(prefix_end(key))} if prefix else {}
    return {"request_delete_range": {"key": _b64(key), **end}}


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with ``prefix``, which is no run of 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


# --- the client -------------------------------------------------------------------------------------


class Etcd:
    """One call at a time; others wait. Raises ConfigError for files or URLs that can't be used."""

    def __init__(self, config: EtcdConfig, *, max_answer_bytes: int = _MAX_ANSWER_BYTES) -> None:
        try:
            endpoints = [parse_endpoint(url) for url in config.urls]
        except ValueError as error:
            raise ConfigError(f"etcd at {', '.join(config.urls)[:200]}: {error}") from None
        context = _context(config) if any(endpoint.tls for endpoint in endpoints) else None
        self._lines = [HttpLine(endpoint, context, max_answer_bytes) for endpoint in endpoints]
        self._user_file = Path(config.user) if config.user else None
        self._token = ""
        self._lock = asyncio.Lock()

    def close(self) -> None:
        for line in self._lines:
            line.close()

    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, float]:
        """A new lease: its id, and how long it lasts, which may be longer than asked for."""
        answer = await self._call("/v3/lease/grant", {"TTL": str(ttl_s)}, timeout_s)
        return _number(answer, "ID"), float(_number(answer, "TTL"))

    async def keep_alive(self, lease: int, timeout_s: float) -> float:
        """Renew it; how long it lasts from now, 0: it is over."""
        answer = await self._call("/v3/lease/keepalive", {"ID": str(lease)}, timeout_s)
        result = answer.get("result")
        if not isinstance(result, Mapping) or _number(result, "ID") != lease:
            raise EtcdError("etcd's answer to a keepalive makes no sense")
        return float(max(0, _number(result, "TTL")))

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End it, and with it all keys that hang on it."""
        await self._call("/v3/lease/revoke", {"ID": str(lease)}, timeout_s)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op], timeout_s: float
    ) -> TxnResult:
        """Carry out ``then`` if all ``compares`` hold, else ``otherwise``; all of it or nothing."""
        body = {"compare": compares, "success": then, "failure": otherwise}
        answer = await self._call("/v3/kv/txn", body, timeout_s)
        succeeded = answer.get("succeeded", False)
        if not isinstance(succeeded, bool):
            raise EtcdError("etcd's answer to a transaction makes no sense")
        asked = [op for op in (then if succeeded else otherwise) if "request_range" in op]
        parts = [part for part in _list(answer, "responses") if "response_range" in part]
        if len(parts) != len(asked):
            raise EtcdError("etcd's answer to a transaction lacks what was asked for")
        found = tuple(_key_values(_mapping(part, "response_range")) for part in parts)
        return TxnResult(succeeded, _number(_mapping(answer, "header"), "revision"), found)

    async def read_prefix(self, prefix: bytes, timeout_s: float, *, page: int = 500) -> list[KeyValue]:
        """All that begins with ``prefix``, as it was at one moment."""
        found: list[KeyValue] = []
        start, revision = prefix, 0
        while True:
            body = {
                "key": _b64(start), "range_end": _b64(prefix_end(prefix)), "limit": str(page),
                "revision": str(revision),
            }  # fmt: skip
            answer = await self._call("/v3/kv/range", body, timeout_s)
            rows = _key_values(answer)
            revision = revision or _number(_mapping(answer, "header"), "revision")
            if any(not row.key.startswith(prefix) or row.key < start for row in rows):
                raise EtcdError("etcd's answer to a range holds what nobody asked for")
            found += rows
            if not answer.get("more") or not rows:
                return found
            start = rows[-1].key + b"\0"

    # --- one call

    async def _call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer's JSON object. ``timeout_s`` is for all endpoints together. Raises EtcdError."""
        data = json.dumps(body, separators=(",", ":")).encode()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout(max(0.0, timeout_s)), self._lock:
                return await self._try_each(path, data, deadline_s)
        except TimeoutError:
            raise EtcdError(f"etcd did not answer within {max(0.0, timeout_s):.1f} s") from None

    async def _try_each(self, path: str, data: bytes, deadline_s: float) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        troubles: list[str] = []
        for index, line in enumerate(tuple(self._lines)):
            share_s = (deadline_s - loop.time()) / (len(self._lines) - index)
            try:
                answer = await self._ask(line, path, data, max(0.01, share_s - 0.01))
            except EtcdError as error:
                troubles.append(str(error))
                self._lines.remove(line)
                self._lines.append(line)  # the last to be tried next time
                continue
            return answer
        raise EtcdError("; ".join(troubles)[:1000])

    async def _ask(self, line: HttpLine, path: str, data: bytes, timeout_s: float) -> Mapping[str, Any]:
        if self._user_file is not None and not self._token:
            self._token = await self._authenticate(line, timeout_s)
        status, text = await line.post(path, data, self._token, timeout_s)
        answer = _parsed(line, status, text)
        code, problem = _problem(status, answer)
        if problem:
            if status == 401 or code == _UNAUTHENTICATED:
                self._token = ""  # it has expired: the next call gets a new one
            raise EtcdError(f"{line.endpoint}: {problem}")
        return answer

    async def _authenticate(self, line: HttpLine, timeout_s: float) -> str:
        assert self._user_file is not None, "nobody to authenticate"
        name, _, password = _secret(self._user_file).partition(":")
        data = json.dumps({"name": name, "password": password}).encode()
        status, text = await line.post("/v3/auth/authenticate", data, "", timeout_s)
        answer = _parsed(line, status, text)
        _, problem = _problem(status, answer)
        token = answer.get("token")
        if problem or not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise EtcdError(f"{line.endpoint} doesn't let us in as {name!r}: {problem or 'it gave no token'}")
        return token[:8192]


def _context(config: EtcdConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        files = ", ".join(name for name in (config.ca, config.cert, config.key) if name)
        raise ConfigError(
            f"the certificates for etcd can't be used ({files or 'of the system'}): {error}"
        ) from error
    return context


def _no_password() -> str:
    """Without this, ssl would ask for one on the terminal."""
    return ""


def _secret(path: Path) -> str:
    """Raises ConfigError unless the file holds NAME:PASSWORD."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES + 1).decode().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}; --etcd-user names it"
        ) from error
    if ":" not in text or len(text) > _MAX_SECRET_BYTES or "\n" in text:
        raise ConfigError(f"{path} doesn't hold one line NAME:PASSWORD for etcd")
    return text


# --- what it says -----------------------------------------------------------------------------------


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parsed(line: HttpLine, status: int, text: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        said = ascii(text[:60].decode("latin-1"))
        raise EtcdError(f"{line.endpoint} answered {status} with {said}, which isn't etcd's JSON")
    return answer


def _problem(status: int, answer: Mapping[str, Any]) -> tuple[object, str]:
    """gRPC's code and words, "" where there is none."""
    error = answer.get("error")
    if error is None and status == 200:
        return 0, ""
    inner = error if isinstance(error, Mapping) else answer
    words = inner.get("message") or error or f"HTTP status {status}"
    return inner.get("code") or inner.get("grpc_code"), ascii(str(words)[:_MAX_WORDS])[1:-1]


def _number(answer: Mapping[str, Any], name: str) -> int:
    """A 64-bit number; protobuf leaves out what is 0."""
    value = answer.get(name, 0)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise EtcdError(f"etcd's answer makes no sense: its {name} is no number")
    return value


def _mapping(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = answer.get(name, {})
    if not isinstance(value, Mapping):
        raise EtcdError(f"etcd's answer makes no sense: its {name} is no object")
    return value


def _list(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = answer.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise EtcdError(f"etcd's answer makes no sense: its {name} is no list of objects")
    return value


def _bytes(answer: Mapping[str, Any], name: str) -> bytes:
    value = answer.get(name, "")
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise EtcdError(f"etcd's answer makes no sense: its {name} is no base64") from None


def _key_values(answer: Mapping[str, Any]) -> tuple[KeyValue, ...]:
    return tuple(
        KeyValue(
            _bytes(row, "key"),
            _bytes(row, "value"),
            _number(row, "create_revision"),
            _number(row, "mod_revision"),
            _number(row, "lease"),
        )
        for row in _list(answer, "kvs")
    )
