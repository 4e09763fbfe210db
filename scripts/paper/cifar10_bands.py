"""Bands and separations for cifar10_fig4.py: the least predicted error of the averaged gradient.

For each ε, scheme and number of bands of Dong & Ganesh 2026 (arXiv 2602.09338), section 7.2, the
noise is calibrated as for training, and the error of the prefix sums of averaged gradients is
RMSE·σ/B̄ per unit of R. Nothing here looks at the data. Pairs that are in the results are not
calibrated again.

    PYTHONPATH=. python scripts/paper/cifar10_bands.py [--epsilons 8 1]
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from dptrain import BallsInBins, BandMF, CyclicPoisson, MinSep, calibrate
from dptrain.sampling import Scheme
from scripts import results

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "cifar10_bands.json"
SIZE, EPOCH_LENGTH, STEPS = 50_000, 300, 1500
DELTA = 1 / (2 * SIZE)
BANDS = (4, 8, 16, 32, 64)  # the paper's begin at 2
SEPARATIONS = (75, 150)  # beside the number of bands itself
TITLES = {"cyclic": "`CyclicPoisson`", "balls-in-bins": "`BallsInBins`", "min-sep": "`MinSep`"}
COLUMNS = (
    ("ε", "{epsilon:g}"),
    ("scheme", "{title}"),
    ("bands", "{bands}"),
    ("separation", "{min_sep}", ""),
    ("σ", "{sigma:.4f}"),
    ("predicted error", "{error:.4f}"),
)


def scheme(name: str, bands: int, separation: int | None, size: int) -> Scheme:
    """The scheme of a name at the paper's expected batch size, for a training set of ``size``."""
    sizes: dict[str, Any] = {
        "batch_size": size / EPOCH_LENGTH, "dataset_size": size, "steps": STEPS,
    }  # fmt: skip
    if name == "cyclic":
        return CyclicPoisson.for_batch_size(cycle=bands, **sizes)
    if name == "balls-in-bins":
        return BallsInBins.for_batch_size(**sizes)
    assert separation is not None
    return MinSep.for_batch_size(min_sep=separation, **sizes)


def candidates() -> Iterator[tuple[str, int, int | None]]:
    """Name, bands and separation of all that are compared."""
    for bands in BANDS:
        yield "cyclic", bands, None
        yield "balls-in-bins", bands, None
        for separation in sorted({bands, *SEPARATIONS}):
            yield "min-sep", bands, separation


def epsilons() -> tuple[float, ...]:
    """Every ε of which all candidates are in the results, ascending."""
    needed = len(list(candidates()))
    counts = collections.Counter(row["epsilon"] for row in tried())
    return tuple(sorted(epsilon for epsilon, count in counts.items() if count == needed))


def best(epsilon: float) -> dict[str, dict[str, Any]]:
    """By scheme, the entry of the results with the least error at ε.

    Raises:
        ValueError: if there is none; this script makes them.
    """
    rows = [row for row in tried() if row["epsilon"] == epsilon]
    found = {
        name: min((row for row in rows if row["scheme"] == name), key=lambda row: row["error"])
        for name in dict.fromkeys(row["scheme"] for row in rows)
    }
    if not found:
        raise ValueError(
            f"epsilon={epsilon:g}: {RESULTS.name} has no entry; run scripts/paper/cifar10_bands.py "
            f"--epsilons {epsilon:g} first"
        )
    return found


def tried() -> list[dict[str, Any]]:
    """All rows of the results."""
    found: list[dict[str, Any]] = results.read(RESULTS).get("tried", [])
    return found


def main() -> None:
    """Calibrate what is missing and print the best."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0, 8.0])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = tried()
    known = {(r["epsilon"], r["scheme"], r["bands"], r["min_sep"]) for r in rows}
    missing = [
        (epsilon, *candidate)
        for epsilon in options.epsilons
        for candidate in candidates()
        if (epsilon, *candidate) not in known
    ]
    for epsilon, name, bands, separation in tqdm(missing, desc="calibrating", unit="mechanism"):
        found = calibrate(
            scheme=scheme(name, bands, separation, SIZE),
            strategy=BandMF(bands=bands),
            epsilon=epsilon,
            delta=DELTA,
        ).mechanism
        error = found.strategy.rmse(STEPS) * found.noise_multiplier
        rows.append(
            {
                "epsilon": epsilon,
                "scheme": name,
                "bands": bands,
                "min_sep": separation,
                "sigma": found.noise_multiplier,
                "error": error / found.scheme.expected_batch_size,
            }
        )
        write(rows, quiet=True)
    write(rows)


def write(rows: list[dict[str, Any]], quiet: bool = False) -> None:
    """Keep all rows, and those with the least error of their ε and scheme as a table."""
    best: dict[tuple[float, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["epsilon"], row["scheme"])
        if key not in best or row["error"] < best[key]["error"]:
            best[key] = {"title": TITLES[row["scheme"]], **row}
    shown = sorted(best.values(), key=lambda row: row["epsilon"])
    tables = {RESULTS.stem: results.Table(COLUMNS, shown)}
    results.publish(RESULTS, tables, script=__file__, quiet=quiet, tried=rows)


if __name__ == "__main__":
    main()
