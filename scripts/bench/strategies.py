"""Time and error of the optimized strategies, beside jax_privacy's where it is installed.

Both sides of a case run in turn in one process. The error is RMSE × sensitivity (for "max" the
largest error × sensitivity), computed for both sides by our code in float64 from the coefficients
that the optimizer returned. jax_privacy compiles on its first call, which is shown by itself.

Run: PYTHONPATH=. python scripts/bench/strategies.py [--rounds 3] [--json FILE] [--only NAME ...]
The peer: pip install -c constraints.txt -e ".[peer]"
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from dptrain.strategies import (
    BISR,
    BLT,
    BSR,
    BandInvMF,
    BandMF,
    ColumnNormalizedBandMF,
    Dense,
    Strategy,
)
from scripts import results

COLUMNS = (
    ("strategy", "{name}"),
    ("time", "{seconds:time}"),
    ("error", "{error:.7g}"),
    ("jax_privacy: time", "{peer_seconds:time}", ""),
    ("its error", "{peer_error:.7g}", ""),
    ("ratio of times", "{ratio:,.0f}", ""),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimization: ours, the peer's, and how good a matrix may be at most and for how long."""

    name: str
    steps: int
    ours: Callable[[], Strategy]
    max_participations: int = 1
    min_sep: int | None = None
    objective: str = "mean"
    seconds: float | None = None
    error: float | None = None
    peer: Callable[[Any], Strategy] | None = None
    peer_rounds: int | None = None

    def score(self, strategy: Strategy) -> float:
        """RMSE (or largest error) × sensitivity."""
        sensitivity = strategy.sensitivity(
            steps=self.steps,
            max_participations=self.max_participations,
            min_sep=self.min_sep or self.steps,
        )
        error = strategy.rmse if self.objective == "mean" else strategy.max_error
        return error(self.steps) * sensitivity


def _peer_band_mf(steps: int, bands: int) -> Callable[[Any], Strategy]:
    def run(factorization: Any) -> Strategy:
        coefficients = factorization.toeplitz.optimize_banded_toeplitz(steps, bands)
        c = tuple(np.asarray(coefficients, dtype=np.float64).tolist())
        return BandMF(bands=bands, coefficients=c).bind(steps)

    return run


def _peer_blt(steps: int, objective: str, m: int, b: int) -> Callable[[Any], Strategy]:
    def run(factorization: Any) -> Strategy:
        blt = factorization.buffered_toeplitz.optimize(
            n=steps, min_sep=b, max_participations=m, error=objective, min_buffers=3, max_buffers=3
        )
        theta = tuple(np.asarray(blt.buf_decay, dtype=np.float64).tolist())
        omega = tuple(np.asarray(blt.output_scale, dtype=np.float64).tolist())
        return BLT(buffers=3, theta=theta, omega=omega).bind(steps)

    return run


def _as_dense(found: Any) -> Strategy:
    matrix = np.tril(np.asarray(found, dtype=np.float64))
    # The sign of a row of C is that of an entry of Z: it changes no error and no sensitivity.
    return Dense(matrix=matrix * np.sign(np.diag(matrix))[:, None]).bind(len(matrix))


def _peer_dense(steps: int) -> Callable[[Any], Strategy]:
    def run(factorization: Any) -> Strategy:
        return _as_dense(factorization.dense.optimize(steps))

    return run


def _peer_columns(steps: int, bands: int) -> Callable[[Any], Strategy]:
    def run(factorization: Any) -> Strategy:
        found = factorization.banded.optimize(steps, bands=bands)
        return _as_dense(found.materialize())

    return run


def cases() -> list[Case]:
    """The cases of the README and the targets of the project."""
    run = {"max_participations": 4, "min_sep": 500}
    return [
        Case(
            "BandMF n=1,000 bands=16",
            1000,
            lambda: BandMF(bands=16).bind(1000),
            seconds=0.020,
            error=6.278163,
            peer=_peer_band_mf(1000, 16),
        ),
        Case(
            "BandMF n=10,000 bands=64",
            10_000,
            lambda: BandMF(bands=64).bind(10_000),
            seconds=0.100,
            error=9.852664,
            peer=_peer_band_mf(10_000, 64),
            peer_rounds=2,
        ),
        Case(
            "BandMF n=1,000,000 bands=32",
            1_000_000,
            lambda: BandMF(bands=32).bind(1_000_000),
            seconds=5.0,
        ),
        Case(
            "BLT max n=2,000 buffers=3",
            2000,
            lambda: BLT(buffers=3, objective="max").bind(2000),
            objective="max",
            seconds=1.0,
            peer=_peer_blt(2000, "max", 1, 2000),
        ),
        Case(
            "BLT mean n=2,000 buffers=3, 4 participations",
            2000,
            lambda: BLT(buffers=3, **run).bind(2000),
            **run,
            seconds=1.0,
            peer=_peer_blt(2000, "mean", 4, 500),
            peer_rounds=2,
        ),
        Case(
            "BLT max n=10,000,000 buffers=3",
            10_000_000,
            lambda: BLT(buffers=3, objective="max").bind(10_000_000),
            objective="max",
            seconds=10.0,
            peer=_peer_blt(10_000_000, "max", 1, 10_000_000),
            peer_rounds=2,
        ),
        Case(
            "BLT mean n=10,000,000 buffers=4",
            10_000_000,
            lambda: BLT(buffers=4).bind(10_000_000),
            seconds=10.0,
        ),
        Case(
            "BandInvMF n=2,000 inverse_bands=16, 4 participations",
            2000,
            lambda: BandInvMF(inverse_bands=16, **run).bind(2000),
            **run,
        ),
        Case("BISR n=2,000 inverse_bands=16", 2000, lambda: BISR(inverse_bands=16).bind(2000)),
        Case("BSR n=1,000 bands=16", 1000, lambda: BSR(bands=16).bind(1000)),
        Case(
            "ColumnNormalizedBandMF n=1,000 bands=16",
            1000,
            lambda: ColumnNormalizedBandMF(bands=16).bind(1000),
            peer=_peer_columns(1000, 16),
            peer_rounds=1,
        ),
        Case(
            "Dense n=1,000",
            1000,
            lambda: Dense(epochs=1).bind(1000),
            seconds=60.0,
            peer=_peer_dense(1000),
            peer_rounds=1,
        ),
    ]


def _timed(action: Callable[[], Strategy]) -> tuple[float, Strategy]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def measure(case: Case, factorization: Any, rounds: int) -> dict[str, Any]:
    """Both sides in turn; times in seconds, scores by ``Case.score``."""
    ours, theirs = [], []
    strategy = other = None
    for i in range(rounds):
        seconds, strategy = _timed(case.ours)
        ours.append(seconds)
        wanted = case.peer is not None and factorization is not None
        if wanted and i < (case.peer_rounds or rounds):
            assert case.peer is not None
            seconds, other = _timed(lambda: case.peer(factorization))  # type: ignore[misc]
            theirs.append(seconds)
    assert strategy is not None
    result: dict[str, Any] = {
        "name": case.name,
        "seconds": statistics.median(ours),
        "error": case.score(strategy),
        "target_seconds": case.seconds,
        "target_error": case.error,
    }
    if other is not None:
        later = statistics.median(theirs[1:] or theirs)
        result |= {
            "peer_first_seconds": theirs[0],
            "peer_seconds": later,
            "peer_error": case.score(other),
            "ratio": later / result["seconds"],
        }
    return result


def main() -> None:
    """Print a line a case and write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="cases whose name contains one of these")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import jax
        from jax_privacy import matrix_factorization as factorization

        jax.config.update("jax_enable_x64", True)
    except ModuleNotFoundError:
        factorization = None
    machine = results.machine("jax_privacy", load=True)
    chosen = [c for c in cases() if not options.only or any(o in c.name for o in options.only)]
    rows = []
    for case in tqdm(chosen, leave=False):  # written after every case: some take minutes
        rows.append(measure(case, factorization, options.rounds))
        table = results.Table(COLUMNS, rows)
        results.publish(
            options.json,
            {"strategies": table},
            script=__file__,
            machine=machine,
            quiet=len(rows) < len(chosen),
        )


if __name__ == "__main__":
    main()
