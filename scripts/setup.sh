#!/usr/bin/env bash
# Make (or refresh) the virtual environment that the other scripts use.
#
#   bash scripts/setup.sh            # then .venv/bin/python has everything
#   source scripts/setup.sh          # the same, and $PYTHON names that interpreter
#
# Environment:
#   PYTHON_BASE          interpreter to build .venv with (default: python3)
#   DPTRAIN_TORCH_INDEX  package index for torch alone, instead of a choice (install_torch.py)
#   PIP_*                pip's own settings, passed through untouched
#
# A stamp in .venv holds the hash of pyproject.toml and constraints.txt, so the second call costs
# nothing and a change of either installs again.

dptrain_setup() {
    local root base venv stamp want started
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return 1
    venv="$root/.venv"
    stamp="$venv/.dptrain-stamp"
    PYTHON="$venv/bin/python"
    export PIP_DISABLE_PIP_VERSION_CHECK=1

    if [ ! -x "$PYTHON" ]; then
        base="${PYTHON_BASE:-python3}"
        if ! command -v "$base" >/dev/null; then
            echo "setup: no '$base' on the PATH; install Python 3.11 or newer, or name it in PYTHON_BASE" >&2
            return 1
        fi
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "setup: '$base' is $("$base" --version 2>&1); dptrain needs Python 3.11 or newer." >&2
            echo "setup: install one and name it, e.g. PYTHON_BASE=python3.11 bash scripts/setup.sh" >&2
            return 1
        fi
        echo "setup: making $venv with $("$base" --version)" >&2
        if ! "$base" -m venv "$venv"; then
            rm -f "$venv/bin/python" # without it, the next try makes the environment anew
            echo "setup: 'venv' failed (on Debian and Ubuntu it is the package python3-venv)" >&2
            return 1
        fi
    fi

    want="$(cd "$root" && "$PYTHON" -c '
import hashlib, pathlib
text = b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256(text).hexdigest())')" || return 1
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return 0
    fi

    started=$SECONDS
    rm -f "$stamp"
    # First and alone, as there is a build to be chosen.
    "$PYTHON" "$root/scripts/install_torch.py" "$root/constraints.txt" || return 1
    echo "setup: installing dptrain and its tools" >&2
    (cd "$root" && "$PYTHON" -m pip install --quiet -c constraints.txt -e ".[dev]") || {
        echo "setup: the installation failed; pip says why above" >&2
        return 1
    }
    "$PYTHON" -c 'import dptrain, torch' || return 1
    echo "$want" >"$stamp"
    echo "setup: done in $((SECONDS - started)) s" >&2
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -eu
fi
dptrain_setup
