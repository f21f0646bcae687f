from __future__ import annotations

import sys
from pathlib import Path

# The make-believe cluster that the policy's own tests walk through.
sys.path.insert(0, str(Path(__file__).parent.parent / "policy"))
