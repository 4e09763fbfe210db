"""A run's folder: resolved configuration, metrics, TensorBoard events, checkpoint."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

CONFIG, METRICS, CHECKPOINT, LEDGER = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoint.pt",
    "ledger.jsonl",
)
EVENTS = "tensorboard"
GRAPH_TABLE, GRAPH_PLOT = "graph.txt", "graph.png"
SUMMARY = "summary.txt"  # written last: the run is finished
NOT_PRIVATE = "NOT_PRIVATE.md"  # marks a simulation
OURS = (
    CONFIG,
    METRICS,
    CHECKPOINT,
    LEDGER,
    EVENTS,
    "privacy_report.json",
    "privacy_report.md",
    "curves.png",
    "privacy.png",
    GRAPH_TABLE,
    GRAPH_PLOT,
    NOT_PRIVATE,
    SUMMARY,
)


class RunFolder:
    """Everything that one run writes.

    Metrics of the training set are not covered by the guarantee (they are computed on raw
    examples): every such record says ``"not_for_release": true``.
    """

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
        self._events = SummaryWriter(str(self.path / EVENTS), purge_step=completed_steps + 1)

    @staticmethod
    def refuse(path: str | pathlib.Path, *, overwrite: bool) -> list[pathlib.Path]:
        """What an earlier run left in ``path``, if it may be overwritten.

        Raises:
            ValueError: if it may not, or ``path`` is a file.
        """
        path = pathlib.Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"output={path} is a file; name a folder")
        present = [path / name for name in OURS if (path / name).exists()]
        if present and not overwrite:
            raise ValueError(
                f"{path} already holds a run; continue it with --resume, start anew with "
                "overwrite=true, or write elsewhere with --output DIR"
            )
        return present

    @staticmethod
    def claim(path: str | pathlib.Path, *, overwrite: bool) -> None:
        """Make way for a new run in ``path``.

        Raises:
            ValueError: as :meth:`refuse`.
        """
        present = RunFolder.refuse(path, overwrite=overwrite)
        for old in present:  # only what a run wrote: the folder may hold other things
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()

    @staticmethod
    def ledger_path(path: str | pathlib.Path) -> pathlib.Path:
        """Where the run in ``path`` keeps its step ledger."""
        return pathlib.Path(path) / LEDGER

    def log(self, record: dict[str, Any], *, private: bool) -> None:
        """Append a record with its ``step`` (steps completed) to metrics.jsonl and TensorBoard."""
        step, split = record["step"], record["split"]
        line = {**record, "not_for_release": True} if private else record
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        label = f"{split} (not for release)" if private else split
        for name, value in record.items():
            if name not in ("step", "split"):
                self._events.add_scalar(f"{name}/{label}", value, step)

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far."""
        return read_metrics(self.path / METRICS)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace checkpoint.pt in one step: a crash leaves the old one or the new one."""
        temporary = self.path / f"{CHECKPOINT}.tmp"
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / CHECKPOINT)

    def close(self) -> None:
        """Flush and close the metric files."""
        self._metrics.close()
        self._events.close()

    def _keep_metrics(self, completed_steps: int) -> None:
        path = self.path / METRICS
        if not path.exists():
            return
        kept = [record for record in read_metrics(path) if record["step"] <= completed_steps]
        temporary = self.path / f"{METRICS}.tmp"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(path)


def load_checkpoint(path: str | pathlib.Path) -> dict[str, Any]:
    """The checkpoint of the run in folder ``path``, read without executing code from it.

    Raises:
        ValueError: if there is none to resume from.
    """
    file = pathlib.Path(path) / CHECKPOINT
    if not file.is_file():
        raise ValueError(f"no {CHECKPOINT} in {path}: nothing to resume; start without --resume")
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a last line that was cut off while being written is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
