"""Public bounds of features: what brings them to a common scale without looking at the data."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

EXAMPLE = '{"heart rate": [0, 350], "age over 65": null}'


def read_bounds(
    path: str | pathlib.Path, features: Sequence[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lower and upper bounds, of shape (features,) each, from a JSON file.

    The file is one object: ``[lower, upper]`` for each feature, or ``null`` for one that is on a
    common scale already, which is what [-1, 1] would say. The numbers have to be public, such as
    the range that an instrument can show: minima, means or deviations of the training data would
    leak past the guarantee.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the feature that is missing, unknown, or has other values.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"scaling: there is no file {file}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); write e.g. {EXAMPLE}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no object; write e.g. {EXAMPLE}")
    if missing := [name for name in features if name not in found]:
        raise ValueError(
            f"{file} lacks the feature {missing[0]!r} ({len(missing)} missing in all); give "
            "[lower, upper], or null for one that is scaled already"
        )
    if unknown := [name for name in found if name not in features]:
        raise ValueError(f"{file} names {unknown[0]!r}, which is no feature of the data")
    pairs = [_pair(file, name, found[name]) for name in features]
    bounds = np.array(pairs, np.float64).reshape(-1, 2)
    return bounds[:, 0], bounds[:, 1]


def _pair(file: pathlib.Path, name: str, value: Any) -> tuple[float, float]:
    if value is None:
        return -1.0, 1.0
    match value:
        case [int() | float() as lower, int() | float() as upper]:
            if -math.inf < lower < upper < math.inf:
                return float(lower), float(upper)
    raise ValueError(
        f"{file}: {name!r} has {json.dumps(value)}; give [lower, upper], two finite numbers with "
        "lower < upper, or null"
    )
