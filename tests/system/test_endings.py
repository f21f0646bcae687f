"""What ends a job, and whether the screen, the exit code and the report say so truthfully."""

from __future__ import annotations

from pathlib import Path

import pytest

from system.rig import Run, script


@pytest.mark.torch
def test_no_restart_means_none_even_where_a_rank_never_comes_to_init(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        import torch.distributed as dist
        if os.environ["RANK"] == "1":
            sys.exit(0)
        dist.init_process_group("gloo")
        """,
    )
    done, job = run("--nproc-per-node", 2, "--max-restarts", 0, path, torch=True)
    assert done.returncode == 1
    assert "--max-restarts 0 allows no restart" in done.stderr
    assert "finished with exit code 0" in done.stderr
    assert [entry.name for entry in (job.run_dir / "logs").iterdir()] == ["0"]
