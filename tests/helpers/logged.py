"""What loggers have kept: read back by the tools' own means, or from their files."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

_BLOCK, _HEADER, _FIRST, _WHOLE, _LAST = 32768, 7, 2, 1, 4


def wandb_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of all offline runs in a folder, from their logs of protocol buffers."""
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in message.history.item}
        for message in _messages(folder)
        if message.WhichOneof("record_type") == "history"
    ]


def wandb_host(folder: pathlib.Path) -> set[str]:
    """Names of hosts in the records."""
    runs = [m.run for m in _messages(folder) if m.WhichOneof("record_type") == "run"]
    assert runs
    return {run.host for run in runs}


def wandb_kinds(folder: pathlib.Path) -> set[str]:
    """Which kinds of records the offline runs hold."""
    return {str(message.WhichOneof("record_type")) for message in _messages(folder)}


def _messages(folder: pathlib.Path) -> list[Any]:
    """All messages; another process writes them, and the end of a run when it has all."""
    from wandb.proto import wandb_internal_pb2 as messages

    given_up, found = time.monotonic() + 60, []
    paths = sorted(folder.rglob("*.wandb"))
    assert paths
    for path in paths:
        read: list[Any] = []
        while not any(message.WhichOneof("record_type") == "exit" for message in read):
            assert time.monotonic() < given_up, f"{path} has no end"
            time.sleep(0.1)
            read = [messages.Record.FromString(record) for record in _records(path.read_bytes())]
        found += read
    return found


def _records(data: bytes) -> list[bytes]:
    """The records of a LevelDB log behind a header of seven bytes."""
    found, part, at = [], b"", _HEADER
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = (b"" if kind in (_WHOLE, _FIRST) else part) + data[at + 7 : at + 7 + size]
        if kind in (_WHOLE, _LAST):
            found.append(part)
        at += _HEADER + size
    return found


def mlflow_run(folder: pathlib.Path, *, experiment: str = "dptrain") -> tuple[Any, Any]:
    """Client and only run of an experiment in the database of a folder."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def scalars(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Events of TensorBoard by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def everything(folder: pathlib.Path) -> bytes:
    """All that lies in a folder."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
