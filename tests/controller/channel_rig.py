"""A channel's server in a process of its own, and an authority that signs what a job's never would.

The process says where it listens, in one JSON line, and then answers: ``hello`` with ``welcome``,
``heartbeat`` with ``heartbeat_ack``, and events by which a test asks how it is (``stats``), has it send more
than is read (``flood``), or read nothing for a while (``sleep``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from closeranks.config import ChannelConfig
from closeranks.controller.channel import ChannelServer
from closeranks.controller.connect import Connected, ConnectOutcome, connect
from closeranks.controller.credentials import AGENT, CONTROLLER, Credentials, identity, load, parse_bundle
from closeranks.controller.peer import Peer

JOB = "20261201-042655-train-a1b2"
HELLO = {
    "type": "hello",
    "job": JOB,
    "node": "node-1",
    "session": "s1",
    "slots": 8,
    "address": "10.0.0.1",
    "version": "0.1.0",
    "boot": "b",
}
QUICK = ChannelConfig(handshake_timeout_s=1.0, handshake_grace_s=0.2, idle_timeout_s=2.0, close_timeout_s=0.5)
FEW = ChannelConfig(max_connections=3)


# --- credentials that can't be minted ---------------------------------------------------------------


class Authority:
    """As ``mint`` makes it, but its key is kept."""

    def __init__(self, *, until_s: float = 3600.0) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        from closeranks.controller import credentials

        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = credentials._authority(self.key, until_s, datetime.now(UTC))

    def bundle(
        self,
        role: str,
        *,
        names: list[str] | None = None,
        purpose: str | None = None,
        from_s: float = -600.0,
        until_s: float = 3600.0,
        self_signed: bool = False,
    ) -> str:
        """A bundle for ``role``, with what is named changed."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        signer = key if self_signed else self.key
        uses = {CONTROLLER: ExtendedKeyUsageOID.SERVER_AUTH, AGENT: ExtendedKeyUsageOID.CLIENT_AUTH}
        uris = [identity(JOB, role)] if names is None else names
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if self_signed else self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(seconds=from_s))
            .not_valid_after(now + timedelta(seconds=until_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([uses[purpose or role]]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
        )
        if uris:
            alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            builder = builder.add_extension(alternative, critical=False)
        pem = serialization.Encoding.PEM
        key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return (
            f"closeranks-job: {JOB}\ncloseranks-role: {role}\n"
            + builder.sign(signer, hashes.SHA256()).public_bytes(pem).decode()
            + key_pem.decode()
            + self.certificate.public_bytes(pem).decode()
        )

    def credentials(self, role: str, **changes: Any) -> Credentials:
        return parse_bundle(self.bundle(role, **changes))


# --- the server -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remote:
    """A server in another process, as a test sees it."""

    process: subprocess.Popen[str]
    address: str
    port: int
    stderr_file: Path

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(errors="replace")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(
    folder: Path, bundle: str | None, address: str = "127.0.0.1", port: int = 0, config: str = "QUICK"
) -> Iterator[Remote]:
    """A server at ``address``; ``config``: a name of this module. It is killed in the end."""
    secret = folder / "server.pem"
    if bundle is not None:
        secret.unlink(missing_ok=True)
        secret.touch(0o600)
        secret.write_text(bundle)
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "default",
                __file__,
                address,
                str(port),
                str(secret) if bundle else "",
                config,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, errors.read_text()
        where = json.loads(line)
        yield Remote(process, where["address"], where["port"], errors)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


async def attach(remote: Remote, credentials: Credentials | None, **options: Any) -> Peer:
    """A good agent's attachment, up to its welcome."""
    found: Connected = await connect(remote.address, remote.port, credentials, **options)
    assert found.outcome is ConnectOutcome.OK, found.detail
    assert found.peer is not None
    assert found.peer.send(HELLO)
    assert await found.peer.receive() == {"type": "welcome", "lease_s": 10.0, "beat_s": 1.0, "grace_s": 30.0}
    return found.peer


def stats(remote: Remote, credentials: Credentials | None) -> dict[str, Any]:
    """What the server tells a good agent about itself; ``took_s``: how long that agent waited, in all."""

    async def ask() -> dict[str, Any]:
        began_s = time.monotonic()
        peer = await attach(remote, credentials)
        peer.send({"type": "event", "kind": "stats", "data": {}})
        answer = await peer.receive()
        assert answer is not None, peer.closed_because
        took_s = time.monotonic() - began_s
        peer.close()
        await peer.wait_closed()
        return {**answer["data"], "took_s": took_s}

    return asyncio.run(ask())


class _Served:
    """What the process does with those let in."""

    def __init__(self) -> None:
        self.server: ChannelServer | None = None
        self.hellos = 0
        self.ended: Counter[str] = Counter()
        self.last_ended = ""

    async def __call__(self, peer: Peer) -> None:
        while (message := await peer.receive()) is not None:
            if message["type"] == "hello":
                self.hellos += 1
                peer.send({"type": "welcome", "lease_s": 10.0, "beat_s": 1.0, "grace_s": 30.0})
            elif message["type"] == "heartbeat":
                peer.send({"type": "heartbeat_ack", "seq": message["seq"]})
            elif message["type"] == "event":
                await self.carry_out(peer, message["kind"], message["data"])
        self.ended[peer.closed_because] += 1
        self.last_ended = peer.closed_because

    async def carry_out(self, peer: Peer, kind: str, data: dict[str, Any]) -> None:
        assert self.server is not None
        if kind == "flood":
            text = "x" * data["size_bytes"]
            for _ in range(data["count"]):
                if not peer.send({"type": "goodbye", "reason": text}):
                    return
        elif kind == "sleep":
            await asyncio.sleep(data["time_s"])
        else:
            told = {
                "hellos": self.hellos,
                "peers": len(self.server.peers),
                "ended": dict(self.ended),
                "last_ended": self.last_ended,
                "turned_away": dict(self.server.turned_away),
                "last_turned_away": self.server.last_turned_away,
            }
            peer.send({"type": "event", "kind": "stats", "data": told})


async def _main(address: str, port: int, secret: str, config: ChannelConfig) -> None:
    served = _Served()
    credentials = load(Path(secret)) if secret else None
    async with ChannelServer(address, port, credentials, served, config) as server:
        served.server = server
        where = {"address": address, "port": server.port}
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3], globals()[sys.argv[4]]))
