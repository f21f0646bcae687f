from __future__ import annotations

from pathlib import Path

import pytest

from .timeline import Timeline


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return Timeline(tmp_path / "journal.db")
