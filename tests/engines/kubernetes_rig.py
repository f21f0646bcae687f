"""A stand-in for the API server of Kubernetes: real HTTP/1.1 over real TLS, real lists, watches and back
talk.

It keeps pods and nodes with versions, streams what changes, forgets old versions, wants a token, and does
on the next request whatever a test tells it to. It is no proof of what a real API server does.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN = "header.payload.signature"
Misbehaviour = Callable[["Handler"], None]


def pod(
    name: str,
    node: str = "",
    *,
    phase: str = "Running",
    exit_code: int | None = None,
    reason: str = "Error",
    deleting: bool = False,
    condition: str = "",
    role: str = "agent",
    job: str = "llama-7b",
) -> dict[str, Any]:
    """A pod of the job as kubelet and the Job controller leave it."""
    state: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code, "reason": reason}}
    found: dict[str, Any] = {
        "kind": "Pod",
        "metadata": {
            "name": name, "uid": f"uid-{name}", "labels": {"closeranks/job": job, "closeranks/role": role},
        },
        "spec": {"restartPolicy": "Never", "containers": [{"name": "node"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]},
    }  # fmt: skip
    if node:
        found["spec"]["nodeName"] = node
    if phase == "Pending":
        del found["status"]["containerStatuses"]
    if deleting:
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        found["metadata"]["deletionGracePeriodSeconds"] = 120
    if condition:
        found["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": condition}]
    return found


def node(
    name: str, *, ready: str = "True", cordoned: bool = False, taints: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A node object."""
    spec: dict[str, Any] = {"unschedulable": True} if cordoned else {}
    if taints:
        spec["taints"] = [{"key": key, "effect": "NoSchedule"} for key in taints]
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": "NodeStatusUnknown"}]}
    return {"kind": "Node", "metadata": {"name": name}, "spec": spec, "status": status}


class FakeApi:
    """Its state, and what tests do with it. ``misbehave`` is used up one a request."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 100
        self.forgotten = 0
        self.objects: dict[str, dict[str, dict[str, Any]]] = {"pods": {}, "nodes": {}}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.misbehave: deque[Misbehaviour] = deque()
        self.token = TOKEN
        self.page = 3
        self.watchers = 0
        self.closing = False

    def put(self, *objects: dict[str, Any]) -> None:
        """Add or change objects, as seen by whoever watches."""
        with self.changed:
            for each in objects:
                kind, name = f"{each['kind'].lower()}s", each["metadata"]["name"]
                what = "MODIFIED" if name in self.objects[kind] else "ADDED"
                self.version += 1
                each = json.loads(json.dumps(each))
                each["metadata"]["resourceVersion"] = str(self.version)
                self.objects[kind][name] = each
                self.history.append((self.version, kind, what, each))
            self.changed.notify_all()

    def remove(self, kind: str, name: str, *, last: dict[str, Any] | None = None) -> None:
        with self.changed:
            self.version += 1
            gone = self.objects[kind].pop(name)
            gone = json.loads(json.dumps(last or gone))
            gone["metadata"]["resourceVersion"] = str(self.version)
            self.history.append((self.version, kind, "DELETED", gone))
            self.changed.notify_all()

    def forget(self) -> None:
        """Drop all that has happened so far, as etcd's compaction does."""
        with self.changed:
            self.forgotten = self.version
            self.history.clear()

    def wait_for_watchers(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.watchers >= count, timeout=20), "nobody watches"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    api: FakeApi

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._enter():
            return
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        kind = url.path.rpartition("/")[2]
        if kind not in self.api.objects:
            self.refuse(404, "no such path")
        elif "watch" in query:
            self._watch(kind, query)
        else:
            self._list(kind, query)

    def do_DELETE(self) -> None:
        if not self._enter():
            return
        name = urlsplit(self.path).path.rpartition("/")[2]
        found = self.api.objects["pods"].get(name)
        if found is None:
            self.refuse(404, f'pods "{name}" not found')
        elif found["metadata"]["uid"] != self.api.bodies[-1]["preconditions"]["uid"]:
            self.refuse(409, "the UID in the precondition does not match")
        else:
            found = json.loads(json.dumps(found))
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.api.put(found)
            self.answer(200, found)

    def do_PATCH(self) -> None:
        if not self._enter():
            return
        found = self.api.objects["nodes"].get(urlsplit(self.path).path.rpartition("/")[2])
        if found is None:
            self.refuse(404, "no such node")
            return
        found = json.loads(json.dumps(found))
        patch = self.api.bodies[-1]
        found["spec"].update(patch["spec"])
        found["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        self.api.put(found)
        self.answer(200, found)

    def _enter(self) -> bool:
        self.api.requests.append(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length", "0"))
        if length:
            self.api.bodies.append(json.loads(self.rfile.read(length)))
        self.close_connection = True
        if self.api.misbehave:
            self.api.misbehave.popleft()(self)
            return False
        if self.headers.get("Authorization") != f"Bearer {self.api.token}":
            self.refuse(401, "Unauthorized")
            return False
        return True

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.answer(status, {"kind": "Status", "status": "Failure", "code": status, "message": message})

    def _list(self, kind: str, query: dict[str, str]) -> None:
        with self.api.changed:
            found = [each for each in self.api.objects[kind].values() if selected(each, query)]
            start = int(query.get("continue", "0"))
            more = {"continue": str(start + self.api.page)} if start + self.api.page < len(found) else {}
            page = found[start : start + self.api.page]
            metadata = {"resourceVersion": str(self.api.version), **more}
        self.answer(200, {"kind": "List", "metadata": metadata, "items": page})

    def _watch(self, kind: str, query: dict[str, str]) -> None:
        seen, end_s = int(query["resourceVersion"]), time.monotonic() + int(query["timeoutSeconds"])
        if seen < self.api.forgotten:
            self.refuse(410, "too old resource version")
            return
        self.begin_chunks()
        with self.api.changed:
            self.api.watchers += 1
            self.api.changed.notify_all()
        try:
            while time.monotonic() < end_s and not self.api.closing:
                with self.api.changed:
                    self.api.changed.wait(0.05)
                    news = [each for each in self.api.history if each[0] > seen and each[1] == kind]
                    if self.api.misbehave:
                        self.api.misbehave.popleft()(self)
                        return
                for version, _, what, each in news:
                    seen = version
                    if selected(each, query):
                        self.chunk(json.dumps({"type": what, "object": each}).encode() + b"\n")
            self.wfile.write(b"0\r\n\r\n")
        finally:
            with self.api.changed:
                self.api.watchers -= 1

    def begin_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def selected(each: dict[str, Any], query: dict[str, str]) -> bool:
    labels = each["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(key) == value for key, value in wanted)


# --- the server, and how to reach it ----------------------------------------------------------------


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in mid-answer is what is being tested."""


def authority(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.now(UTC)
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "ca.crt").write_bytes(pem)
    (directory / "server.pem").write_bytes(key_pem + pem)
    return directory / "ca.crt", directory / "server.pem"


@contextmanager
def served(directory: Path) -> Iterator[tuple[FakeApi, dict[str, str]]]:
    """A running server; its files are in ``directory``, as kubelet would put them there. Gives the
    environment."""
    _, server_pem = authority(directory)
    (directory / "token").write_text(TOKEN)
    (directory / "namespace").write_text("research")
    api = FakeApi()
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"api": api}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_address[1])}
    try:
        yield api, env
    finally:
        api.closing = True
        server.shutdown()
        server.server_close()
        thread.join()
