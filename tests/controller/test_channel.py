"""The channel between real processes, and everybody who must get nothing from it and cost it nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks.controller import connect as connect_module
from closeranks.controller.channel import ChannelServer
from closeranks.controller.connect import ConnectOutcome, connect
from closeranks.controller.credentials import AGENT, CONTROLLER, Credentials, bundle, identity, load, mint
from closeranks.controller.peer import GREETING, Peer
from closeranks.controller.tls import client_context, server_context
from closeranks.errors import ConfigError, ProtocolError
from closeranks.frames import encode, frame

from .channel_rig import HELLO, JOB, QUICK, Authority, Remote, attach, serving, stats

SOON_S = 10.0
ROOM_BYTES = 24 << 20  # what an allocator may keep of a server's busiest moment
READY = {"type": "ready"}
WELCOME = {"type": "welcome", "lease_s": 10.0, "beat_s": 1.0, "grace_s": 30.0}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def agent(authority: Authority) -> Credentials:
    return authority.credentials(AGENT)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def remote(authority: Authority, agent: Credentials, tmp_path: Path) -> Iterator[Remote]:
    """A server that, whatever a test does to it, serves on, says nothing, and keeps nothing."""
    with serving(tmp_path, authority.bundle(CONTROLLER)) as made:
        stats(made, agent)
        descriptors, resident_bytes = made.descriptors, made.resident_bytes
        yield made
        assert eventually(lambda: made.descriptors <= descriptors), (made.descriptors, descriptors)
        assert stats(made, agent)["took_s"] < 3.0
        assert made.process.poll() is None
        assert made.resident_bytes - resident_bytes < ROOM_BYTES
        assert made.stderr == ""


def call(remote: Remote, timeout_s: float = SOON_S) -> socket.socket:
    return socket.create_connection((remote.address, remote.port), timeout_s)


def call_tls(remote: Remote, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Raises OSError when the server won't have us before TLS is up."""
    sock = call(remote)
    try:
        return context.wrap_socket(sock)
    except OSError:
        sock.close()
        raise


def everything(sock: socket.socket) -> bytes:
    """All that comes before the end, whichever way it ends. A timeout is no end."""
    received = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := sock.recv(65536):
            received += data
    return received


def let_in(remote: Remote, agent: Credentials) -> ssl.SSLSocket:
    """An agent that is welcome, as a blocking socket that can then misbehave."""
    sock = call_tls(remote, client_context(agent))
    sock.sendall(encode(HELLO))
    wanted = frame(GREETING) + encode(WELCOME)
    received = b""
    while len(received) < len(wanted):
        received += sock.recv(len(wanted) - len(received))
    assert received == wanted
    return sock


# --- those who belong here --------------------------------------------------------------------------


def test_agents_and_controller_talk(remote: Remote, agent: Credentials) -> None:
    async def main() -> None:
        peers = [await attach(remote, agent) for _ in range(20)]
        for seq in range(10):
            for peer in peers:
                assert peer.send(
                    {
                        "type": "heartbeat",
                        "seq": seq,
                        "mono_ns": 0,
                        "ranks": [[0, seq, 1, "train", False]] * 8,
                    }
                )
            for peer in peers:
                assert await peer.receive() == {"type": "heartbeat_ack", "seq": seq}
        for peer in peers:
            peer.close()
        await asyncio.gather(*(peer.wait_closed() for peer in peers))

    asyncio.run(main())
    assert stats(remote, agent)["turned_away"] == {}


def test_minted_credentials_are_those_that_work(tmp_path: Path) -> None:
    mint(JOB, tmp_path / "credentials")
    with serving(tmp_path, bundle(tmp_path / "credentials", CONTROLLER)) as made:
        assert stats(made, load(tmp_path / "credentials" / "agent.pem"))["hellos"] == 1
        mint(JOB, tmp_path / "again")
        assert outcome(made, load(tmp_path / "again" / "agent.pem")) is ConnectOutcome.UNTRUSTED


def test_what_was_sent_before_closing_arrives(remote: Remote, agent: Credentials) -> None:
    """Also while the other end is still talking: closing then would be a reset, and lose it."""

    async def on_peer(peer: Peer) -> None:
        for _ in range(500):
            peer.send({"type": "goodbye", "reason": "x" * 1000})

    async def main(authority_of: Authority) -> int:
        controller = authority_of.credentials(CONTROLLER)
        async with ChannelServer("127.0.0.1", 0, controller, on_peer) as server:
            found = await connect("127.0.0.1", server.port, authority_of.credentials(AGENT))
            assert found.peer is not None
            for _ in range(100):
                found.peer.send({"type": "goodbye", "reason": "y" * 1000})
            count = 0
            while await found.peer.receive() is not None:
                count += 1
            assert found.peer.closed_because == "closed by the other end"
            return count

    assert asyncio.run(main(Authority())) == 500


def test_one_machine_needs_no_certificates(tmp_path: Path) -> None:
    for address in ("127.0.0.1", "::1"):
        if address == "::1" and not socket.has_dualstack_ipv6():
            continue
        with serving(tmp_path, None, address) as made:
            assert stats(made, None)["hellos"] == 1
            assert made.stderr == ""


def test_a_unix_socket_serves_its_own_user(tmp_path: Path) -> None:
    path = tmp_path / "channel"
    with serving(tmp_path, None, str(path)) as made:
        assert path.stat().st_mode & 0o777 == 0o600
        assert stats(made, None)["hellos"] == 1
        made.process.kill()
        made.process.wait()
        assert outcome(made, None) is ConnectOutcome.REFUSED
        absent = Remote(made.process, str(tmp_path / "absent"), 0, made.stderr_file)
        assert outcome(absent, None) is ConnectOutcome.REFUSED
    with serving(tmp_path, None, str(path)) as made:  # over the dead one's socket
        assert stats(made, None)["hellos"] == 1
        with pytest.raises(AssertionError, match="name another"), serving(tmp_path, None, str(path)):
            pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_unix_socket_gives_nothing_to_another_user() -> None:
    with tempfile.TemporaryDirectory() as name, serving(Path(name), None, f"{name}/channel") as made:
        Path(name).chmod(0o755)
        Path(f"{name}/channel").chmod(0o666)  # so that only the kernel's word is left
        code = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
            "sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])\n"
            "sock.sendall(bytes.fromhex(sys.argv[2]))\n"
            "sys.stdout.write(sock.makefile('rb').read().decode())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, f"{name}/channel", encode(HELLO).hex()],
            capture_output=True,
            text=True,
            timeout=SOON_S,
            check=False,
        )
        assert "welcome" not in done.stdout and "closeranks/1 refuses" in done.stdout
        told = stats(made, None)
        assert told["hellos"] == 1 and told["turned_away"] == {"UntrustedPeer": 1}
        assert "user 65534" in told["last_turned_away"]


# --- strangers --------------------------------------------------------------------------------------


def outcome(remote: Remote, credentials: Credentials | None, timeout_s: float = 5.0) -> ConnectOutcome:
    async def main() -> ConnectOutcome:
        found = await connect(remote.address, remote.port, credentials, timeout_s=timeout_s)
        assert (found.peer is not None) is (found.outcome is ConnectOutcome.OK)
        assert found.detail.isprintable()
        if found.peer is not None:
            found.peer.abort("enough")
            await found.peer.wait_closed()
        return found.outcome

    return asyncio.run(main())


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


STRANGERS: dict[str, Callable[[Authority], Credentials]] = {
    "signed by itself": lambda ours: ours.credentials(AGENT, self_signed=True),
    "another job's authority": lambda ours: with_ca_of(ours, Authority().credentials(AGENT)),
    "expired": lambda ours: ours.credentials(AGENT, from_s=-7200, until_s=-60),
    "not valid yet": lambda ours: ours.credentials(AGENT, from_s=3600, until_s=7200),
    "the controller's purpose": lambda ours: ours.credentials(AGENT, purpose=CONTROLLER),
    "the controller's name": lambda ours: ours.credentials(AGENT, names=[identity(JOB, CONTROLLER)]),
    "another job's name": lambda ours: ours.credentials(AGENT, names=[identity("job-2", AGENT)]),
    "two names": lambda ours: ours.credentials(
        AGENT, names=[identity(JOB, AGENT), identity(JOB, CONTROLLER)]
    ),
    "no name": lambda ours: ours.credentials(AGENT, names=[]),
}


def with_ca_of(ours: Authority, theirs: Credentials) -> Credentials:
    """Their certificate, trusting our authority: a stranger that isn't stopped by its own checks."""
    return Credentials(
        JOB, theirs.role, ours.credentials(AGENT).ca_pem, theirs.certificate_pem, theirs.key_pem
    )


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_told_nothing_and_knows_why(
    remote: Remote, authority: Authority, agent: Credentials, kind: str
) -> None:
    stranger = STRANGERS[kind](authority)
    assert outcome(remote, stranger) is ConnectOutcome.UNTRUSTED
    for _ in range(5):  # one that doesn't wait for a greeting
        with contextlib.suppress(OSError), call_tls(remote, client_context(stranger)) as sock:
            sock.sendall(encode(HELLO))
            assert b"welcome" not in everything(sock)
    told = stats(remote, agent)
    assert told["hellos"] == 2  # the fixture's and this one
    assert told["turned_away"] == {"UntrustedPeer": 6}


def test_a_stranger_without_a_certificate(remote: Remote, agent: Credentials) -> None:
    for _ in range(5):
        with contextlib.suppress(OSError), call_tls(remote, anonymous()) as sock:
            sock.sendall(encode(HELLO))
            assert everything(sock) == b""
    assert stats(remote, agent)["turned_away"] == {"UntrustedPeer": 5}


def test_older_tls_is_not_spoken(remote: Remote, agent: Credentials) -> None:
    context = client_context(agent)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="VERSION"):
        call_tls(remote, context)
    assert "unsupported protocol" in stats(remote, agent)["last_turned_away"]


NOISE = {
    "http": b"GET / HTTP/1.1\r\nHost: closeranks\r\n\r\n",
    "our own frames": encode(HELLO),
    "zeros": bytes(4096),
    "a length of 4 GiB": b"\xff\xff\xff\xff" + b"x" * 1000,
    "a TLS record of no kind": b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
    "nothing": b"",
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_gets_no_answer(remote: Remote, noise: str) -> None:
    for _ in range(3):
        with contextlib.suppress(ConnectionError), call(remote) as sock:
            sock.sendall(NOISE[noise])
            sock.shutdown(socket.SHUT_WR)
            assert len(everything(sock)) < 100  # an alert


@pytest.mark.parametrize("noise", NOISE)
def test_noise_on_a_plain_channel_gets_no_answer(tmp_path: Path, noise: str) -> None:
    if noise == "our own frames":
        return
    with serving(tmp_path, None) as made:
        stats(made, None)
        before = made.descriptors
        for _ in range(3):
            with contextlib.suppress(ConnectionError), call(made) as sock:
                sock.sendall(NOISE[noise])
                sock.shutdown(socket.SHUT_WR)
                assert everything(sock) in (b"", frame(GREETING))
        assert stats(made, None)["hellos"] == 2
        assert eventually(lambda: made.descriptors == before)
        assert made.stderr == ""


def test_a_recording_is_worth_nothing(remote: Remote, agent: Credentials) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def forward() -> None:
            left, _ = proxy.accept()
            with left, call(remote) as right:
                back = threading.Thread(target=lambda: copy(right, left, bytearray()))
                back.start()
                copy(left, right, recorded)
                back.join()

        thread = threading.Thread(target=forward)
        thread.start()
        through = Remote(remote.process, "127.0.0.1", proxy.getsockname()[1], remote.stderr_file)
        hellos = stats(through, agent)["hellos"]
        thread.join()
    assert len(recorded) > 500
    for _ in range(3):
        with contextlib.suppress(ConnectionError), call(remote) as sock:
            sock.sendall(recorded)
            everything(sock)
    told = stats(remote, agent)
    assert told["hellos"] == hellos + 1
    assert told["turned_away"] == {"UntrustedPeer": 3}


def test_who_has_hung_up_before_it_is_its_turn_costs_no_handshake(remote: Remote, agent: Credentials) -> None:
    with call(remote) as sock:
        sock.sendall(b"a hello that nobody waits for an answer to")
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    kinds = set(stats(remote, agent)["turned_away"])
    assert kinds <= {"hung up", "UntrustedPeer"}  # it may just have been accepted before it hung up


def copy(source: socket.socket, target: socket.socket, record: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            record += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_slow_handshake_ends(remote: Remote, agent: Credentials) -> None:
    """One byte now and then, of a handshake that is in order, doesn't buy more time."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = client_context(agent).wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    began_s = time.monotonic()
    with call(remote) as sock, contextlib.suppress(ConnectionError):
        for byte in outgoing.read():
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
    took_s = time.monotonic() - began_s
    assert took_s < QUICK.handshake_timeout_s + 1.0
    assert stats(remote, agent)["turned_away"] == {"no message within 1 s": 1}


def test_silence_after_the_handshake_ends(remote: Remote, agent: Credentials) -> None:
    with call_tls(remote, client_context(agent)) as sock:
        assert everything(sock) == frame(GREETING)
    assert stats(remote, agent)["turned_away"] == {"no message within 1 s": 1}


def test_idle_strangers_dont_keep_the_good_ones_out(remote: Remote, agent: Credentials) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(call(remote))
        told = stats(remote, agent)
        assert told["took_s"] < 4.0
        assert remote.descriptors < 64 + 30
        assert told["turned_away"].get("made room for others", 0) > 0


def test_strangers_that_were_turned_away_and_stay_have_no_more_than_their_places(remote: Remote) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            sock = stack.enter_context(call(remote))
            sock.sendall(NOISE["http"])
        most = 0
        for _ in range(50):
            most = max(most, remote.descriptors)
            time.sleep(0.01)
        assert 20 < most < 64 + 30


def test_a_session_is_not_resumed(remote: Remote, agent: Credentials) -> None:
    context = client_context(agent)
    with call_tls(remote, context) as sock:
        assert sock.recv(1000) == frame(GREETING)
        assert sock.session is not None and not sock.session.has_ticket


def test_a_herd_of_good_ones_all_get_in(remote: Remote, agent: Credentials) -> None:
    """More at once than the lobby holds, as when a controller comes back."""

    async def main() -> None:
        async def come() -> None:
            for _ in range(5):
                found = await connect(remote.address, remote.port, agent)
                if found.peer is not None:
                    found.peer.send(HELLO)
                    if await found.peer.receive() == WELCOME:
                        found.peer.abort("done")
                        return
                await asyncio.sleep(0.1)
            raise AssertionError(found)

        await asyncio.gather(*(come() for _ in range(150)))

    asyncio.run(main())


# --- those who are let in and misbehave -------------------------------------------------------------


def ended(remote: Remote, agent: Credentials, reason: str) -> bool:
    """Whether the server closed somebody for that reason."""
    return eventually(lambda: any(reason in why for why in stats(remote, agent)["ended"]))


def test_a_frame_that_is_too_large_ends_the_connection(remote: Remote, agent: Credentials) -> None:
    with let_in(remote, agent) as sock:
        sock.sendall((1 << 20).to_bytes(4, "big") + b" " * ((1 << 20) - 16) + b'{"type":"ready"}')
        sock.sendall(((1 << 20) + 1).to_bytes(4, "big"))
        assert everything(sock) == b""
    assert ended(remote, agent, "a frame of 1,048,577 bytes")


def test_a_first_frame_is_small(remote: Remote, agent: Credentials) -> None:
    with call_tls(remote, client_context(agent)) as sock:
        sock.sendall((1 << 17).to_bytes(4, "big"))
        assert everything(sock) in (frame(GREETING), b"")
    assert stats(remote, agent)["turned_away"] == {"ProtocolError": 1}


def test_a_truncated_frame_is_told(remote: Remote, agent: Credentials) -> None:
    with let_in(remote, agent) as sock:
        sock.sendall(encode(READY)[:-1])
    assert ended(remote, agent, "closed by the other end in the middle of a frame")


def test_a_frame_that_trickles_ends(remote: Remote, agent: Credentials) -> None:
    with let_in(remote, agent) as sock, contextlib.suppress(OSError):
        sock.sendall((1000).to_bytes(4, "big"))
        for _ in range(1000):
            sock.sendall(b" ")
            time.sleep(0.05)
        raise AssertionError("it was let go on")
    assert ended(remote, agent, "silent for 2.")


BAD_PAYLOADS = [
    b"{",
    b"[" * 1000,
    b'{"type":"hello"}',
    b'{"type":"no such type"}',
    b'{"type":"ack","n":NaN}',
    b'{"type":"ack","n":1e999}',
    b'{"type":"ack","n":' + b"9" * 4000 + b"}",
    b'{"type":"ack","n":18446744073709551616}',
    b'{"type":"event","kind":"\\u001b[31m","data":{}}',
    b'{"type":"event","kind":"\\ud800","data":{}}',
    b'{"type":"event","kind":"x","data":' + b'{"a":' * 100 + b"1" + b"}" * 101,
    b"\xff",
]


def test_a_bad_frame_costs_itself_and_too_many_the_connection(remote: Remote, agent: Credentials) -> None:
    heartbeat = encode({"type": "heartbeat", "seq": 7, "mono_ns": 0, "ranks": [], "from_a_newer_peer": {}})
    answer = encode({"type": "heartbeat_ack", "seq": 7})
    with let_in(remote, agent) as sock:
        for payload in BAD_PAYLOADS:
            sock.sendall(frame(payload) + heartbeat)
            assert sock.recv(1000) == answer, payload
        for _ in range(QUICK.max_bad_frames + 1 - len(BAD_PAYLOADS)):
            sock.sendall(frame(b"{}"))
        assert everything(sock) == b""
    assert ended(remote, agent, "17 bad frames; the last: a frame was not an object with a type")


def test_a_peer_that_never_reads_is_closed_and_others_are_served(remote: Remote, agent: Credentials) -> None:
    flood = {"type": "event", "kind": "flood", "data": {"count": 1000, "size_bytes": 500_000}}
    with let_in(remote, agent) as sock:
        sock.sendall(encode(flood))
        assert ended(remote, agent, "doesn't read: ")
        assert remote.resident_bytes < 150 << 20
        received = 0
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                received += len(data)
        assert received < 32 << 20  # of 500 MB


def test_a_peer_that_sends_more_than_is_taken_is_read_no_further(remote: Remote, agent: Credentials) -> None:
    sleep = {"type": "event", "kind": "sleep", "data": {"time_s": 3}}
    filler = encode({"type": "goodbye", "reason": "x" * 100_000})
    before = remote.resident_bytes
    with let_in(remote, agent) as sock:
        sock.sendall(encode(sleep))
        sock.settimeout(1.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 500 << 20:
                sock.sendall(filler)
                sent += len(filler)
        assert remote.resident_bytes - before < 16 << 20
        assert stats(remote, agent)["took_s"] < 1.0


@pytest.mark.parametrize("round_", range(3))
def test_random_bytes_from_inside(remote: Remote, agent: Credentials, round_: int) -> None:
    seed = int(os.environ.get("CLOSERANKS_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"CLOSERANKS_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(25):
        with contextlib.suppress(OSError), let_in(remote, agent) as sock:
            sock.settimeout(0.2)
            for _ in range(chance.randrange(1, 40)):
                sock.sendall(mutated(chance))
            sock.recv(65536)
    assert stats(remote, agent)["took_s"] < 2.0


def mutated(chance: random.Random) -> bytes:
    """A frame with some of it changed, left out or put in; or anything at all."""
    messages: list[dict[str, Any]] = [
        HELLO,
        READY,
        {
            "type": "heartbeat",
            "seq": 1,
            "mono_ns": 0,
            "generation": 0,
            "ranks": [[0, 1, 2, "train", True]] * 8,
        },
        {"type": "failed", "generation": 1, "durable": False, "evidence": {"a": [1, {}]}, "texts": {}},
        {"type": "event", "kind": "e", "data": {"log": "x" * chance.randrange(3000)}},
    ]
    payload = bytearray(encode(chance.choice(messages))[4:])
    for _ in range(chance.randrange(6)):
        at = chance.randrange(len(payload))
        payload[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    if chance.random() < 0.02:
        return chance.randbytes(chance.randrange(1, 100))
    return frame(bytes(payload) or b"x")


def test_the_number_of_connections_is_bounded(
    authority: Authority, agent: Credentials, tmp_path: Path
) -> None:
    with serving(tmp_path, authority.bundle(CONTROLLER), config="FEW") as made:
        first, second, third = (let_in(made, agent) for _ in range(3))
        assert outcome(made, agent) is ConnectOutcome.REFUSED
        third.close()
        assert eventually(lambda: outcome(made, agent) is ConnectOutcome.OK)
        first.close()
        second.close()
        assert made.stderr == ""


# --- what an agent learns from an attempt -----------------------------------------------------------


@pytest.mark.parametrize("change", ["role", "purpose", "authority", "expired", "job"])
def test_nobody_else_is_taken_for_the_controller(
    authority: Authority, agent: Credentials, tmp_path: Path, change: str
) -> None:
    bundles = {
        "role": lambda: authority.bundle(CONTROLLER, names=[identity(JOB, AGENT)]),
        "purpose": lambda: authority.bundle(CONTROLLER, names=[identity(JOB, AGENT)], purpose=AGENT),
        "authority": lambda: Authority().bundle(CONTROLLER),
        "expired": lambda: authority.bundle(CONTROLLER, from_s=-7200, until_s=-60),
        "job": lambda: authority.bundle(CONTROLLER, names=[identity("job-2", CONTROLLER)]),
    }
    with serving(tmp_path, bundles[change]()) as made:
        assert outcome(made, agent) is ConnectOutcome.UNTRUSTED
        assert made.stderr == ""


def test_an_agents_bundle_serves_nobody(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="not those of agent"):
        server_context(authority.credentials(AGENT))
    with pytest.raises(ConfigError, match="not those of controller"):
        client_context(authority.credentials(CONTROLLER))


def test_a_port_that_something_else_has_is_not_trusted(agent: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def serve() -> None:
            for _ in range(2):
                sock, _ = web.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1000):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()

        async def main() -> list[ConnectOutcome]:
            port = web.getsockname()[1]
            return [(await connect("127.0.0.1", port, who)).outcome for who in (agent, None)]

        assert asyncio.run(main()) == [ConnectOutcome.UNTRUSTED] * 2
        thread.join()


def test_a_dead_controller_a_stopped_one_and_silence_are_told_apart(
    authority: Authority, agent: Credentials, tmp_path: Path
) -> None:
    with serving(tmp_path, authority.bundle(CONTROLLER)) as made:
        peer_reason: list[str] = []

        async def watch() -> None:
            peer = await attach(made, agent)
            made.process.send_signal(signal.SIGSTOP)
            stopped = await connect(made.address, made.port, agent, timeout_s=0.5)
            assert stopped.outcome is ConnectOutcome.TIMEOUT
            made.process.kill()
            made.process.wait()
            assert await asyncio.wait_for(peer.receive(), SOON_S) is None
            assert peer.send(READY) is False
            peer_reason.append(peer.closed_because)
            dead = await connect(made.address, made.port, agent)
            assert dead.outcome is ConnectOutcome.REFUSED

        asyncio.run(watch())
        assert peer_reason[0]


def test_a_network_without_a_way_is_unreachable(agent: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_way(self: object, sock: object, address: object) -> None:
        raise OSError(113, "No route to host")

    async def main() -> None:
        monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_connect", no_way)
        found = await connect("192.0.2.1", 7, agent)
        assert found.outcome is ConnectOutcome.UNREACHABLE
        assert "192.0.2.1:7: No route to host" in found.detail

    asyncio.run(main())


def test_numeric_addresses_are_not_looked_up(agent: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def strict(*arguments: Any, flags: int = 0, **options: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST
        return real(*arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", strict)

    async def main() -> None:
        for address in ("127.0.0.1", "::1"):
            assert (await connect(address, 9, agent)).outcome is not ConnectOutcome.OK

    asyncio.run(main())


def test_a_resolver_that_hangs_holds_up_nobody(agent: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*arguments: Any, **options: Any) -> Any:
        release.wait(60)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def main() -> list[str]:
        found = [await connect("controller.example", 7, agent, timeout_s=0.1) for _ in range(6)]
        assert {each.outcome for each in found} == {ConnectOutcome.TIMEOUT}
        return [each.detail for each in found]

    began_s = time.monotonic()
    details = asyncio.run(main())
    assert time.monotonic() - began_s < 5
    assert "no answer from the resolver" in details[3] and "hang still" in details[4]
    release.set()
    assert eventually(lambda: connect_module._LOOKUPS._value == 4)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 300, "a\0b", "\ud800"])
def test_a_name_that_means_nothing_is_unreachable(
    agent: Credentials, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def unknown(host: str, *arguments: Any, **options: Any) -> Any:
        host.encode("idna")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert asyncio.run(connect(name, 7, agent)).outcome is ConnectOutcome.UNREACHABLE


# --- plain text stays on the machine ----------------------------------------------------------------


async def nobody(peer: Peer) -> None:
    raise AssertionError(peer)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "::ffff:127.0.0.1", "169.254.1.1"])
def test_no_plain_listening_for_others(address: str) -> None:
    async def main() -> None:
        async with ChannelServer(address, 0, None, nobody):
            pass

    with pytest.raises(ConfigError, match="without TLS"):
        asyncio.run(main())


@pytest.mark.parametrize("address", ["localhost", "", "node-1", "tmp/socket"])
def test_a_name_can_not_be_listened_on(address: str) -> None:
    async def main() -> None:
        async with ChannelServer(address, 0, None, nobody):
            pass

    with pytest.raises(ConfigError, match="a numeric address, or a path"):
        asyncio.run(main())


def test_a_path_too_long_and_a_port_in_use_are_told(tmp_path: Path) -> None:
    async def listen(address: str, port: int) -> None:
        async with ChannelServer(address, port, None, nobody):
            pass

    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        asyncio.run(listen(str(tmp_path / ("x" * 120)), 0))
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match="ports are 0 to 65535"):
            asyncio.run(listen("127.0.0.1", port))
        with pytest.raises(ConfigError, match="ports are 1 to 65535"):
            asyncio.run(connect("127.0.0.1", port, None))
    told = pytest.raises(ConfigError, match=r"port \d+: Address already in use; name another")
    with socket.create_server(("127.0.0.1", 0)) as taken, told:
        asyncio.run(listen("127.0.0.1", taken.getsockname()[1]))


def test_no_plain_word_to_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"192.0.2.1:7 is on another machine.*credentials"):
        asyncio.run(connect("192.0.2.1", 7, None))


# --- what is done with a connection -----------------------------------------------------------------


def test_an_error_about_one_peer_ends_that_one_and_a_bug_is_reported(authority: Authority) -> None:
    async def on_peer(peer: Peer) -> None:
        message = await peer.receive()
        assert message is not None
        if message["type"] == "ready":
            raise ProtocolError("out of turn")
        if message["type"] == "kill":
            raise ZeroDivisionError("a bug")
        peer.send(WELCOME)
        await peer.receive()

    async def main() -> list[dict[str, Any]]:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        credentials = authority.credentials(AGENT)
        async with ChannelServer("127.0.0.1", 0, authority.credentials(CONTROLLER), on_peer) as server:
            for message in (READY, {"type": "kill", "generation": 1}):
                found = await connect("127.0.0.1", server.port, credentials)
                assert found.peer is not None
                found.peer.send(message)
                assert await found.peer.receive() is None
            found = await connect("127.0.0.1", server.port, credentials)
            assert found.peer is not None
            found.peer.send(HELLO)
            assert await found.peer.receive() == WELCOME
            assert len(server.peers) == 1
        assert await found.peer.receive() is None
        return reported

    (report,) = asyncio.run(main())
    assert isinstance(report["exception"], ZeroDivisionError)


def test_a_message_of_ours_that_is_wrong_is_our_mistake(authority: Authority) -> None:
    async def on_peer(peer: Peer) -> None:
        await peer.receive()
        await peer.receive()

    async def main() -> None:
        async with ChannelServer("127.0.0.1", 0, None, on_peer) as server:
            found = await connect("127.0.0.1", server.port, None)
            assert found.peer is not None
            for message in (
                {"type": "no such"},
                {"type": "ack"},
                {"type": "goodbye", "reason": "x" * (1 << 20)},
            ):
                with pytest.raises(ProtocolError):
                    found.peer.send(message)
            assert found.peer.send(READY)

    asyncio.run(main())


def test_a_reset_while_much_is_sent_is_quiet(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """The transport would complain, once for each message, until it tells us."""
    sent: list[int] = []

    async def on_peer(peer: Peer) -> None:
        while await peer.receive() is not None:
            for _ in range(100):  # without a turn for the loop, which alone could tell of the end
                time.sleep(0.002)
                sent.append(peer.send({"type": "goodbye", "reason": "x" * 1000}))

    async def main(credentials: Credentials | None) -> None:
        served = authority.credentials(CONTROLLER) if credentials else None
        async with ChannelServer("127.0.0.1", 0, served, on_peer) as server:
            found = await connect("127.0.0.1", server.port, credentials)
            assert found.peer is not None
            found.peer.send(READY)
            await asyncio.sleep(0)
            found.peer._transport.get_extra_info("socket").setsockopt(  # type: ignore[union-attr]
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            found.peer.abort("reset")
            await asyncio.sleep(0.3)

    for credentials in (authority.credentials(AGENT), None):
        sent.clear()
        asyncio.run(main(credentials))
        assert sent and not sent[-1]
    assert caplog.records == []


def test_giving_up_on_an_attempt_leaves_nothing() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            for _ in range(10):
                attempt = asyncio.ensure_future(connect("127.0.0.1", silent.getsockname()[1], None))
                await asyncio.sleep(0.02)
                attempt.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await attempt
            await asyncio.sleep(0.05)
            assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

    asyncio.run(main())


def test_no_secret_is_in_a_command_line_or_a_message(authority: Authority, tmp_path: Path) -> None:
    text = authority.bundle(CONTROLLER)
    with serving(tmp_path, text) as made:
        secrets = [line for line in text.splitlines() if len(line) == 64]
        command = Path(f"/proc/{made.process.pid}/cmdline").read_bytes().decode()
        environment = Path(f"/proc/{made.process.pid}/environ").read_bytes().decode(errors="replace")
        told = json.dumps(stats(made, authority.credentials(AGENT)))
        for place in (command, environment, told, made.stderr):
            assert not any(secret in place for secret in secrets)
