"""The one value that the loader, the optimizer, the accountant and the checkpoint share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.core import Adjacency, checks, digest, parsed
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

FORMAT = 1

# Column norms of C outside have squares that float64 cannot hold well: sensitivities would come out
# as 0 or ∞, and float32 noise as neither.
_SMALLEST_NORM, _LARGEST_NORM = 1e-30, 1e30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MatrixMechanism:
    """A matrix mechanism: how examples take part, how noise is correlated, and how much of it.

    Step t releases ``Σ_i clip(g_i, R) + σ R (C^-1 Z)_t``, which is as private as C x + σ z
    (docs/theory/mechanism.md#thm-factorization). The strategy is bound to the scheme's number of
    steps on construction, so its coefficients are part of the value.

    Args:
        scheme: the sampling scheme; it fixes the number of steps n.
        strategy: the strategy matrix C.
        noise_multiplier: σ ≥ 0; 0 trains without noise (and without a guarantee).

    Raises:
        TypeError: if scheme, strategy or σ is of another type.
        ValueError: if σ is negative or not finite, the strategy does not fit n steps, or its
            coefficients are out of the range of floating-point numbers.
    """

    scheme: Scheme
    strategy: Strategy
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.instance("scheme", self.scheme, Scheme, example="Poisson.for_batch_size(...)")
        checks.instance("strategy", self.strategy, Strategy, example="BandMF(bands=16)")
        sigma = checks.number("noise_multiplier", self.noise_multiplier, minimum=0)
        object.__setattr__(self, "noise_multiplier", sigma)
        steps = checks.steps(self.scheme.steps, owner=type(self.scheme).__name__)
        bound = self.strategy.bind(steps)
        _check_scale(bound, self.scheme.steps)
        object.__setattr__(self, "strategy", bound)

    @property
    def steps(self) -> int:
        """Number n of optimizer steps."""
        return self.scheme.steps

    @property
    def participants(self) -> MatrixMechanism:
        """The mechanism that accountants are asked about: itself, or that of whoever is drawn.

        Where the units of a scheme take part as the examples of another one do
        (``Scheme.participants``), every theorem about those examples holds for the units
        (docs/theory/users.md#thm-users-averaged).
        """
        drawn = self.scheme.participants
        return self if drawn is self.scheme else dataclasses.replace(self, scheme=drawn)

    def with_noise(self, noise_multiplier: float) -> MatrixMechanism:
        """The same scheme and strategy at another σ."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def prefix(self, steps: int) -> MatrixMechanism | None:
        """A mechanism that releases what the first ``steps`` steps do, and perhaps a little more.

        C is lower triangular, so that they release C[:t, :t] x_{:t} + σ z_{:t}: the leading block
        of C on the first t batches (docs/theory/run.md#thm-prefix). ``None`` where scheme or
        strategy know none that begins alike (``Scheme.prefix``, ``Strategy.prefix``).

        Args:
            steps: t in 1..n; schemes of whole epochs round it up to these.
        """
        t = checks.integer("steps", steps, maximum=self.steps)
        scheme = self.scheme.prefix(t)
        strategy = None if scheme is None else self.strategy.prefix(scheme.steps)
        if scheme is None or strategy is None:
            return None
        return MatrixMechanism(
            scheme=scheme, strategy=strategy, noise_multiplier=self.noise_multiplier
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value; ``from_dict`` reads it back."""
        return {
            "format": FORMAT,
            "scheme": self.scheme.to_dict(),
            "strategy": self.strategy.to_dict(),
            "noise_multiplier": self.noise_multiplier,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> MatrixMechanism:
        """Read what ``to_dict`` wrote.

        Raises:
            ValueError: if the format, a type or a field is unknown.
        """
        expected = {"format", "scheme", "strategy", "noise_multiplier"}
        if not isinstance(value, Mapping) or set(value) != expected:
            got = sorted(map(str, value)) if isinstance(value, Mapping) else checks.shown(value)
            raise ValueError(f"a mechanism must have the fields {sorted(expected)}, but has {got}")
        if value["format"] != FORMAT:
            raise ValueError(f"mechanism format {value['format']!r} is unknown; known: {FORMAT}")
        try:
            return cls(
                scheme=Scheme.from_dict(value["scheme"]),
                strategy=Strategy.from_dict(value["strategy"]),
                noise_multiplier=value["noise_multiplier"],
            )
        except TypeError as error:
            raise ValueError(f"mechanism: {error}") from error

    def to_json(self) -> str:
        """JSON text of ``to_dict``."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> MatrixMechanism:
        """Read what ``to_json`` wrote.

        Raises:
            TypeError: if it is no text.
            ValueError: if it is no JSON, or not of a mechanism.
        """
        return cls.from_dict(parsed(text, "mechanism"))

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency of its guarantees: add-or-remove where N is private, else zero-out."""
        private = self.scheme.nominal_size is not None
        return Adjacency.ADD_REMOVE if private else Adjacency.ZERO_OUT

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of what may be published: the same in every process and Python version.

        Statements print it, so it says nothing about N where that is private
        (``Scheme.published``).
        """
        return digest({**self.to_dict(), "scheme": self.scheme.published()})

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MatrixMechanism):
            return NotImplemented
        return self.to_dict() == other.to_dict()


def _check_scale(strategy: Strategy, steps: int) -> None:
    with np.errstate(over="ignore", under="ignore"):
        norms = strategy.column_norms(steps)
    # The negation also catches NaN, which compares false with everything.
    wrong = np.flatnonzero(~((norms >= _SMALLEST_NORM) & (norms <= _LARGEST_NORM)))
    if wrong.size:
        t = int(wrong[0])
        raise ValueError(
            f"strategy={type(strategy).__name__}: column {t} of C has the norm {norms[t]:.3g}, "
            f"outside {_SMALLEST_NORM:g}..{_LARGEST_NORM:g}, where privacy and noise cannot be "
            "computed: scale its coefficients to about 1 (a common factor of C and σ cancels)"
        )
