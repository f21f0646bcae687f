"""What only the kernel does to a rank: the OOM killer of a real cgroup, and a sleep that no signal ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Launcher, eventually
from system.rig import SOON_S, Job, Start, command, is_alive, no_torch, script

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups and mounts file systems")

_LIMIT_BYTES = 256 * 2**20


def verdicts(job: Job) -> list[dict[str, object]]:
    return [
        json.loads(path.read_text()) for path in sorted(job.run_dir.glob("incidents/[0-9]*/verdict.json"))
    ]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of ``_LIMIT_BYTES``, of whichever version this machine has."""
    name = f"closeranks-test-{uuid.uuid4().hex[:8]}"
    places = {
        Path("/sys/fs/cgroup/memory") / name: "memory.limit_in_bytes",
        Path("/sys/fs/cgroup") / name: "memory.max",
    }
    made = None
    for path, limit in places.items():
        with contextlib.suppress(OSError):
            path.mkdir()
            if (path / limit).exists():
                (path / limit).write_text(str(_LIMIT_BYTES))
                made = path
                break
            path.rmdir()
    if made is None:
        pytest.skip("no memory cgroup can be made here")
    yield made
    assert eventually(lambda: not (made / "cgroup.procs").read_text(), SOON_S), "processes are left in it"
    made.rmdir()


def test_the_oom_killer_is_named_with_its_victim(cgroup: Path, launcher: Launcher, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1" and os.environ["CLOSERANKS_GENERATION"] == "0":
            time.sleep(0.3)
            kept = []
            while True:
                kept.append(b"1" * 2**20)
        time.sleep(1.0)
        print("done")
        """,
    )
    runs = tmp_path / "runs"
    words = command(runs, "--nproc-per-node", 2, path)
    done = subprocess.run(
        ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *words],
        env=launcher.environment(no_torch(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run_dir,) = (path for path in runs.iterdir() if not path.is_symlink())
    (verdict,) = [json.loads(path.read_text()) for path in run_dir.glob("incidents/0*/verdict.json")]
    assert (verdict["kind"], verdict["leaf"]) == ("out_of_memory", "app.host_oom"), verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict
    assert "incident 0001" in done.stderr and "memory" in done.stderr
    assert done.stdout.count("done") == 2


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose writers sleep without end (state D) once the file ``freeze`` is asked for."""
    image, mounted = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    mounted.mkdir()
    made = subprocess.run(["mkfs.ext4", "-q", "-F", image], check=False, capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, mounted], check=False).returncode:
        pytest.skip("no file system can be made and mounted here")
    try:
        yield mounted
    finally:
        subprocess.run(["fsfreeze", "-u", mounted], check=False, capture_output=True)

        def unmounted() -> bool:
            return subprocess.run(["umount", mounted], check=False, capture_output=True).returncode == 0

        assert eventually(unmounted, SOON_S)


@pytest.mark.torch
def test_a_rank_stuck_in_the_kernel_is_named_left_behind_and_told(
    start: Start, frozen_disk: Path, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import os, subprocess, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, disk = os.environ["CLOSERANKS_GENERATION"] == "0", sys.argv[1]
        for step in range(40):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if first and step == 20 and dist.get_rank() == 1:
                subprocess.run(["fsfreeze", "-f", disk], check=True)
                with open(disk + "/file", "w") as file:
                    file.write("x")
        dist.destroy_process_group()
        print("trained", flush=True)
        """,
    )
    job = start("--nproc-per-node", 2, "--hang-timeout", 6, path, frozen_disk, torch=True)
    job.running.wait_for("stuck in the kernel (state D)")
    stuck = [pid for pid in job.running.pids() if _state(pid) == "D"]
    done = job.running.wait()
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(job)
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict
    assert verdict["leaf"] == "storage.stall", verdict
    assert job.text("out", 0, 1) == job.text("out", 1, 1) == "trained\n"
    assert len(stuck) == 1 and _state(stuck[0]) == "D", "it could be killed after all"
    subprocess.run(["fsfreeze", "-u", frozen_disk], check=True)
    assert eventually(lambda: not is_alive(stuck[0]), SOON_S), "SIGKILL was not waiting for it"


def _state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""
