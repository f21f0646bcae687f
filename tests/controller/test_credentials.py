"""A job's own credentials: who can read them, what is in them, and files that others could have touched."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from closeranks.controller import credentials as module
from closeranks.controller.credentials import AGENT, CONTROLLER, bundle, identity, load, mint, parse_bundle
from closeranks.controller.tls import check_peer, client_context, server_context
from closeranks.errors import ConfigError, UntrustedPeer

JOB = "20261201-042655-train-a1b2"
NOW = datetime(2026, 12, 1, 4, 26, 55, tzinfo=UTC)


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    mint(JOB, tmp_path / "credentials", now=NOW)
    return tmp_path / "credentials"


def certificates(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


def test_only_the_owner_gets_at_them_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        mint(JOB, tmp_path / "credentials")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "credentials").iterdir()}
    assert modes == {"ca.pem": 0o600, "controller.pem": 0o600, "agent.pem": 0o600}
    assert stat.S_IMODE((tmp_path / "credentials").stat().st_mode) == 0o700


def test_the_authority_can_sign_no_third(minted: Path) -> None:
    (ca,) = certificates(minted / "ca.pem")
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    keys = [b for path in minted.iterdir() for b in path.read_text().split("-----BEGIN ") if "KEY" in b[:12]]
    assert len(keys) == 2 and "KEY" not in (minted / "ca.pem").read_text()
    for role in (CONTROLLER, AGENT):
        key = module.parse_bundle(bundle(minted, role)).key_pem.encode()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        public = load_pem_private_key(key, None).public_key()
        assert public != ca.public_key()


@pytest.mark.parametrize("role", [CONTROLLER, AGENT])
def test_a_certificate_is_for_one_job_one_role_and_a_short_time(minted: Path, role: str) -> None:
    leaf, ca = certificates(minted / f"{role}.pem")
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"closeranks://{JOB}/{role}"]
    (purpose,) = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    expected = {CONTROLLER: x509.ExtendedKeyUsageOID.SERVER_AUTH, AGENT: x509.ExtendedKeyUsageOID.CLIENT_AUTH}
    assert purpose == expected[role]
    assert leaf.not_valid_before_utc == NOW - timedelta(minutes=10)
    assert leaf.not_valid_after_utc == NOW + timedelta(days=30)
    key = leaf.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    assert leaf.serial_number.bit_length() > 64


def test_a_bundle_is_all_that_a_role_needs(minted: Path) -> None:
    for role in (CONTROLLER, AGENT):
        text = bundle(minted, role)
        credentials = parse_bundle(text)
        assert credentials == load(minted / f"{role}.pem")
        assert (credentials.job_id, credentials.role) == (JOB, role)
    for context in (
        server_context(load(minted / "controller.pem")),
        client_context(load(minted / "agent.pem")),
    ):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1


def test_no_key_is_shown(minted: Path) -> None:
    credentials = load(minted / "agent.pem")
    lines = [line for line in credentials.key_pem.splitlines() if not line.startswith("-----")]
    shown = repr(credentials) + str(credentials) + f"{credentials}"
    assert not any(line in shown for line in lines)
    assert repr(credentials) == f"Credentials(job_id={JOB!r}, role='agent')"


def test_the_wrong_role_and_a_key_of_someone_else_are_refused(minted: Path, tmp_path: Path) -> None:
    agent = load(minted / "agent.pem")
    with pytest.raises(ConfigError, match="controller needs the credentials of its own role"):
        server_context(agent)
    mint(JOB, tmp_path / "other")
    mixed = (
        (minted / "agent.pem")
        .read_text()
        .replace(agent.key_pem, load(tmp_path / "other" / "agent.pem").key_pem)
    )
    with pytest.raises(ConfigError, match="mint them anew") as caught:
        client_context(parse_bundle(mixed))
    assert "PRIVATE" not in str(caught.value)


def test_an_encrypted_key_asks_nobody(minted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives import serialization

    agent = load(minted / "agent.pem")
    key = serialization.load_pem_private_key(agent.key_pem.encode(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.BestAvailableEncryption(b"secret"),
    ).decode()
    with pytest.raises(ConfigError, match="mint them anew"):
        client_context(module.Credentials(JOB, AGENT, agent.ca_pem, agent.certificate_pem, encrypted))


# --- files that others could have touched -----------------------------------------------------------


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o644, 0o777, 0o601])
def test_a_file_that_others_may_use_is_not_read(minted: Path, mode: int) -> None:
    (minted / "agent.pem").chmod(mode)
    with pytest.raises(ConfigError, match=rf"agent.pem may be used by others \(mode {mode:04o}\).*chmod 600"):
        load(minted / "agent.pem")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_someone_else_is_not_read(minted: Path) -> None:
    os.chown(minted / "agent.pem", 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        load(minted / "agent.pem")


def test_a_mounted_secret_of_root_is_read_by_its_group() -> None:
    def status(uid: int, mode: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    if os.getuid() != 0:
        assert module._open_to_others(status(0, 0o440)) is None
        assert module._open_to_others(status(0, 0o460)) is not None
    assert module._open_to_others(status(0, 0o444)) is not None
    assert module._open_to_others(status(os.getuid(), 0o400)) is None
    assert module._open_to_others(status(os.getuid(), 0o440)) is not None


def test_what_is_no_file_holds_nobody_up(minted: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match=r"no regular file|belongs to|Is a directory"):
            load(path)
    with pytest.raises(ConfigError, match=r"can't read credentials from .*: No such file"):
        load(tmp_path / "absent")
    (tmp_path / "link").symlink_to(minted / "agent.pem")  # as secrets are mounted
    assert load(tmp_path / "link").role == AGENT


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("closeranks-job", "job"),
        lambda text: text.replace(JOB, "../../etc"),
        lambda text: text.replace("role: agent", "role: root"),
        lambda text: text + text,
        lambda text: text.replace("PRIVATE", "PUBLIC"),
        lambda text: text + "\n" * 100_000,
        lambda text: text + "\xff",
        lambda text: "-----BEGIN CERTIFICATE-----\n" * 2000,
    ],
)
def test_a_damaged_bundle_is_refused_without_showing_it(minted: Path, damage: object) -> None:
    path = minted / "agent.pem"
    text = path.read_text()
    path.write_bytes(damage(text).encode("latin-1"))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no bundle of credentials") as caught:
        load(path)
    assert str(path) in str(caught.value) and "BEGIN" not in str(caught.value)


def test_nothing_is_overwritten_and_nothing_is_left_half_done(minted: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in minted.iterdir()}
    with pytest.raises(ConfigError, match="Name a new directory"):
        mint(JOB, minted)
    assert before == {path.name: path.read_bytes() for path in minted.iterdir()}
    folder = tmp_path / "half"
    folder.mkdir(0o700)
    (folder / "agent.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="Name a new directory"):
        mint(JOB, folder)
    assert [path.name for path in folder.iterdir()] == ["agent.pem"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_is_open_to_others_gets_none(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        mint(JOB, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("job", ["", "a/b", "a b", "a\n", "é", "x" * 200])
def test_an_id_that_would_mean_something_else_in_a_uri_is_refused(tmp_path: Path, job: str) -> None:
    with pytest.raises(ConfigError, match="its id may hold"):
        mint(job, tmp_path / "credentials")


@pytest.mark.parametrize("lifetime_s", [0, -1, 399 * 86400, float("nan"), float("inf")])
def test_a_lifetime_has_bounds(tmp_path: Path, lifetime_s: float) -> None:
    with pytest.raises(ConfigError, match="can't live"):
        mint(JOB, tmp_path / "credentials", lifetime_s)


# --- who is who -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        [],
        [("URI", identity(JOB, AGENT))],
        [("URI", identity("another-job", CONTROLLER))],
        [("DNS", identity(JOB, CONTROLLER))],
        [("URI", identity(JOB, CONTROLLER) + "/x")],
        [("URI", identity(JOB, CONTROLLER).upper())],
        [("URI", identity(JOB, CONTROLLER)), ("URI", identity(JOB, AGENT))],
        [("URI", "\x1b[31m" + "x" * 100_000)],
    ],
)
def test_a_certificate_that_names_anything_else_is_not_the_controller(names: list[tuple[str, str]]) -> None:
    with pytest.raises(UntrustedPeer) as caught:
        check_peer({"subjectAltName": tuple(names)}, job_id=JOB, role=CONTROLLER)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_no_certificate_is_nobody() -> None:
    for nothing in (None, {}):
        with pytest.raises(UntrustedPeer, match="names nobody"):
            check_peer(nothing, job_id=JOB, role=CONTROLLER)
    check_peer({"subjectAltName": (("URI", identity(JOB, AGENT)),)}, job_id=JOB, role=AGENT)


# --- the library ------------------------------------------------------------------------------------


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_the_library_one_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    done = run_python(
        "import sys; sys.modules['cryptography'] = None\n"
        "from pathlib import Path\n"
        "from closeranks.controller.credentials import mint\n"
        f"mint('job', Path({str(tmp_path / 'c')!r}))"
    )
    assert "ConfigError" in done.stderr and "pip install 'closeranks[cluster]'" in done.stderr
    assert not (tmp_path / "c").exists()


def test_only_minting_needs_the_library(minted: Path) -> None:
    done = run_python(
        "import sys; sys.modules['cryptography'] = None\n"
        "from pathlib import Path\n"
        "from closeranks.controller import channel, connect, credentials, tls\n"
        f"tls.client_context(credentials.load(Path({str(minted / 'agent.pem')!r})))"
    )
    assert (done.returncode, done.stderr) == (0, "")
