"""Where agents come from. ``engine_for`` finds an engine by its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from closeranks.errors import UsageError

if TYPE_CHECKING:
    from closeranks.engines.base import Engine, JobSpec

__all__ = ["ENGINES", "engine_for"]

# name -> module and class: imported when it is asked for
ENGINES = {"local": ("closeranks.engines.local", "LocalEngine")}


def engine_for(name: str, spec: JobSpec) -> Engine:
    """Raises UsageError for a name that no engine has, or options that it doesn't take."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    module, cls = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), cls)(spec)
    return engine
