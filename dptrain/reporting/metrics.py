"""Metrics of a run, a JSON object a line."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a last line that was cut off while being written is left out.

    Raises:
        ValueError: naming another line that is no record.
    """
    text = path.read_text(encoding="utf-8")
    records = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not valid JSON ({error}); repair or delete the line"
            ) from error
    return records
