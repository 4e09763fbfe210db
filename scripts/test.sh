#!/usr/bin/env bash
# Set up, then lint, formatting, types and tests but for slow oracles. Arguments go to pytest:
#
#   bash scripts/test.sh                       # all that is not marked slow
#   bash scripts/test.sh all                   # everything
#   bash scripts/test.sh tests/sampling -k gap # a part; of everything: all tests/sampling -k gap
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache | tail -n 12

# One thread a process: the tests' tensors are small, and two workers share the cores better.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "${1:-}" = all ]; then
    shift
else
    set -- -m "not slow" "$@"
fi
exec "$PYTHON" -m pytest -n "${DPTRAIN_TEST_WORKERS:-2}" "$@"
