from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from closeranks.controller import runs as runs_module
from closeranks.controller.runs import create_run_dir, fallback_runs_dir, find_run, job_id, list_runs
from closeranks.errors import ConfigError, RunNotFound

NOON = 1796040000.0  # 2026-11-30 12:00:00 UTC


def make(runs: Path, *names: str) -> None:
    for name in names:
        (runs / name).mkdir(parents=True)
        (runs / name / "journal.db").touch()


@pytest.fixture(autouse=True)
def _own_fallback(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that this machine has in the shared place are none of these tests' business."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))


# --- ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train.py", "train"),
        ("/a b/c/pre-train_v1.2.py", "pre-train_v1.2"),
        ("../../etc/passwd", "passwd"),
        ("..", "job"),
        (None, "job"),
        ("", "job"),
        ("größe ✓.py", "groe"),
        ("名前", "job"),
        ("a\nb\0c;$(rm -rf)", "a-b-c-rm-rf"),
        ("pkg.module:main", "pkg.module-main"),
        ("dir/", "dir"),
        ("x" * 500, "x" * 40),
        ("-rf", "rf"),
    ],
)
def test_ids_have_safe_bounded_names(name: str | None, part: str) -> None:
    made = job_id(name, wall_s=NOON)
    assert re.fullmatch(r"20261130-120000-(.*)-[0-9a-f]{4}", made)
    if name == "größe ✓.py":
        assert made[16:-5].isascii()
        assert made[16:-5].startswith("gro")
    else:
        assert made[16:-5] == part
    assert runs_module._ID.fullmatch(made)


def test_ids_sort_by_time() -> None:
    ids = [job_id(name, wall_s=NOON + 86400 * i) for i, name in enumerate(["z", "a", None, "m"])]
    assert ids == sorted(ids)


# --- making -----------------------------------------------------------------------------------------


def test_a_run_directory_has_its_rooms_and_latest_points_at_it(tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    first = create_run_dir(runs, "train.py")
    second = create_run_dir(str(runs), None)
    assert first != second
    assert sorted(p.name for p in second.iterdir()) == ["incidents", "logs"]
    assert (runs / "latest").readlink() == Path(second.name)  # relative: the tree may be moved
    assert set(list_runs(runs)) == {first, second}
    assert sorted(p.name for p in runs.iterdir()) == sorted([first.name, second.name, "latest"])


def test_the_path_is_absolute_so_that_a_script_may_change_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = create_run_dir("runs", "train.py")
    assert run.is_absolute()
    assert run.parent == tmp_path / "runs"


def test_many_at_once_get_directories_of_their_own(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.extend(create_run_dir(tmp_path, "same") for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 80
    assert find_run("latest", tmp_path) in made


def test_a_collision_takes_another_name_and_endless_ones_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(tokens))
    monkeypatch.setattr("time.time", lambda: NOON)
    assert create_run_dir(tmp_path, "t").name == "20261130-120000-t-aaaa"
    assert create_run_dir(tmp_path, "t").name == "20261130-120000-t-bbbb"
    monkeypatch.setattr("secrets.token_hex", lambda _: "aaaa")
    with pytest.raises(ConfigError, match="File exists"):
        create_run_dir(tmp_path, "t")


@pytest.mark.parametrize(
    "place", ["/proc/nowhere/runs", "/dev/null/runs", "/sys/kernel/runs", "x" * 300, "a\0b"]
)
def test_where_it_cant_be_made_the_error_says_what_to_do(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--log-dir DIR") as caught:
        create_run_dir(place, "train.py")
    assert caught.value.exit_code == 2


def test_latest_that_is_a_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    run = create_run_dir(tmp_path, "train.py")
    assert (tmp_path / "latest" / "mine").exists()
    assert find_run("latest", tmp_path) == run
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([run.name, "latest"])


# --- finding ----------------------------------------------------------------------------------------


def test_latest_follows_the_link_and_falls_back_on_the_newest(tmp_path: Path) -> None:
    make(tmp_path, "20261201-000000-a-0001", "20261202-000000-a-0002")
    assert find_run("latest", tmp_path).name == "20261202-000000-a-0002"
    (tmp_path / "latest").symlink_to("20261201-000000-a-0001")
    assert find_run("latest", tmp_path).name == "20261201-000000-a-0001"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("20260101-000000-gone-0000")
    assert find_run("latest", tmp_path).name == "20261202-000000-a-0002"


def test_ids_prefixes_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    make(runs, "20261201-000000-a-0001", "20261201-000000-a-0001x", "20261202-000000-b-0002")
    make(tmp_path, "elsewhere")
    assert find_run("20261202", runs) == runs / "20261202-000000-b-0002"
    assert find_run("20261201-000000-a-0001", runs) == runs / "20261201-000000-a-0001"
    assert find_run(str(tmp_path / "elsewhere"), runs) == tmp_path / "elsewhere"
    assert find_run(str(tmp_path / "elsewhere" / "journal.db"), runs) == tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    assert find_run("elsewhere", runs) == Path("elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_run(".", runs) == Path()


def test_misses_name_what_is_near(tmp_path: Path) -> None:
    names = [f"2026120{i}-000000-train-000{i}" for i in range(1, 8)]
    make(tmp_path, *names, "20261130-000000-finetune-abcd")
    with pytest.raises(RunNotFound, match=r"may be any of 7 runs: 20261207.* and 3 more"):
        find_run("202612", tmp_path)
    with pytest.raises(RunNotFound, match="did you mean 20261130-000000-finetune-abcd"):
        find_run("finetune", tmp_path)
    with pytest.raises(RunNotFound, match="did you mean 20261130-000000-finetune-abcd"):
        find_run("fintune", tmp_path)
    with pytest.raises(RunNotFound, match=r"did you mean .*20261203-000000-train-0003"):
        find_run("20261203-000000-train-0009", tmp_path)
    with pytest.raises(RunNotFound, match="the newest are 20261207"):
        find_run("qqqq", tmp_path)


@pytest.mark.parametrize("text", ["a\0b", "x" * 5000, "/", "/nowhere/at/all", "*", "\udcff", "../.."])
def test_hostile_names_are_simply_not_found(text: str, tmp_path: Path) -> None:
    make(tmp_path, "20261201-000000-a-0001")
    with pytest.raises(RunNotFound):
        find_run(text, tmp_path)


def test_no_runs_at_all_says_where_it_looked(tmp_path: Path) -> None:
    for text in ("latest", ""):
        with pytest.raises(RunNotFound, match=r"no runs under .*nowhere.*--runs-dir"):
            find_run(text, tmp_path / "nowhere")
    with pytest.raises(RunNotFound, match="none at all"):
        find_run("train", tmp_path / "nowhere")
    assert list_runs(tmp_path / "nowhere") == []


def test_a_directory_of_runs_given_as_a_run_is_explained(tmp_path: Path) -> None:
    make(tmp_path / "runs", "20261201-000000-a-0001")
    with pytest.raises(RunNotFound, match="holds runs, but is none itself: use --runs-dir"):
        find_run(str(tmp_path / "runs"), tmp_path / "other")
    with pytest.raises(RunNotFound, match=r"holds no journal\.db"):
        find_run(str(tmp_path), tmp_path / "other")


def test_only_directories_with_an_id_are_runs(tmp_path: Path) -> None:
    make(tmp_path, "20261201-000000-a-0001", "notes")
    (tmp_path / "20261202-000000-b-0002").touch()
    (tmp_path / "latest").symlink_to("20261201-000000-a-0001")
    assert [run.name for run in list_runs(tmp_path)] == ["20261201-000000-a-0001"]
    with pytest.raises(ConfigError, match="Not a directory"):
        list_runs(tmp_path / "20261202-000000-b-0002")


def test_where_there_are_none_those_that_had_to_go_elsewhere_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make(fallback_runs_dir(), "20261201-000000-a-0001")
    assert find_run("latest", "closeranks-runs").name == "20261201-000000-a-0001"
    with pytest.raises(RunNotFound, match="no runs under"):
        find_run("latest", tmp_path / "named")  # who names a place means it
    make(tmp_path / "closeranks-runs", "20261202-000000-b-0002")
    assert find_run("latest", "closeranks-runs").name == "20261202-000000-b-0002"
    with pytest.raises(RunNotFound):
        find_run("20261201-000000-a-0001", "closeranks-runs")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to someone else")
def test_runs_of_someone_else_in_the_shared_place_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    make(fallback_runs_dir(), "20261201-000000-a-0001")
    os.chown(fallback_runs_dir(), 12345, 12345)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFound, match="no runs under"):
        find_run("latest", "closeranks-runs")
