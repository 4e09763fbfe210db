"""Estimate, verify, release: the noise level that a simulation certifies for b-min-sep sampling."""

from __future__ import annotations

import importlib.metadata
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from dptrain.accounting import certificate_cache, gaussian
from dptrain.accounting.hockey_stick import hockey_stick
from dptrain.accounting.simulation import DIRECTIONS, Simulation, default_threads, loss_chunks
from dptrain.accounting.verify import Verdict, samples_needed

Array = npt.NDArray[np.float64]

METHOD = 2  # raise it when the meaning of a certificate changes: it is part of the cache's key
STEP = 1.01
# Steps of the grid around the estimate; shared noise makes a further σ cheap, and the far ones
# catch an estimate that came out too low before the unamplified Gaussian has to.
OFFSETS = (-1, 0, 1, 2, 4, 8, 16)
ESTIMATE, VERIFY = 0, 1  # purposes of the random streams, never shared


def fresh_seed(seed: int | None) -> int:
    """``seed``, or 128 fresh random bits.

    Raises:
        ValueError: if the seed is negative.
    """
    if seed is None:
        return secrets.randbits(128)
    if seed < 0:
        raise ValueError(f"seed={seed}: must not be negative")
    return int(seed)


def certify_noise(
    simulation: Simulation,
    *,
    epsilon: float,
    delta: float,
    seed: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The least σ of a declared grid that a simulation certifies for (ε, δ), and the evidence.

    Estimate-verify-release without an empty output (Dong & Ganesh 2026, Appendix A):

    1. *Estimate.* A rough σ from a few samples.
    2. *Declare.* A grid of powers of 1.01 around it; on top a σ that the unamplified Gaussian
       mechanism shows to be (ε, δ_v)-DP, so that it needs no verdict.
    3. *Verify.* s fresh samples a direction; a σ is accepted if the mean of (1 - e^{ε-L})_+ is at
       most δ' in both. The answer is the smallest σ such that it and all larger ones accept.

    The run with that σ is (ε, δ_v + q(1-δ_v))-DP end to end, which is at most (ε, δ). Why:

    * Privacy grows with σ. Let σ_j be the largest grid point that is not (ε, δ_v)-DP. A bad σ is
      released only if σ_j is accepted: a single event, whatever the other verdicts. σ_j violates
      at least one direction, and acceptance needs both, so that event has probability ≤ q with
      q not doubled, and neither the directions nor the σ need samples independent of each other:
      only the s samples of one σ in one direction do. Hence one set of normals serves the whole
      grid and both directions.
    * Given the grid, all of this holds whatever the grid is, as long as the verifying samples are
      independent of it. Estimate and verification draw from different streams of one seed, so the
      estimate may choose the grid.
    * A verdict may reject as soon as the partial sum exceeds s·δ' (terms are ≥ 0), and a rejected
      σ makes all smaller ones irrelevant; nothing is accepted before all s samples are in.

    Every further attempt for the same purpose (another seed, a rerun until the answer pleases)
    adds its q. With ``cache`` a certificate is made once and reused with its seeds and verdicts,
    whatever ``seed`` says: the natural way not to repeat an attempt.

    Args:
        simulation: the pair of distributions.
        epsilon: ε ≥ 0.
        delta: δ in (0, 1).
        seed: of all streams; by default 128 fresh random bits. Recorded. It must not depend on the
            data or the training run.
        threads: number of threads; by default all cores. It does not change the result.
        progress: whether to show a progress bar (after two seconds).
        cache: directory of certificates, made if missing; ``None`` for no cache.

    Returns:
        JSON-ready certificate; ``"noise_multiplier"`` is σ.

    Raises:
        ValueError: if ε or δ is out of range, or a cached file is corrupt.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0.0):
        raise ValueError(f"epsilon={epsilon}: must be finite and not negative")
    verdict = samples_needed(delta)
    request = {
        "method": METHOD,
        "law": simulation.to_dict(),
        "epsilon": epsilon,
        "delta": delta,
        "samples": verdict.samples,
        "threshold": verdict.threshold,
        "package": package_version(),
    }
    if cache is not None and (found := certificate_cache.load(Path(cache), request)) is not None:
        return found
    seed = fresh_seed(seed)
    threads = threads or default_threads()
    ceiling = simulation.sensitivity / gaussian.largest_mu(epsilon, verdict.violated)
    guess = _estimate(simulation, epsilon, verdict.threshold, ceiling, seed, threads, progress)
    grid = declare_grid(guess, ceiling)
    sigmas = [STEP**exponent for exponent in grid]
    rows = verify_grid(
        simulation,
        sigmas,
        epsilon=epsilon,
        verdict=verdict,
        seed=seed,
        threads=threads,
        progress=progress,
    )
    for exponent, row in zip(grid, rows, strict=True):
        row["exponent"] = exponent
    certificate = {
        "request": request,
        "seed": str(seed),
        "streams": "SFC64 of SeedSequence([seed, purpose], spawn_key=(chunk,)), shared by the "
        f"directions; purpose {ESTIMATE} estimate (and its round), {VERIFY} verify",
        "chunks": {"samples": simulation.lanes, "count": -(-verdict.samples // simulation.lanes)},
        "epsilon_slack": simulation.slack,
        "violated": verdict.violated,
        "failure_probability": verdict.failure,
        "delta_proved": verdict.delta,
        "estimate": guess,
        "grid": rows,
        "ceiling": {"noise_multiplier": ceiling, "shown_by": "unamplified Gaussian mechanism"},
        "noise_multiplier": certificate_cache.chosen_noise(rows, ceiling),
        "versions": {"numpy": np.__version__, "torch": torch.__version__},
    }
    if cache is not None:
        certificate_cache.store(Path(cache), request, certificate)
    return certificate


def declare_grid(guess: float, ceiling: float) -> list[int]:
    """Exponents k of the grid 1.01^k around ``guess``, ascending, all below ``ceiling``."""
    centre = round(math.log(guess) / math.log(STEP))
    return [centre + offset for offset in OFFSETS if STEP ** (centre + offset) < ceiling]


def verify_grid(
    simulation: Simulation,
    sigmas: Sequence[float],
    *,
    epsilon: float,
    verdict: Verdict,
    seed: int,
    threads: int,
    progress: bool,
) -> list[dict[str, Any]]:
    """Verdicts for ascending σ: a JSON-ready row each, see :func:`certify_noise`.

    A row carries for each direction the mean over the samples it used and whether it was accepted:
    ``None`` where a larger σ or the other direction was rejected before this one was decided. Both
    directions read the same normals, so they end at the same number of samples.
    """
    rows: list[dict[str, Any]] = [
        {"noise_multiplier": float(sigma), "remove": None, "add": None, "accepted": False}
        for sigma in sigmas
    ]
    standing = [row["noise_multiplier"] for row in rows]
    lowest, used = 0, 0  # every σ below lowest has been ruled out
    sums = np.zeros((len(DIRECTIONS), len(rows)))
    limit = verdict.samples * verdict.threshold

    def record(row: int, decisions: Sequence[bool | None]) -> None:
        for index, direction in enumerate(DIRECTIONS):
            mean = float(sums[index, row]) / used
            rows[row][direction] = {"mean": mean, "samples": used, "accepted": decisions[index]}

    if not rows:
        return rows
    with tqdm(
        total=2 * verdict.samples, desc="certify σ", unit="sample", unit_scale=True,
        disable=not progress, delay=2.0,
    ) as bar:  # fmt: skip
        for block in loss_chunks(
            simulation, standing, "both", seed=[seed, VERIFY], samples=verdict.samples,
            threads=threads, shrinking=True,
        ):  # fmt: skip
            terms = hockey_stick(
                block[:, block.shape[1] - len(standing) :], epsilon - simulation.slack
            )
            sums[:, lowest:] += terms.sum(axis=2)
            used += block.shape[2]
            bar.update(2 * block.shape[2])
            # The factor covers the rounding of the sum, on the side of rejection.
            over = sums * (1 + 1e-12) > limit
            rejected = np.nonzero(over[:, lowest:].any(axis=0))[0] + lowest
            if rejected.size:
                last = int(rejected[-1])
                for row in range(lowest, last + 1):
                    record(row, [False if over[index, row] else None for index in (0, 1)])
                del standing[: last + 1 - lowest]
                lowest = last + 1
            if not standing:
                break
    for row in range(lowest, len(rows)):
        record(row, (True, True))
        rows[row]["accepted"] = True
    assert lowest == len(rows) or used == verdict.samples
    return rows


def _estimate(
    simulation: Simulation,
    epsilon: float,
    target: float,
    ceiling: float,
    seed: int,
    threads: int,
    progress: bool,
) -> float:
    """A σ whose δ(ε) is near ``target``: proves nothing, only centres the grid."""

    def deltas(sigmas: list[float], hits: float, label: int) -> Array:
        samples = math.ceil(hits / target)
        totals = np.zeros((len(DIRECTIONS), len(sigmas)))
        with tqdm(
            total=2 * samples, desc="estimate σ", unit="sample", unit_scale=True,
            disable=not progress, delay=2.0, leave=False,
        ) as bar:  # fmt: skip
            for block in loss_chunks(
                simulation,
                sigmas,
                "both",
                seed=[seed, ESTIMATE, label],
                samples=samples,
                threads=threads,
            ):
                totals += hockey_stick(block, epsilon).sum(axis=2)
                bar.update(2 * block.shape[2])
        worst: Array = totals.max(axis=0) / samples
        return worst

    # Coarse: walk down from the unamplified Gaussian until the target is exceeded.
    above, label = ceiling, 0
    while True:
        trial = [above / 1.3, above / 1.3**2, above / 1.3**3]
        over = np.nonzero(deltas(trial, 4.0, label) > target)[0]
        label += 1
        if over.size:
            below = trial[over[0]]
            above = below * 1.3
            break
        above = trial[-1]
        assert label < 200, "the privacy loss does not grow as the noise vanishes"
    # Fine: interpolate log δ over log σ in the bracket, a little wider for the coarse errors.
    sigmas = list(np.geomspace(below / 1.1, min(above * 1.1, ceiling), 4))
    values = np.maximum.accumulate(deltas(sigmas, 12.0, label)[::-1])
    logs = np.log(np.maximum(values, target * 1e-3))
    return float(np.exp(np.interp(math.log(target), logs, np.log(sigmas[::-1]))))


def package_version() -> str:
    """Version of the installed package, or a remark that it runs from a source tree."""
    try:
        return importlib.metadata.version("dptrain")
    except importlib.metadata.PackageNotFoundError:
        return "source tree, not installed"
