"""closeranks: a rank falls, the others close ranks, and the run goes on."""

__version__ = "0.1.0"
