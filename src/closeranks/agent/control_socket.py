"""How other commands of the same user talk to a running job: a Unix socket, one JSON line each way.

The peer's user id comes from the kernel (SO_PEERCRED), not from the peer. The socket lies in the job's
private directory, as a Unix socket's path may have 107 bytes; the run directory says where that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

from closeranks.wire import user_of

__all__ = ["CONTROL_FILE", "ControlOwner", "ControlSocket"]

CONTROL_FILE = "control.json"
_MAX_LINE_BYTES = 65536
_REQUEST_TIMEOUT_S = 5.0


class ControlOwner(Protocol):
    """Whom the requests are for."""

    def notice(self, text: str) -> None: ...

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


class ControlSocket:
    """``async with``: open while the job runs."""

    def __init__(self, run_dir: Path, private_dir: Path, owner: ControlOwner) -> None:
        self._file = run_dir / CONTROL_FILE
        self._path = private_dir / "control"
        self._owner = owner
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ControlSocket:
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=_MAX_LINE_BYTES)
            self._path.chmod(0o600)
            self._file.write_text(json.dumps({"socket": str(self._path), "pid": os.getpid()}))
        except OSError as error:  # too long a path, a file system without sockets, a full disk
            why = error.strerror or str(error)
            self._owner.notice(f"closeranks inject can't reach this run ({self._path}: {why})")
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._file.read_text()).get("pid") == os.getpid():  # else it's another controller's
                self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), _REQUEST_TIMEOUT_S)
            reply = await self._answer(writer, line)
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, OSError):
            pass  # a peer that sends too much, too slowly, or leaves: nothing is owed to it
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, line: bytes) -> dict[str, Any]:
        if user_of(writer.get_extra_info("socket")) not in (os.getuid(), 0):
            return {"ok": False, "error": "this job belongs to another user"}
        try:
            request = json.loads(line)
            request["type"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return {"ok": False, "error": "not a request"}
        return await self._owner.answer(request)
