"""Arguments arrive as they were given: hyphens, flags the launcher has too, quotes, newlines, emptiness."""

import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--nproc-per-node", help="the launcher has a flag of that name; this one is the script's")
parser.add_argument("--negative", type=int)
parser.add_argument("-v", action="count")
parser.add_argument("rest", nargs="*")
args = parser.parse_args()
print(ascii(sys.argv[1:]))
print(args.lr, args.nproc_per_node, args.negative, args.v, ascii(args.rest))
