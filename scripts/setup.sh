#!/usr/bin/env bash
# Make (or refresh) the virtual environment that the other scripts use.
#
#   bash scripts/setup.sh            # then .venv/bin/python has everything
#   source scripts/setup.sh          # the same, and $PYTHON names that interpreter
#
# Environment:
#   PYTHON_BASE          interpreter to build .venv with (default: python3)
#   DPTRAIN_TORCH_INDEX  package index for torch alone, e.g. the PyTorch project's CPU index
#   DPTRAIN_ALLOW_CUDA   1 accepts a torch that brings CUDA packages (gigabytes)
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
    dptrain_install_torch "$root" || return 1
    echo "setup: installing dptrain and its tools" >&2
    (cd "$root" && "$PYTHON" -m pip install --quiet -c constraints.txt -e ".[dev]") || {
        echo "setup: the installation failed; pip says why above" >&2
        return 1
    }
    "$PYTHON" -c 'import dptrain, torch' || return 1
    echo "$want" >"$stamp"
    echo "setup: done in $((SECONDS - started)) s" >&2
}

# torch first and alone, so that a build with gigabytes of CUDA packages is noticed before it is
# fetched. --no-deps because an index that only serves torch need not hold our other pins.
dptrain_install_torch() {
    local root="$1" index=() report found
    if [ -n "${DPTRAIN_TORCH_INDEX:-}" ]; then
        index=(--index-url "$DPTRAIN_TORCH_INDEX")
    elif [ "${DPTRAIN_ALLOW_CUDA:-0}" != 1 ]; then
        report="$("$PYTHON" -m pip install --quiet --dry-run --report - \
            -c "$root/constraints.txt" torch)" || {
            echo "setup: pip could not resolve torch from your package index; it says why above" >&2
            return 1
        }
        found="$(dptrain_cuda_in_report <<<"$report")" || return 1
        dptrain_refuse_cuda "would bring" "$found" || return 1
    fi
    echo "setup: installing torch" >&2
    "$PYTHON" -m pip install --quiet --no-deps "${index[@]+"${index[@]}"}" \
        -c "$root/constraints.txt" torch || {
        echo "setup: torch could not be installed; pip says why above" >&2
        return 1
    }
    if [ "${DPTRAIN_ALLOW_CUDA:-0}" != 1 ] && [ "$(uname -s)" = Linux ]; then
        found="$("$PYTHON" -c '
from importlib.metadata import requires
wanted = (line.split(";")[0].strip() for line in requires("torch") or [] if "extra" not in line)
print(*(name for name in wanted if name.startswith(("nvidia-", "cuda-"))))')" || return 1
        if ! dptrain_refuse_cuda "needs" "$found"; then
            "$PYTHON" -m pip uninstall --quiet --yes torch  # or the next try would find it here
            return 1
        fi
    fi
}

dptrain_cuda_in_report() {
    "$PYTHON" -c '
import json, sys
names = (item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"])
print(*(name for name in names if name.startswith(("nvidia-", "cuda-"))))'
}

dptrain_refuse_cuda() {
    if [ -z "$2" ]; then
        return 0
    fi
    cat >&2 <<EOF
setup: the torch that your package index offers $1 CUDA packages (gigabytes):
setup:   $2
setup: dptrain's scripts only need a CPU build. Either
setup:   - set DPTRAIN_TORCH_INDEX to the PyTorch project's CPU package index (the install page of
setup:     the PyTorch web site shows its address under Linux, Pip, CPU) and run this again, or
setup:   - set DPTRAIN_ALLOW_CUDA=1 if you do want the CUDA build.
EOF
    return 1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -eu
fi
dptrain_setup
