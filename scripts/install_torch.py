"""Install the pinned torch into the running interpreter's environment: the build that fits here.

    .venv/bin/python scripts/install_torch.py constraints.txt

The public index serves a Linux build that brings gigabytes of CUDA packages, wanted only where
there is a GPU. Without an NVIDIA driver a CPU build is taken: the package index's, where it serves
one, or the one that ``uv pip install --torch-backend=cpu`` finds, which knows torch's own indexes.
With a driver, ``--torch-backend=auto`` finds the CUDA build for it. Where uv cannot be had or finds
nothing in time, what the package index serves is taken, and its size is said.

``DPTRAIN_TORCH_INDEX`` names an index for torch alone, and then nothing is chosen. pip's own
settings count throughout.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
import urllib.request
from typing import Any

_GET_UV_S, _ASK_UV_S, _INSTALL_BY_UV_S = 120, 60, 1800
_SIZES_S = 15  # for all sizes together


def say(text: str) -> None:
    """A line of the set-up's, on stderr."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def pinned(constraints: pathlib.Path) -> str:
    """The version after ``torch==`` in a constraints file.

    Raises:
        SystemExit: if there is none.
    """
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith("torch=="):
            return line.removeprefix("torch==").strip()
    raise SystemExit(f"setup: {constraints} pins no torch (a line torch==...)")


def installed() -> str | None:
    """Version of the torch in this environment without its local part, or ``None``."""
    try:
        return importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str, timeout: float | None = None, quiet: bool = False) -> str | None:
    """The output of pip, or ``None`` if it failed; its errors go to stderr unless ``quiet``."""
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(
            command,
            check=True,
            text=True,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def has_driver() -> bool:
    """True if an NVIDIA driver answers and knows a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU" in found.stdout


def offered(constraints: pathlib.Path) -> list[dict[str, Any]]:
    """torch and what it needs, as the package index would have it installed: pip's report.

    Raises:
        SystemExit: if pip finds none.
    """
    report = pip(
        "install", "--quiet", "--dry-run", "--report", "-", "-c", str(constraints), "torch"
    )
    if report is None:
        raise SystemExit("setup: pip finds no torch on your package index; it says why above")
    return list(json.loads(report)["install"])


def cuda_packages(items: list[dict[str, Any]]) -> list[str]:
    """Names of CUDA packages in a report."""
    names = sorted(item["metadata"]["name"].lower() for item in items)
    return [name for name in names if name.startswith(("nvidia-", "cuda-"))]


def size(items: list[dict[str, Any]]) -> str:
    """The size of the downloads of a report, in words."""
    total, end = 0, time.monotonic() + _SIZES_S
    for item in items:
        left = end - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            request = urllib.request.Request(item["download_info"]["url"], method="HEAD")
            with urllib.request.urlopen(request, timeout=min(left, 5.0)) as answer:
                total += int(answer.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            return "of a size that the index does not tell, usually 2 to 4 GB"
    return f"{total / 1e9:.1f} GB to download" if total >= 1e8 else f"{total / 1e6:.1f} MB"


def by_uv(version: str, backend: str) -> bool:
    """Install torch by uv from the index that it chooses; whether that worked."""
    uv = shutil.which("uv")
    if uv is None:
        # Few retries: an index without uv must not hold up the set-up.
        few = ("--retries", "1", "--timeout", "15")
        if pip("install", "--quiet", *few, "uv", timeout=_GET_UV_S, quiet=True) is None:
            return False
        uv = str(pathlib.Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    command += [f"--torch-backend={backend}", f"torch=={version}"]
    environment = {"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1", **os.environ}
    try:
        # Asked first, as that shows within a minute whether torch's index can be reached at all.
        for extra, limit in ((["--dry-run"], _ASK_UV_S), ([], _INSTALL_BY_UV_S)):
            subprocess.run(
                [*command, *extra], check=True, capture_output=True, env=environment, timeout=limit
            )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def by_pip(constraints: pathlib.Path, *index: str) -> None:
    """Install torch alone by pip; what it needs comes with dptrain's own requirements.

    Raises:
        SystemExit: if that fails.
    """
    if pip("install", "--quiet", "--no-deps", *index, "-c", str(constraints), "torch") is None:
        raise SystemExit("setup: torch could not be installed; pip says why above")


def main(constraints: pathlib.Path) -> None:
    """Choose a build and install it.

    Raises:
        SystemExit: with the reason, if there is no torch to be had.
    """
    version = pinned(constraints)
    if index := os.environ.get("DPTRAIN_TORCH_INDEX"):
        say(f"installing torch {version} from DPTRAIN_TORCH_INDEX")
        return by_pip(constraints, "--index-url", index)
    if installed() == version:
        return None
    if platform.system() != "Linux":  # one build each
        say(f"installing torch {version}")
        return by_pip(constraints)
    # Older ones download what they are only asked about.
    pip("install", "--quiet", "--retries", "1", "--upgrade", "pip", timeout=_GET_UV_S, quiet=True)
    items, driver = offered(constraints), has_driver()
    cuda = cuda_packages(items)
    if not driver and not cuda:
        say(f"installing torch {version}, the CPU build of your package index")
        return by_pip(constraints)
    backend, wanted = ("auto", "a CUDA build") if driver else ("cpu", "a CPU build")
    there = "an NVIDIA driver" if driver else "no NVIDIA driver"
    say(f"there is {there}: looking for {wanted} of torch {version}")
    if by_uv(version, backend):
        say(f"installed {wanted} of torch {version}")
        return None
    kind = f"with {len(cuda)} CUDA packages" if cuda else "a CPU build"
    say(f"none found by uv; installing what your package index serves, {kind}: {size(items)}")
    return by_pip(constraints)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: install_torch.py constraints.txt")
    main(pathlib.Path(sys.argv[1]))
