"""The ways a script can end, good and bad."""

import os
import sys

how = sys.argv[1]
print("leaving by", how)
if how == "none":
    sys.exit(None)
if how == "zero":
    raise SystemExit(0)
if how == "hard":
    sys.stdout.flush()
    os._exit(0)
if how == "seven":
    sys.exit(7)
if how == "message":
    sys.exit("told on stderr")
raise ValueError(how)
