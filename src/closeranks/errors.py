"""Every error closeranks raises, as one tree.

CloseranksError
├── UsageError            the command line is off; exit 2
├── ConfigError           a setting or file makes the run impossible; exit 2
├── RunNotFound           no run directory, or no running job, under that name; exit 2
├── JournalError          the journal can't be opened or read
├── ProtocolError         a peer spoke out of turn, too long, or for another generation
│   └── UntrustedPeer     a peer can't prove that it belongs to this job
├── EngineError           the cluster's own interface can't be used, or refuses
├── EtcdError             the etcd that keeps the job's state can't be reached, or says no
├── ZygoteError           the zygote died or can't be used
└── EvidenceError         an incident directory can't be read

Each message says what happened, where, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "CloseranksError",
    "ConfigError",
    "EngineError",
    "EtcdError",
    "EvidenceError",
    "JournalError",
    "ProtocolError",
    "RunNotFound",
    "UntrustedPeer",
    "UsageError",
    "ZygoteError",
]


class CloseranksError(Exception):
    """Base of all errors that closeranks raises on purpose."""

    exit_code = 1


class UsageError(CloseranksError):
    """The command line is wrong; the message names the fix."""

    exit_code = 2


class ConfigError(CloseranksError):
    """A setting, file or limit of this machine makes the run impossible."""

    exit_code = 2


class RunNotFound(CloseranksError):
    """No run directory, or no live job, answers to that name."""

    exit_code = 2


class JournalError(CloseranksError):
    """The journal can't be opened, or isn't one."""

    exit_code = 2


class ProtocolError(CloseranksError):
    """A message was malformed, oversized, or fenced off by its generation."""


class UntrustedPeer(ProtocolError):
    """Whoever is at the other end can't prove to be of this job, and in the role it has to have."""


class EngineError(CloseranksError):
    """The interface of a cluster, its API or its tools, can't be reached, makes no sense, or refuses."""


class EtcdError(CloseranksError):
    """No etcd answers in time, or its answer is no or makes no sense. What was asked may have been done."""


class ZygoteError(CloseranksError):
    """The zygote is gone or was found unsafe to fork from."""


class EvidenceError(CloseranksError):
    """An incident directory is missing or unreadable."""

    exit_code = 2
