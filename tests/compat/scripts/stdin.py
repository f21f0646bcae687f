"""Rank 0 reads what is piped into the launcher."""

import os
import sys

if os.environ["RANK"] == "0":
    for line in sys.stdin:
        print("read", line.strip())
    print("end of input")
