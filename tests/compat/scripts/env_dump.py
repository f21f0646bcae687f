"""The variables that torchrun sets for a script, as one JSON document."""

import json
import os

NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
PRESENT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")

values = {name: os.environ.get(name) for name in NAMES}
values |= {name: bool(os.environ.get(name)) for name in PRESENT}
values["port is a number"] = os.environ["MASTER_PORT"].isdigit()
print(json.dumps(values, sort_keys=True))
