"""A run's folder: resolved configuration, metrics, what loggers keep, checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from dptrain.engine import check_seal, seal
from dptrain.integrations.loggers import TOOLS, RunLoggers
from dptrain.reporting import STATEMENT, STATEMENT_TEXT, read_metrics

CONFIG, METRICS, CHECKPOINT, LEDGER = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoint.pt",
    "ledger.jsonl",
)
GRAPH_TABLE, GRAPH_PLOT = "graph.txt", "graph.png"
INDIVIDUAL = "individual_NOT_FOR_RELEASE"  # what each example has spent, when asked for
WEIGHTS, MODEL = "model.safetensors", "model"  # the trained model: a file or a folder, by recipe
SUMMARY = "summary.txt"  # written last: the run is finished
NOT_PRIVATE = "NOT_PRIVATE.md"  # marks a simulation
REPLACED, DISCARDED = "replaced-", "discarded-"  # folders of what makes way for a new run
MOVED = "moved"  # in the former: all of the old run is in there
ANEW = "start anew with overwrite=true (steps that were released count on top)"
MARKS = ("step", "split", "not_for_release")  # of a record of metrics, beside the metrics
OURS = (
    CONFIG,
    METRICS,
    CHECKPOINT,
    LEDGER,
    *TOOLS,
    STATEMENT,
    STATEMENT_TEXT,
    "curves.png",
    "privacy.png",
    GRAPH_TABLE,
    GRAPH_PLOT,
    INDIVIDUAL,
    NOT_PRIVATE,
    WEIGHTS,
    MODEL,
    SUMMARY,
)


class RunFolder:
    """Everything that one run writes.

    Metrics of the training set are not covered by the guarantee (they are computed on raw
    examples): every such record says ``"not_for_release": true``.

    Attributes:
        loggers: who gets the metrics beside the file; ``None`` until the run is there.
    """

    loggers: RunLoggers | None = None

    def __init__(
        self, path: str | pathlib.Path, *, completed_steps: int = 0, config: str | None = None
    ) -> None:
        """Open the folder; metrics after ``completed_steps`` are dropped, they will come again."""
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        if config is not None:
            (self.path / CONFIG).write_text(config, encoding="utf-8")
        self._keep_metrics(completed_steps)
        self._metrics = (self.path / METRICS).open("a", encoding="utf-8")

    @staticmethod
    def refuse(path: str | pathlib.Path, *, overwrite: bool) -> list[pathlib.Path]:
        """The files that an earlier run left in ``path``, if it may be overwritten.

        Raises:
            ValueError: if it may not, ``path`` is a file, or nothing can be written there.
        """
        path = pathlib.Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"output={path} is a file; name a folder")
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            what = "cannot be written to" if above.is_dir() else "is a file"
            raise ValueError(f"output={path}: {above} {what}; name another folder")
        present = _present(path)
        if present and not overwrite:
            how = "continue it with --resume, start anew with overwrite=true"
            if not (path / CHECKPOINT).exists():
                how = f"but no {CHECKPOINT}, so it cannot go on; {ANEW}"
            raise ValueError(f"{path} already holds a run; {how}, or write elsewhere with --output")
        return present

    @staticmethod
    @contextlib.contextmanager
    def claim(path: str | pathlib.Path, *, overwrite: bool) -> Iterator[None]:
        """Make way for a new run in ``path``; should it fail to start, the old one comes back.

        Only what a run wrote is touched: the folder may hold other things. The new run has started
        when its checkpoint is there. Who is killed before leaves the old run in a folder
        ``replaced-…``, from which ``recover`` takes it.

        Raises:
            ValueError: as ``refuse``.
        """
        present = RunFolder.refuse(path, overwrite=overwrite)
        path = pathlib.Path(path)
        existed = path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            aside = pathlib.Path(tempfile.mkdtemp(dir=path, prefix=REPLACED))
        except OSError as error:
            raise ValueError(
                f"output={path} cannot be written ({error.strerror}); name another folder"
            ) from error
        for old in present:
            old.rename(aside / old.name)
        (aside / MOVED).touch()
        try:
            yield
        except BaseException:
            _put_back(path, aside)
            if not existed:
                path.rmdir()
            raise
        _discard(aside)

    @staticmethod
    def recover(path: str | pathlib.Path) -> None:
        """Finish or undo what a killed ``claim`` left: the new run if it started, or the old.

        Raises:
            ValueError: if that cannot be told.
        """
        path = pathlib.Path(path)
        if not path.is_dir():
            return
        for half_written in (CHECKPOINT, METRICS, LEDGER):
            for left in path.glob(f"{half_written}*.tmp"):
                left.unlink()
        for aside in _asides(path, DISCARDED):
            shutil.rmtree(aside)
        for aside in _asides(path, REPLACED):
            if (aside / MOVED).exists() and (path / CHECKPOINT).exists():
                _discard(aside)
            else:
                _put_back(path, aside)

    @staticmethod
    def ledger_path(path: str | pathlib.Path) -> pathlib.Path:
        """Path of the step ledger of the run in ``path``."""
        return pathlib.Path(path) / LEDGER

    def log(self, record: dict[str, Any], *, private: bool) -> None:
        """Append a record with its ``step`` (steps completed) to the file, and tell the loggers."""
        line = {**record, "not_for_release": True} if private else record
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self.loggers is None:
            return
        values = {name: value for name, value in record.items() if name not in MARKS}
        tell = self.loggers.private if private else self.loggers.released
        tell(values, part=record["split"])

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far."""
        return read_metrics(self.path / METRICS)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace checkpoint.pt in one step: a crash leaves the old one or the new one.

        It holds seeds and generator states, so that nobody but its owner may read it.
        """
        temporary = self.path / f"{CHECKPOINT}.tmp"
        temporary.unlink(missing_ok=True)  # its mode would stay
        with open(temporary, "wb", opener=_for_owner) as file:
            torch.save(seal(state), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / CHECKPOINT)

    def close(self) -> None:
        """Flush and close the metric files, and end what loggers keep."""
        self._metrics.close()
        if self.loggers is not None:
            self.loggers.close()

    def _keep_metrics(self, completed_steps: int) -> None:
        path = self.path / METRICS
        if not path.exists():
            return
        kept = [record for record in read_metrics(path) if record["step"] <= completed_steps]
        temporary = self.path / f"{METRICS}.tmp"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(path)


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _present(path: pathlib.Path) -> list[pathlib.Path]:
    return [path / name for name in OURS if (path / name).exists()]


def _asides(path: pathlib.Path, prefix: str) -> list[pathlib.Path]:
    """Folders of ``RunFolder.claim`` in ``path``, and none that only have such a name."""
    ours = {*OURS, MOVED}
    folders = [found for found in path.glob(f"{prefix}*") if found.is_dir()]
    return [found for found in folders if {held.name for held in found.iterdir()} <= ours]


def _put_back(path: pathlib.Path, aside: pathlib.Path) -> None:
    """The old run's files from ``aside``; as long as the mark is there, ``path`` has the new's."""
    if (aside / MOVED).exists():
        for name in (CHECKPOINT, *OURS):  # first what shows that the new run has started
            remove(path / name)
        (aside / MOVED).unlink()
    for old in aside.iterdir():
        if (path / old.name).exists():
            raise ValueError(
                f"{aside} holds files of a run that was to be replaced, and {path} has others of "
                "the same names: move those that you want to keep elsewhere, and delete the rest"
            )
        old.rename(path / old.name)
    aside.rmdir()


def _discard(aside: pathlib.Path) -> None:
    """Delete what was replaced, under a name that says so should this be cut short."""
    shutil.rmtree(aside.rename(aside.with_name(DISCARDED + aside.name.removeprefix(REPLACED))))


def remove(path: pathlib.Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(path: str | pathlib.Path) -> dict[str, Any]:
    """The checkpoint of the run in folder ``path``, read without executing code from it.

    Raises:
        ValueError: if there is none to resume from, or it is damaged.
    """
    file = pathlib.Path(path) / CHECKPOINT
    if not file.is_file():
        left = any(found.name != CHECKPOINT for found in _present(file.parent))
        how = f"put a copy of it back, or {ANEW}" if left else "start without --resume"
        raise ValueError(f"no {CHECKPOINT} in {path}: nothing to resume; {how}")
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile's, pickle's and torch's own kinds
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {reason}): put a copy of it back, or "
            "start anew with overwrite=true"
        ) from error
    check_seal(state, str(file))
    return state
