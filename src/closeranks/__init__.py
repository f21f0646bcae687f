"""closeranks: a rank falls, the others close ranks, and the run goes on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from closeranks.worker.api import phase as phase
    from closeranks.worker.api import step as step

__all__ = ["__version__", "phase", "step"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: the command line imports this package, and has no use for what runs inside a rank.
    if name in ("phase", "step"):
        from closeranks.worker import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
