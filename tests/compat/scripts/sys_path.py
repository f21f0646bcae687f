"""What the interpreter looks like from inside a script."""

import sys
from pathlib import Path

print("path[0]", sys.path[0])
print("file", __file__)
print("argv", sys.argv)
print("cwd", Path.cwd())
print(__name__, __package__, __spec__, type(__loader__).__name__, __doc__.split()[0])
print(sys.modules["__main__"].__dict__ is globals(), sys.flags.isolated, sys.flags.no_site)
print(sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno(), sys.stdout.encoding.lower())
print(sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__)
