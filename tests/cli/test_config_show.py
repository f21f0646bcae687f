"""``closeranks config show``: every setting once, with its value and where that came from."""

from __future__ import annotations

import json
import os

import pytest

from closeranks.cli import config_show
from closeranks.cli.flags import parse, to_config
from closeranks.cli.flags_table import ENVIRONMENT, FLAGS
from closeranks.errors import UsageError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("PET_", "TORCH", "PYTHON_EXEC"))]:
        monkeypatch.delenv(name)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, tuple[object, str]]:
    assert config_show.main(["show", "--json", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert set(document) == {"settings", "notices"}
    return {row["name"]: (row["value"], row["source"]) for row in document["settings"]}


def test_every_setting_has_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
    got = as_json(
        capsys, "--nproc_per_node", "4", "-r", "0:3", "-t1", "--hang-timeout", "0", "--no-zygote",
        "--local-addr", "10.0.0.1", "--local-ranks-filter", "2,0", "-m", "pkg.t", "--json", "x",
    )  # fmt: skip
    assert got["entrypoint.kind"] == ("module", "-m")
    assert got["entrypoint.target"] == ("pkg.t", "command line")
    assert got["entrypoint.args"] == (["--json", "x"], "command line")
    assert got["nproc_per_node"] == ("4", "--nproc_per_node")
    assert got["budget.max_restarts"] == (3, "PET_MAX_RESTARTS")
    assert got["shutdown_timeout_s"] == (9, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert got["hang.hang_timeout_s"] == (None, "--hang-timeout")
    assert got["zygote"] == (False, "--no-zygote")
    assert got["master_addr"] == ("10.0.0.1", "--local-addr")
    assert got["logs.redirects"] == ({"0": 3}, "-r")
    assert got["logs.tee"] == (1, "-t")
    assert got["logs.console_ranks"] == ([0, 2], "--local-ranks-filter")
    assert got["budget.window_s"] == (600.0, "default")
    assert got["run_id"] == ("(a new id for each run)", "default")


def test_every_field_that_a_flag_sets_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = as_json(capsys)
    fields = {f.field for f in (*FLAGS, *ENVIRONMENT) if f.field}
    assert len(fields) > 20
    assert fields <= set(shown)
    assert all(source == "default" for name, (_, source) in shown.items() if not name.startswith("entry"))
    assert shown["entrypoint.target"] == ("", "not given")


def test_standalone_decides_the_id(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "--standalone", "--rdzv-id", "mine", "t.py")
    assert got["run_id"] == ("(a new id for each run)", "--standalone")
    assert as_json(capsys, "--rdzv-id", "mine", "t.py")["run_id"] == ("mine", "--rdzv-id")


def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["show", "--hang-timeout", "0", "--monitor-interval", "1", "--preload", "a,b", "-r0:1,2:3", "t.py"]
    assert config_show.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0]: line.split()[1:] for line in lines}
    assert words["hang.hang_timeout_s"] == ["never", "--hang-timeout"]
    assert words["preload"] == ["a,b", "--preload"]
    assert words["logs.redirects"] == ["0:1,2:3", "-r"]
    assert words["master_port"] == ["-", "default"]
    assert words["quiet"] == ["no", "default"]
    assert lines[-1].startswith("note: --monitor-interval has no effect here")


def test_values_agree_with_what_a_run_gets() -> None:
    parsed = parse(["--nproc-per-node", "3", "--tee", "3", "t.py"], {})
    config = to_config(parsed, lambda: "id")
    rows = {row.name: row.value for row in config_show.rows(config, parsed)}
    assert rows["nproc_per_node"] == config.nproc_per_node == "3"
    assert rows["logs.tee"] == config.logs.tee
    assert rows["hang.suspect_floor_s"] == config.hang.suspect_floor_s


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["show", "--help"], ["show", "-h", "--json"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert config_show.main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: closeranks config show")


def test_bad_command_lines() -> None:
    with pytest.raises(UsageError, match="use closeranks config show"):
        config_show.main([])
    with pytest.raises(UsageError, match="use closeranks config show"):
        config_show.main(["shwo"])
    with pytest.raises(UsageError, match="want at least 1 rank"):
        config_show.main(["show", "--nproc-per-node", "0"])
