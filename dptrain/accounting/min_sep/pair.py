"""The pair of distributions of b-min-sep sampling, and draws of one example's participations."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.accounting.base.accountant import truncation_refusal
from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies.toeplitz import BandedToeplitz

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MinSepLaw:
    """The pair P = C x + N(0, σ²I), Q = N(0, σ²I) of b-min-sep sampling, σ left open.

    Args:
        coefficients: first column of the Toeplitz strategy C, shape (bands,), non-negative.
        probability: p in (0, 1], chance to take part when not barred.
        min_sep: b ≥ bands; after a participation the next b-1 steps are barred.
        steps: n ≥ 1.
        warm_start: whether the bar is stationary at the start (Dong & Ganesh 2026, Algorithm 2,
            arXiv 2602.09338)
            rather than absent (Algorithm 1).

    Raises:
        ValueError: if a value is out of range, or bands exceed min_sep (the recursion needs
            participations that touch disjoint rows).
    """

    coefficients: Array
    probability: float
    min_sep: int
    steps: int
    warm_start: bool

    def __post_init__(self) -> None:
        c = np.array(self.coefficients, dtype=np.float64)
        if c.ndim != 1 or c.size == 0 or not np.isfinite(c).all() or (c < 0).any() or not c.any():
            raise ValueError("coefficients: must be a non-zero vector of finite values ≥ 0")
        checks.probability("probability", self.probability)
        checks.steps(self.steps)
        if c.size > self.min_sep:
            raise ValueError(
                f"{c.size} bands with min_sep={self.min_sep}: bands must not exceed min_sep; "
                "use fewer bands or a larger min_sep"
            )
        c = c[: self.steps]
        c.setflags(write=False)
        object.__setattr__(self, "coefficients", c)

    @property
    def bands(self) -> int:
        """Number of coefficients that fit into n rows."""
        return int(self.coefficients.size)

    @property
    def squared_norms(self) -> Array:
        """‖c_i‖² of every column, shape (steps,); the last bands-1 columns are cut at row n."""
        cut = np.cumsum(self.coefficients**2)
        rows_left = np.arange(self.steps, 0, -1)
        return cut[np.minimum(rows_left, self.bands) - 1]

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖ over patterns: columns b apart are orthogonal and norms never grow with i."""
        return math.sqrt(float(self.squared_norms[:: self.min_sep].sum()))

    @property
    def participation(self) -> float:
        """Chance that an example takes part at all, rounded up: the total variation at most.

        It bounds δ(ε) in both directions (docs/theory/min-sep.md#thm-participation;
        ``test_who_hardly_ever_takes_part_loses_nothing``).
        """
        p, barred = self.probability, np.zeros(1)
        weights = np.ones(1)
        if self.warm_start and self.min_sep > 1:
            # Barred for the next s steps: s = 0 has weight 1 and each of 1..b-1 has weight p.
            barred = np.arange(min(self.min_sep, self.steps), dtype=np.float64)
            weights = np.where(barred == 0, 1.0, p) / (1.0 + (self.min_sep - 1) * p)
        free = self.steps - barred
        never = free * math.log1p(-p) if p < 1.0 else np.full(free.shape, -math.inf)
        return min(float(weights @ -np.expm1(never)) * (1.0 + 1e-12), 1.0)

    @property
    def add_limit(self) -> float:
        """The largest privacy loss of the add direction, -log Pr[x = 0], rounded up.

        δ(ε) = 0 from there on (docs/theory/min-sep.md#thm-participation;
        ``test_no_loss_of_the_add_direction_is_above_its_limit``).
        """
        took_part = self.participation
        return -math.log1p(-took_part) * (1.0 + 1e-12) if took_part < 1.0 else math.inf

    @functools.cached_property
    def column_products(self) -> Array:
        """[k, d] = Σ_{j<k} c_j c_{j+d}: of columns d apart, cut k rows into the later one."""
        c, bands = self.coefficients, self.bands
        products = np.zeros((bands + 1, bands))
        for d in range(bands):
            sums = np.cumsum(c[: bands - d] * c[d:])
            products[1:, d] = sums[np.minimum(np.arange(bands), bands - d - 1)]
        return products

    def overlaps(self, step: int) -> Array:
        """<c_t, c_{t-d}> of t = ``step``, d = 0..b-1; 0 for what was before the first step."""
        products, seen = np.zeros(self.min_sep), min(self.bands, step + 1)
        products[:seen] = self.column_products[min(self.bands, self.steps - step), :seen]
        return products

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything the losses depend on, except σ."""
        return {
            "coefficients": self.coefficients.tolist(),
            "probability": self.probability,
            "min_sep": self.min_sep,
            "steps": self.steps,
            "warm_start": self.warm_start,
        }

    @property
    def block_rows(self) -> int:
        """Rows of the sliding products computed by one matrix product."""
        return max(16, self.bands)


def participations(law: MinSepLaw, rng: np.random.Generator, size: int) -> tuple[Indices, Indices]:
    """Participation times of ``size`` examples, drawn by their gaps.

    Returns:
        (times, lanes): one entry per participation, times ascending.
    """
    start: npt.NDArray[np.float64] = np.zeros(size)
    if law.warm_start and law.min_sep > 1:
        # Barred for the next s steps: s = 0 has weight 1 and each of 1..b-1 has weight p.
        u = rng.random(size) * (1.0 + (law.min_sep - 1) * law.probability)
        start = np.where(
            u < 1.0, 0.0, np.minimum(1.0 + (u - 1.0) // law.probability, law.min_sep - 1)
        )
    rate = -math.log1p(-law.probability) if law.probability < 1.0 else math.inf
    # numpy sorts 16-bit keys by radix, eight times faster than wider ones.
    key = np.uint16 if law.steps < 1 << 16 else np.int64
    found, at = [np.empty(0, dtype=key)], start
    while True:
        # floor(Exp/rate) is geometric on 0, 1, …: Pr[> k] = e^{-rate (k+1)} = (1-p)^{k+1}.
        at = at + np.floor(rng.standard_exponential(size) / rate)
        if at.min(initial=law.steps) >= law.steps:
            break
        found.append(np.minimum(at, law.steps).astype(key))
        at = at + law.min_sep
    # Time n stands for "none left" and is sorted to the end.
    keys = np.concatenate(found)
    order = np.argsort(keys, kind="stable")[: np.count_nonzero(keys < law.steps)]
    return keys[order].astype(np.int64), order % size


def min_sep_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for MinSep, BallsInBins, Poisson, not cut, with a banded Toeplitz C, bands ≤ b."""
    if reason := truncation_refusal(mechanism.scheme):
        return reason
    if not isinstance(mechanism.scheme, MinSep | BallsInBins | Poisson):
        name = type(mechanism.scheme).__name__
        return f"{name} sampling is not b-min-sep, balls-in-bins or Poisson"
    return banded_refusal(mechanism)


def covered_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for what ``min_sep_refusal`` covers, and for MinSep whose batches are cut."""
    if isinstance(mechanism.scheme, MinSep):
        return banded_refusal(mechanism)
    return min_sep_refusal(mechanism)


def whole_batches(mechanism: MatrixMechanism) -> MatrixMechanism:
    """The same mechanism without a largest batch."""
    scheme = mechanism.scheme
    if scheme.max_batch_size is None:
        return mechanism
    assert isinstance(scheme, MinSep)
    return dataclasses.replace(mechanism, scheme=dataclasses.replace(scheme, max_batch_size=None))


def banded_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for a banded Toeplitz C with bands ≤ b."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if not isinstance(strategy, BandedToeplitz):
        return f"{type(strategy).__name__} is not a banded Toeplitz strategy"
    if strategy.bands > scheme.min_sep:
        return (
            f"{strategy.bands} bands exceed the minimum separation b = {scheme.min_sep}; "
            "use at most b bands"
        )
    return None


def min_sep_law(mechanism: MatrixMechanism) -> MinSepLaw:
    """The law of a mechanism that ``min_sep_refusal`` does not refuse.

    Two further schemes have the law of b-min-sep sampling for one example, which is all that the
    pair (P, Q) depends on:

    * ``BallsInBins(b)`` is MinSep(p = 1, warm start): the warm start is available with weight 1 or
      barred for s = 1..b-1 steps with weight p = 1 each, so the first participation is uniform on
      the first b steps, and with p = 1 the example returns exactly every b steps.
    * ``Poisson(p)`` is MinSep(b = 1): nothing is ever barred. (With one band, composition is
      sharper and quicker.)
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    assert isinstance(strategy, BandedToeplitz)
    checks.invariant(
        scheme.max_batch_size is None, "this simulation does not cover truncated batches"
    )
    probability, warm_start = 1.0, True
    if isinstance(scheme, MinSep):
        probability, warm_start = scheme.probability, scheme.warm_start
    elif isinstance(scheme, Poisson):
        probability = scheme.probability
    return MinSepLaw(
        coefficients=strategy.first_column(scheme.steps),
        probability=probability,
        min_sep=scheme.min_sep,
        steps=scheme.steps,
        warm_start=warm_start,
    )
