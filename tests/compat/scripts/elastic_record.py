"""torch's own @record decorator; with --fail it writes the error file and ends the script with code 1."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    print("elastic launch:", dist.is_torchelastic_launched())
    print("error file's folder exists:", Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.is_dir())
    dist.barrier()
    dist.destroy_process_group()
    if "--fail" in sys.argv:
        raise ValueError("recorded")


if __name__ == "__main__":
    main()
