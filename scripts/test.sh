#!/usr/bin/env bash
# Set up, then lint, formatting, types, contracts between rooms, and tests. Arguments go to pytest:
#
#   bash scripts/test.sh                       # all that is not marked slow
#   bash scripts/test.sh quick                 # the rooms that others stand on, and short runs
#   bash scripts/test.sh all                   # everything
#   bash scripts/test.sh share                 # of what is slow a tenth, another one by commit
#   bash scripts/test.sh of dptrain/losses.py  # of a module: its own, then who imports it
#   bash scripts/test.sh tests/sampling -k gap # a part; of everything: all tests/sampling -k gap
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
SECONDS=0

QUICK=(
    tests/test_architecture.py tests/test_losses.py tests/test_mechanism.py
    tests/core tests/sampling/test_scheme.py tests/sampling/schemes tests/noise
    tests/strategies/toeplitz/test_band_mf.py tests/strategies/test_strategy_contract.py
    tests/accounting/losses tests/accounting/renyi tests/accounting/test_dispatch.py
    tests/clipping/test_clipping.py tests/clipping/base/test_styles.py
    tests/engine/test_arguments.py tests/engine/test_optimizer_noise_added.py tests/engine/test_private_training_resume.py
)

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache | tail -n 12

# One thread a process: the tests' tensors are small, and two workers share the cores better.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
case "${1:-}" in
all) shift ;;
share)
    shift
    COMMIT="$(git rev-parse --short=7 HEAD)"
    share=$((16#$COMMIT % 10))/10
    echo "test: slow tests of share $share, by commit $COMMIT: again with  all --share $share"
    set -- --share "$share" "$@"
    ;;
of)
    files="$("$PYTHON" -m tests.helpers.of_module "${2:?of: name a module, as dptrain/losses.py}")"
    mapfile -t files <<<"$files"
    shift 2
    set -- -m "not slow" "${files[@]}" "$@"
    ;;
quick)
    shift
    set -- -m "not slow" "${QUICK[@]}" "$@"
    ;;
*) set -- -m "not slow" "$@" ;;
esac
status=0
# Each worker begins with tests that are next to each other: what a module sets up, it sets up once.
"$PYTHON" -m pytest -n "${DPTRAIN_TEST_WORKERS:-2}" --dist worksteal "$@" || status=$?
echo "test: $((SECONDS / 60)) min $((SECONDS % 60)) s after the set-up"
exit "$status"
