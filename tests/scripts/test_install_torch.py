"""Which torch the set-up takes, with package indexes, drivers and a uv that are made up."""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import stat
import subprocess
import sys
import time
import venv
import zipfile

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "install_torch.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have one build")


def wheel(folder: pathlib.Path, name: str, version: str, *needs: str, padding: int = 0) -> None:
    """A wheel with metadata alone."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{stem}.dist-info/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {need}" for need in needs),
                "",
            ]
        ),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name.replace('-', '_')}.py": "#" * padding,
    }
    rows = []
    for path, text in files.items():
        sha = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={sha},{len(text)}")
    files[f"{stem}.dist-info/RECORD"] = "\n".join([*rows, f"{stem}.dist-info/RECORD,,", ""])
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    links = "".join(f'<a href="{p.name}">{p.name}</a>' for p in sorted(place.glob("*.whl")))
    (place / "index.html").write_text(f"<html><body>{links}</body></html>")


def command(folder: pathlib.Path, name: str, text: str) -> None:
    """An executable shell script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


class Machine:
    """A machine with an index, perhaps a driver, perhaps a uv that reaches torch's indexes."""

    def __init__(self, folder: pathlib.Path, python: pathlib.Path) -> None:
        self.folder, self.python, self.commands = folder, python, folder / "commands"
        self.commands.mkdir()
        self.index, self.torch_index = folder / "index", folder / "torch-index"
        (folder / "constraints.txt").write_text("# pins\ntorch==2.13.0\n")

    def serves(self, *builds: str) -> None:
        for build in builds:
            if build == "cuda":
                wheel(self.index, "torch", "2.13.0", "nvidia-cublas", padding=3_000_000)
                wheel(self.index, "nvidia-cublas", "13.0")
            else:
                wheel(self.index, "torch", build)

    def driver(self, *, works: bool = True) -> None:
        said = "echo 'GPU 0: NVIDIA H200'" if works else "echo failed; exit 9"
        command(self.commands, "nvidia-smi", said)

    def uv(self, behavior: str = "reaches") -> None:
        """A uv that installs the build of the backend it is asked for, from torch's own indexes."""
        wheel(self.torch_index / "cpu", "torch", "2.13.0+cpu")
        wheel(self.torch_index / "auto", "torch", "2.13.0+cu130", "nvidia-cublas")
        if behavior != "reaches":
            command(self.commands, "uv", f'echo "$@" >> {self.folder}/uv.txt; {behavior}')
            return
        text = f"""
echo "$@" >> {self.folder}/uv.txt
case "$*" in *--dry-run*) exit 0 ;; esac
backend=$(echo "$*" | sed 's/.*--torch-backend=\\([a-z]*\\).*/\\1/')
exec {self.python} -m pip install --quiet --no-deps \
    --index-url file://{self.torch_index}/$backend torch==2.13.0"""
        command(self.commands, "uv", text)

    def run(
        self, script: pathlib.Path = SCRIPT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "DPTRAIN"))}
        return subprocess.run(
            [str(self.python), str(script), str(self.folder / "constraints.txt")],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **kept,
                "PATH": f"{self.commands}:/usr/bin:/bin",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": f"file://{self.index}",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                **environment,
            },
        )

    @property
    def uv_calls(self) -> list[str]:
        record = self.folder / "uv.txt"
        return record.read_text().splitlines() if record.exists() else []

    @property
    def torch(self) -> str | None:
        """The version that is installed now."""
        code = "import importlib.metadata as m; print(m.version('torch'))"
        found = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True)
        return found.stdout.strip() or None


@pytest.fixture
def machine(tmp_path: pathlib.Path, python: pathlib.Path) -> Machine:
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torch"],
        check=True,
        capture_output=True,
    )
    return Machine(tmp_path, python)


@pytest.mark.slow
def test_public_index_without_a_driver_takes_the_cpu_build(machine: Machine) -> None:
    machine.serves("cuda")
    machine.uv()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0+cpu"
    assert all("--torch-backend=cpu torch==2.13.0" in call for call in machine.uv_calls)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [("2.13.0",), ("cuda", "2.13.0+cpu")])
def test_an_index_with_a_cpu_build_needs_no_uv(machine: Machine, labels: tuple[str, ...]) -> None:
    machine.serves(*labels)
    machine.uv()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.torch == labels[-1]
    assert machine.uv_calls == []


@pytest.mark.slow
def test_with_a_driver_the_cuda_build_for_it_is_taken(machine: Machine) -> None:
    machine.serves("cuda")
    machine.driver()
    machine.uv()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0+cu130"
    assert all("--torch-backend=auto" in call for call in machine.uv_calls)


@pytest.mark.slow
def test_with_a_driver_but_no_uv_the_index_serves_its_build(machine: Machine) -> None:
    machine.serves("cuda")
    machine.driver()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0"
    assert "1 CUDA packages: 3." in done.stderr  # torch's 3 MB of padding are not compressed


@pytest.mark.slow
def test_a_driver_that_does_not_answer_is_none(machine: Machine) -> None:
    machine.serves("cuda")
    machine.driver(works=False)
    machine.uv()
    assert machine.run().returncode == 0
    assert machine.torch == "2.13.0+cpu"


@pytest.mark.slow
def test_where_uv_reaches_nothing_the_index_decides_and_the_size_is_said(machine: Machine) -> None:
    machine.serves("cuda")
    machine.uv("echo unreachable >&2; exit 2")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0"
    assert len(machine.uv_calls) == 1  # asked once, not told to install
    assert "installing what your package index serves, with 1 CUDA packages: 3." in done.stderr
    assert "unreachable" not in done.stderr


@pytest.mark.slow
def test_a_uv_that_hangs_does_not_hold_up_the_setup(machine: Machine) -> None:
    machine.serves("cuda")
    machine.uv("exec sleep 600")
    shortened = machine.folder / "install_torch.py"
    text = SCRIPT.read_text(encoding="utf-8")
    assert "120, 60, 1800" in text
    shortened.write_text(text.replace("120, 60, 1800", "120, 2, 1800"), encoding="utf-8")
    started = time.monotonic()
    done = machine.run(shortened)
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0"
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_torch_index_that_is_named_is_taken(machine: Machine) -> None:
    machine.serves("cuda")
    machine.uv()
    done = machine.run(DPTRAIN_TORCH_INDEX=f"file://{machine.torch_index}/cpu")
    assert done.returncode == 0, done.stderr
    assert machine.torch == "2.13.0+cpu"
    assert machine.uv_calls == []


@pytest.mark.slow
def test_a_second_call_changes_nothing(machine: Machine) -> None:
    machine.serves("2.13.0")
    machine.run()
    machine.serves("2.13.0+cpu")
    done = machine.run()
    assert (done.returncode, done.stderr, machine.torch) == (0, "", "2.13.0")


@pytest.mark.slow
def test_no_torch_at_all_is_said(machine: Machine) -> None:
    wheel(machine.index, "numpy", "2.0.0")
    done = machine.run()
    assert done.returncode != 0
    assert "pip finds no torch on your package index" in done.stderr
