"""The number of runs of a random search: distributions that hide it.

(docs/theory/selection.md#thm-selection; Papernot & Steinke 2022, Definition 1, arXiv 2110.03620.)
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from scipy.special import gammaln

from dptrain.accounting.losses import least_true
from dptrain.core import Array, checks

_MOST = 1_000_000  # trials: a number drawn beyond has a chance that vanishes in double precision


class TrialCount(ABC):
    """The law of the number K of independent runs, which is drawn before the first and kept secret.

    The number must not depend on the data, and everybody may know its law.
    """

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[K]."""

    @abstractmethod
    def weight(self, better: Array) -> Array:
        """E[K (1 - a)^(K-1)] at each a in ``better``, in [0, 1]; its shape.

        The density, relative to that of a single run, with which an output is chosen that a run
        beats with probability a. It falls in a, from E[K] on.
        """

    @abstractmethod
    def probabilities(self, most: int) -> Array:
        """P[K = k] for k = 0, …, ``most``; shape (most + 1,)."""

    @abstractmethod
    def describe(self) -> str:
        """The law in words."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value: ``type`` and the fields."""

    def quantile(self, probability: float) -> int:
        """The least k with P[K ≤ k] ≥ ``probability``.

        Raises:
            ValueError: if the probability is not in (0, 1), or more than a million trials may
                be needed.
        """
        probability = checks.number("probability", probability, above=0, below=1)
        most = min(max(16, math.ceil(4 * self.mean)), _MOST)
        while True:
            reached = np.flatnonzero(np.cumsum(self.probabilities(most)) >= probability)
            if reached.size:
                return int(reached[0])
            if most >= _MOST:
                raise ValueError(
                    f"{self.describe()}: more than {_MOST} trials may be needed; choose a smaller "
                    "mean or a larger shape"
                )
            most = min(4 * most, _MOST)

    def draw(self) -> int:
        """K, from the operating system's entropy: whoever knew a seed would know the number."""
        uniform = (secrets.randbelow(2**53) + 0.5) / 2**53
        return self.quantile(uniform)


@dataclasses.dataclass(frozen=True)
class NegativeBinomialTrials(TrialCount):
    """K ≥ 1 of a negative binomial law that is truncated at 0.

    Of one shape η = 1 it is geometric: after every run one stops with probability γ. η = 0 is
    logarithmic. The smaller η, the less the choice costs for one mean, and the wider K spreads.

    Args:
        stopping: γ in (0, 1).
        shape: η > -1.

    Raises:
        TypeError: if a number is of another type.
        ValueError: if it is out of range.
    """

    stopping: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stopping", checks.number("stopping", self.stopping, above=0, below=1)
        )
        object.__setattr__(self, "shape", checks.number("shape", self.shape, above=-1))

    @classmethod
    def with_mean(cls, mean: float, *, shape: float = 1.0) -> NegativeBinomialTrials:
        """The one of this shape whose mean is ``mean`` > 1, to a relative 1e-9, rounded down."""
        mean = checks.number("mean", mean, above=1, remedy="10 trials are a common choice")
        shape = checks.number("shape", shape, above=-1)
        if shape == 1.0:
            return cls(1.0 / mean)
        # The mean grows as γ falls; on log γ, so that every γ has the same relative precision.
        log_stopping = least_true(
            lambda at: cls(math.exp(at), shape).mean <= mean,
            low=-60.0,
            high=-1e-12,
            tolerance=1e-11,
        )
        return cls(math.exp(log_stopping), shape)

    @property
    def _once(self) -> float:
        """P[K = 1]."""
        steps = -math.log(self.stopping)
        if self.shape == 0.0:
            return (1.0 - self.stopping) / steps
        return (1.0 - self.stopping) * self.shape / math.expm1(self.shape * steps)

    @property
    def mean(self) -> float:
        """E[K]."""
        return self._once * self.stopping ** (-1.0 - self.shape)

    def weight(self, better: Array) -> Array:
        """E[K] (1 + a (1-γ)/γ)^(-1-η)."""
        odds = (1.0 - self.stopping) / self.stopping
        return np.asarray(self.mean * (1.0 + odds * better) ** (-1.0 - self.shape))

    def probabilities(self, most: int) -> Array:
        """P[K = k] for k = 0, …, ``most``."""
        k = np.arange(1.0, most)
        ratios = (1.0 - self.stopping) * (k + self.shape) / (k + 1.0)
        positive = self._once * np.concatenate([[1.0], np.cumprod(ratios)])
        return np.concatenate([[0.0], positive])[: most + 1]

    def describe(self) -> str:
        """The law in words."""
        names = {1.0: "geometric", 0.0: "logarithmic"}
        name = names.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")
        return f"{name} with mean {self.mean:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        return {"type": "NegativeBinomialTrials", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class PoissonTrials(TrialCount):
    """K of a Poisson law: the number varies least. With K = 0 nothing is released.

    Args:
        expected: the mean, > 0.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not positive and finite.
    """

    expected: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "expected", checks.number("expected", self.expected, above=0))

    @property
    def mean(self) -> float:
        """E[K]."""
        return self.expected

    def weight(self, better: Array) -> Array:
        """μ e^(-μ a)."""
        return np.asarray(self.expected * np.exp(-self.expected * better))

    def probabilities(self, most: int) -> Array:
        """P[K = k] for k = 0, …, ``most``."""
        k = np.arange(0.0, most + 1)
        return np.asarray(np.exp(k * math.log(self.expected) - self.expected - gammaln(k + 1.0)))

    def describe(self) -> str:
        """The law in words."""
        return f"Poisson with mean {self.expected:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        return {"type": "PoissonTrials", **dataclasses.asdict(self)}
