"""One strategy of every family, for tables and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from dptrain.core import checks
from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.matrices.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.bsr import BSR
from dptrain.strategies.toeplitz.identity import Identity
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.strategies.trees.tree import Tree, TreeRestart
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

_DENSE_UP_TO = 2000


def families(
    *,
    steps: int,
    bands: Iterable[int],
    max_participations: int = 1,
    min_sep: int | None = None,
    workload: Workload = PREFIX_SUMS,
    dense: bool = False,
) -> list[Strategy]:
    """One strategy of every family (per number of bands where it has one), not bound.

    Args:
        steps: n.
        bands: numbers of bands; 1 stands for ``Identity``.
        max_participations: what the optimised families are optimised for.
        min_sep: likewise; ``steps`` if ``None``.
        workload: likewise.
        dense: include those that are optimised entry by entry, ``ColumnNormalizedBandMF`` and
            ``Dense`` (tens of seconds at n = 1,000).

    Raises:
        ValueError: for bands that do not fit the steps, or ``dense`` with too many steps.
    """
    b = steps if min_sep is None else min_sep
    run: dict[str, Any] = {"max_participations": max_participations, "min_sep": b}
    found: list[Strategy] = [Identity()]
    if isinstance(bands, str) or not isinstance(bands, Iterable):
        raise TypeError(f"{checks.named('bands', bands)} must be numbers of bands, such as (4, 16)")
    for count in sorted({checks.integer("bands", value) for value in bands} - {1}):
        if count > steps:
            raise ValueError(f"bands={count} exceeds steps={steps}: leave it out")
        found += [
            BandMF(bands=count, workload=workload),
            BSR(bands=count),
            BISR(inverse_bands=count),
            BandInvMF(inverse_bands=count, workload=workload, **run),
        ]
        if dense:
            found.append(ColumnNormalizedBandMF(bands=count, workload=workload))
        height = (count - 1).bit_length() + 1
        if 1 << (height - 1) == count:
            found.append(TreeRestart(height=height))
    found += [BLT(buffers=3, workload=workload, **run), Tree(), SquareRoot()]
    if dense:
        if steps > _DENSE_UP_TO:
            raise ValueError(f"dense=True with steps={steps}: at most {_DENSE_UP_TO}")
        # Banded where examples come back: participations are then orthogonal.
        once = max_participations == 1
        found.append(
            Dense(workload=workload, epochs=1) if once else Dense(workload=workload, bands=b)
        )
    return found


def describe(strategy: Strategy) -> str:
    """The constructor call without defaults, long values and what describes the run."""
    shown = []
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        if field.name in ("max_participations", "min_sep", "steps"):
            continue
        if field.name == "buffers" or (value != field.default and isinstance(value, int | float)):
            shown.append(f"{field.name}={value}")
        elif value != field.default and isinstance(value, str) and len(value) < 20:
            shown.append(f"{field.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(shown)})"
