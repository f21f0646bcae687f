"""A thread of the rank that answers the agent while the script runs, or hangs.

It is started late (with the first process group or step): scripts that fork before that find a process with
one thread. That it answers at all is evidence: the process runs, and nobody holds the GIL.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from closeranks.errors import UsageError
from closeranks.faults import parse_spec
from closeranks.worker.hooks_state import STATE, THREAD_NAME, ControlLine, name_thread

__all__ = ["flight_recorder", "group_statuses", "start_evidence_thread"]

_MAX_GROUPS = 256
_MAX_MODULES = 2048


def start_evidence_thread(control: ControlLine) -> threading.Thread:
    """A daemon thread that serves ``control`` until the agent closes it."""
    thread = threading.Thread(target=_serve, args=(control,), name=THREAD_NAME, daemon=True)
    thread.start()
    return thread


def _serve(control: ControlLine) -> None:
    name_thread()
    while True:
        request = control.receive()
        if request is None:
            return
        reply = _answer(request)
        if reply is not None:
            if "id" in request:
                reply.setdefault("id", request["id"])
            control.send(reply)


def _answer(request: dict[str, Any]) -> dict[str, Any] | None:
    kind = request.get("type")
    if kind == "ping":
        return {"type": "pong", "mono_ns": time.monotonic_ns()}
    if kind == "flight_recorder":
        path = request.get("path")
        return {"type": "flight_recorder", **flight_recorder(path if isinstance(path, str) else None)}
    if kind == "fault":
        return _arm(request)
    if kind == "hold":
        hold_s = request.get("hold_s")
        if isinstance(hold_s, int | float) and STATE.active:
            STATE.hold(float(hold_s))
        return None
    if kind == "modules":
        names = sorted(name for name in tuple(sys.modules) if name.partition(".")[0] == "torch")
        return {"type": "modules", "names": names[:_MAX_MODULES]}
    return {"type": "unknown_request", "request": str(kind)[:100]}


def _arm(request: dict[str, Any]) -> dict[str, Any] | None:
    number, text = request.get("id"), request.get("spec")
    if not isinstance(number, int) or not isinstance(text, str) or STATE.faults is None:
        return {"type": "fault_refused", "why": "no fault to read in the request"}
    try:
        STATE.faults.arm(number, parse_spec(text))
        STATE.injector = STATE.faults
    except (UsageError, ValueError) as error:
        return {"type": "fault_refused", "why": str(error)[:500]}
    return None


# --- flight recorder --------------------------------------------------------------------------------


def _dumpers() -> list[Callable[..., bytes]]:
    """torch's recorders: NCCL's first, where this torch has it."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return [getattr(c10d, name) for name in names if c10d is not None and hasattr(c10d, name)]


def flight_recorder(path: str | None) -> dict[str, Any]:
    """Dump torch's flight recorder without stacks (milliseconds) to ``path``, if given, whole or not at all.

    Returns what of it matters at once, as ``{"groups": [...]}``, with an ``error`` where something failed.
    """
    best: dict[str, Any] = {}
    raw = b""
    error = ""
    for dump in _dumpers():
        try:
            text = dump(includeCollectives=True, onlyActive=False)
            trace = json.loads(text)
        except (RuntimeError, TypeError, ValueError) as failed:
            error = f"torch's flight recorder can't be read: {failed}"
            continue
        if isinstance(trace, dict) and len(trace.get("entries") or ()) >= len(best.get("entries") or ()):
            best, raw = trace, text if isinstance(text, bytes) else str(text).encode()
    reply: dict[str, Any] = {"groups": group_statuses(best)}
    if path is not None and raw:
        try:
            _write_whole(Path(path), raw)
            reply["path"] = path
        except OSError as failed:
            error = f"can't write {path}: {failed.strerror}"
    if error:
        reply["error"] = error[:500]
    return reply


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def group_statuses(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Each group's newest issued and newest completed collective, from a flight-recorder dump.

    Taken from the entries: ``collective_seq_id`` is the same on all ranks, which gloo's own counters
    (``pg_status``) are not, as they count calls between two ranks as well. They serve where the ring
    of entries holds nothing of a group.
    """
    groups: dict[str, dict[str, Any]] = {}
    with_entries: set[str] = set()
    for entry in trace.get("entries") or ():
        try:
            number, name = str(entry.get("pg_id")), str(entry["process_group"][0])
            seq, retired = int(entry["collective_seq_id"]), bool(entry["retired"])
            op = str(entry.get("profiling_name", ""))
            if entry.get("is_p2p"):
                continue
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            continue
        with_entries.add(number)
        group = groups.setdefault(
            name, {"group": name, "last_enqueued": 0, "last_completed": 0, "pending_op": ""}
        )
        group["last_enqueued"] = max(group["last_enqueued"], seq)
        if retired and not group["pending_op"]:
            group["last_completed"] = max(group["last_completed"], seq)
        elif not retired and not group["pending_op"]:
            group["pending_op"] = op.rpartition(":")[2][:100]
    status = trace.get("pg_status")
    for number, counters in status.items() if isinstance(status, dict) else ():
        if number in with_entries:
            continue
        try:
            groups[f"pg {number}"] = {
                "group": f"pg {number}",
                "last_enqueued": int(counters["last_enqueued_collective"]),
                "last_completed": int(counters["last_completed_collective"]),
                "pending_op": "",
            }
        except (KeyError, TypeError, ValueError):
            continue
    return list(groups.values())[:_MAX_GROUPS]
