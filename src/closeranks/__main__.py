"""``python -m closeranks``."""

import sys

from closeranks.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
