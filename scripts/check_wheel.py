"""Does the wheel install and work in a clean environment, with the oldest and newest versions?

    python scripts/check_wheel.py
    python scripts/check_wheel.py --python ~/pythons/3.13/bin/python --only oldest -- --find-links X

Builds the wheel from a copy of the tree, and installs it for each Python that is found and each
end of the declared ranges: the newest versions, and the oldest direct ones (uv's
``--resolution lowest-direct``). In each environment every module is imported that needs no extra,
and a small model is trained privately. Needs uv on the PATH; what follows ``--`` is passed to
``uv pip install``. Downloads torch for every one: gigabytes, where the index serves CUDA builds.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
RESOLUTIONS = {"newest": "highest", "oldest": "lowest-direct"}

# Runs in the environment that is checked: of this repository, only the wheel is there.
CHECK = """
import importlib, pkgutil, sys, warnings
import torch, numpy, scipy, opacus, dp_accounting
import dptrain
assert "site-packages" in dptrain.__file__, dptrain.__file__
extra = (  # pytest, numba, other libraries' trainers
    "dptrain.testing", "dptrain.accounting.min_sep.engine_kernel", "dptrain.integrations.")
names = [m.name for m in pkgutil.walk_packages(dptrain.__path__, "dptrain.")]
for name in names:
    if not name.startswith(extra) and not name.endswith("__main__"):
        importlib.import_module(name)
from dptrain import BandMF, MinSep, PrivacyEngine
from dptrain.commands.cli import main
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(0, 2, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data=data,
        scheme=MinSep.for_batch_size(batch_size=8, dataset_size=64, min_sep=2, steps=5),
        strategy=BandMF(bands=2), noise_multiplier=2.0, target_delta=1e-5, max_grad_norm=1.0,
        seed=0)
    module, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    guarantee = private.guarantee()
assert guarantee.steps_executed == 5 and 0 < guarantee.epsilon < float("inf"), guarantee
assert main(["account", "--scheme", "Poisson", "batch_size=50", "--strategy", "Identity",
             "--dataset-size", "1000", "--steps", "10", "--noise-multiplier", "1.0",
             "--delta", "1e-5"]) == 0
versions = {m.__name__: m.__version__ for m in (torch, numpy, scipy, opacus)}
print(f"{len(names)} modules; {versions}")
"""


def pythons() -> list[str]:
    """Interpreters of the supported versions on this machine, one of each."""
    found = []
    home = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        named = [shutil.which(f"python{version}"), *map(str, home.glob(f"{version}.*/bin/python"))]
        for candidate in filter(None, named):
            asked = [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip() == version:
                found.append(candidate)
                break
    return found


def build(folder: pathlib.Path) -> pathlib.Path:
    """The wheel, from a copy: building leaves files in the tree."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "dptrain", tree / "dptrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run(["uv", "build", "--quiet", "--wheel", "-o", folder, tree], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check(wheel: pathlib.Path, python: str, resolution: str, options: list[str]) -> str | None:
    """Install and try the wheel in an environment of its own; what went wrong, or ``None``."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as place:
        inside = pathlib.Path(place, "bin", "python")
        install = ["uv", "pip", "install", "--quiet", "--python", str(inside)]
        # The wheel's requirements are direct ones, whose lower bounds count, only if named as such.
        install += ["--only-binary", ":all:", "--resolution", resolution, *options]
        install += ["-r", str(ROOT / "pyproject.toml"), str(wheel)]
        for command in (
            ["uv", "venv", "--quiet", "--clear", "--python", python, place],
            install,
            [str(inside), "-c", CHECK],
        ):
            done = subprocess.run(command, capture_output=True, text=True, cwd=place)
            if done.returncode:
                return f"{' '.join(command[:2])}: {(done.stderr or done.stdout).strip()[-3000:]}"
        print(f"    {done.stdout.strip().splitlines()[-1]}")
    return None


def main() -> int:
    """Check each interpreter at both ends; the number of failures is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", action="append", help="interpreter (default: all that are found)"
    )
    parser.add_argument(
        "--only", choices=RESOLUTIONS, action="append", help="one end of the ranges"
    )
    parser.add_argument("options", nargs="*", help="for uv pip install, after --")
    options = parser.parse_args()
    if shutil.which("uv") is None:
        parser.error("uv is not on the PATH: pip install uv")
    chosen = options.python or pythons()
    if not chosen:
        parser.error(f"none of Python {', '.join(VERSIONS)} found: name one with --python")
    failures = 0
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as place:
        wheel = build(pathlib.Path(place))
        for python in chosen:
            for end in options.only or RESOLUTIONS:
                started = time.monotonic()
                error = check(wheel, python, RESOLUTIONS[end], options.options)
                failures += error is not None
                outcome = "works" if error is None else f"FAILS\n{error}"
                print(
                    f"{python}, {end}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True
                )
    return failures


if __name__ == "__main__":
    sys.exit(main())
