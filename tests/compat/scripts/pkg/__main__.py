"""What `-m pkg` runs: relative imports work, and __main__ knows its package."""

import sys

from . import WHERE
from .sub import shout

print(shout("main"), WHERE, __name__, __package__, __spec__.name if __spec__ else None, sys.argv[1:])
