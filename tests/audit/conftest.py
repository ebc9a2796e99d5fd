"""The audit needs Triton. These tests run in an environment of their own: scripts/test_triton.sh.

Triton's interpreter is chosen for a whole process by Triton's own variable: the folder ``interpreted`` runs with it,
the rest without.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if not find_spec("triton"):
    collect_ignore_glob = ["test_*.py", "interpreted/*"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore_glob = ["interpreted/*"]
