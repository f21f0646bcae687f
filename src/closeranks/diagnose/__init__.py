"""From the evidence of one incident to its verdict. Pure: no I/O but in ``load``, no clock, no randomness."""

from closeranks.diagnose.first_cause import diagnose

__all__ = ["diagnose"]
