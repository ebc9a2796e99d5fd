#!/usr/bin/env bash
# The Triton kernels without a GPU: an environment of its own (about 1 GB), Triton's interpreter for indexing, then the
# instruction audit for sm_90 and gfx942 with its planted faults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python3 -m venv .venv-triton
.venv-triton/bin/python -m pip install -q -c constraints-cpu.txt -e '.[dev,triton]'
echo "== Triton kernels: indexing, in Triton's interpreter"
TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -n 0 tests/audit
echo "== Triton kernels: instruction audit for sm_90 and gfx942"
.venv-triton/bin/python -m pytest -n 0 tests/audit tests/gpu
