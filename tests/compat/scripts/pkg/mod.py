"""What `-m pkg.mod` runs; it reads a data file that lies in the package, and pickles a class of __main__."""

import pickle
import sys
from importlib.resources import files

from .sub import shout


class Thing:
    value = 5


if __name__ == "__main__":
    print(shout("mod"), __package__, __spec__.name if __spec__ else None, sys.argv[1:])
    print(files(__package__).joinpath("data.txt").read_text().strip())
    print(pickle.loads(pickle.dumps(Thing())).value, Thing.__module__)
