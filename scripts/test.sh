#!/usr/bin/env bash
# Set up, then lint, formatting, types and tests. Arguments go to pytest:
#
#   bash scripts/test.sh                       # everything
#   bash scripts/test.sh tests/sampling -k gap # a part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy

# One thread a process: the tests' tensors are small, and two workers share the cores better.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest -n "${DPTRAIN_TEST_WORKERS:-2}" "$@"
