"""Where agents come from. ``engine_for`` finds an engine by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from closeranks.errors import UsageError

if TYPE_CHECKING:
    from closeranks.engines.base import Bundles, Engine, JobSpec

__all__ = ["ENGINES", "engine_for"]

# name -> module and class: imported when it is asked for
ENGINES = {
    "local": ("closeranks.engines.local", "LocalEngine"),
    "slurm": ("closeranks.engines.slurm", "SlurmEngine"),
    "kubernetes": ("closeranks.engines.kubernetes", "KubernetesEngine"),
}
_CARRIES_CREDENTIALS = frozenset({"kubernetes"})


def engine_for(name: str, spec: JobSpec, *, bundles: Callable[[], Bundles] | None = None) -> Engine:
    """``bundles`` makes credentials, for an engine that has to hand them on when it submits the job.

    Raises UsageError for a name that no engine has, or options that it doesn't take.
    """
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    module, cls = ENGINES[name]
    more: dict[str, Any] = {"bundles": bundles} if name in _CARRIES_CREDENTIALS else {}
    if name == "slurm":
        more["is_tethered"] = False  # a controller that is killed comes back, and its agents with it
    engine: Engine = getattr(importlib.import_module(module), cls)(spec, **more)
    return engine
