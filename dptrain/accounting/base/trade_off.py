"""The reach of attacks: the trade-off curve behind a profile, and the Gaussian one below it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from dptrain.accounting.base.accountant import Profile
from dptrain.accounting.base.curve import convex_envelope
from dptrain.accounting.base.statement import SMALLEST_DELTA
from dptrain.accounting.losses import gaussian
from dptrain.core import Adjacency, Array, Guarantee, Kind, Unit, checks, parsed

RATES = (0.1, 0.01, 0.001, 1e-4, 1e-5)
"""False positive rates at which attacks are reported, as far as they are not below the floor."""

LEAST_FLOOR = 1e-12  # below, 1 - rate has too few digits left for a quantile

_LARGEST_EPSILON = 700.0  # e^ε is a number; leaving a bound out is always allowed
_PAD = 8.0 * np.finfo(float).eps
WEAKEST = (Kind.EXACT, Kind.UPPER_BOUND, Kind.VERIFIED, Kind.CONFIDENCE, Kind.ESTIMATE)
"""Kinds of statements from the strongest to the weakest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TradeOff:
    """Power of any test of all that is released to tell which of two neighboring data sets it was.

    A *positive* says that the protected contribution was there. Of a test with false positive rate
    α and false negative rate β every (ε, δ) allows, both orders of the data sets taken together,
    1 - β ≤ δ_remove + e^ε α and 1 - α ≤ δ_add + e^ε β, so finitely many ε bound β from below by a
    convex polygon f(α): nothing has to be assumed between or beyond them. μ is the least number
    with 1 - β ≤ Φ(Φ⁻¹(α) + μ) on the polygon for α, β ≥ ``floor``, which its corners decide.
    (docs/theory/composition.md#thm-trade-off;
    ``test_no_likelihood_ratio_test_does_better_than_is_claimed``).

    There has to be a floor: near rates of 0 a sampled Gaussian mechanism is no better than without
    sampling, and of bounds that end at some δ > 0 nothing is known there.

    Attributes:
        epsilon: ε ≥ 0 of the bounds, strictly ascending.
        remove: δ there, of the world with the contribution against the one without.
        add: δ there in the other direction.
        floor: the least rate that μ speaks of, in [1e-12, .5).
        kind: how the bounds were shown, the weakest of all.
        accountant: whose they are.
        adjacency: the neighboring relation, ``None`` if it is not told.
        unit: who is protected, ``None`` if it is not told.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if a field is out of range, or the three have different lengths.
    """

    epsilon: tuple[float, ...]
    remove: tuple[float, ...]
    add: tuple[float, ...]
    floor: float
    kind: Kind
    accountant: str
    adjacency: Adjacency | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        for name, most in (("epsilon", _LARGEST_EPSILON), ("remove", 1.0), ("add", 1.0)):
            values = checks.instance(name, getattr(self, name), tuple)
            kept = tuple(checks.number(name, each, minimum=0, maximum=most) for each in values)
            object.__setattr__(self, name, kept)
            if not 0 < len(kept) == len(self.epsilon):
                raise ValueError(
                    f"{name} has {len(kept)} values for {len(self.epsilon)} values of ε: must have "
                    "one for each, and at least one"
                )
        if any(b <= a for a, b in zip(self.epsilon, self.epsilon[1:], strict=False)):
            raise ValueError("epsilon must be strictly ascending: sort it and merge equal values")
        floor = checks.number("floor", self.floor, minimum=LEAST_FLOOR, below=0.5)
        object.__setattr__(self, "floor", floor)
        checks.instance("kind", self.kind, Kind)
        checks.text("accountant", self.accountant)
        for name, kind in (("adjacency", Adjacency), ("unit", Unit)):
            if getattr(self, name) is not None:
                checks.instance(name, getattr(self, name), kind)

    @classmethod
    def of(
        cls, guarantee: Guarantee, profile: Profile | None = None, *, floor: float | None = None
    ) -> TradeOff:
        """The bounds of a guarantee together with those of a profile of the same mechanism.

        A profile counts where it is proven, each ε for certain (EXACT or UPPER_BOUND). Bounds of a
        simulation may be false one by one, so then the guarantee's own ε and δ are all there is.

        Args:
            guarantee: its (ε, δ) is one of the bounds; an infinite ε says nothing.
            profile: δ over a grid of ε, in both directions.
            floor: the least rate that μ is to speak of; by default the guarantee's δ, which is the
                probability that is left out of account anyway.

        Raises:
            TypeError: if an argument is of another type.
            ValueError: if ``floor`` is out of range, or the profile is about another adjacency,
                unit or mechanism than the guarantee.
        """
        checks.instance("guarantee", guarantee, Guarantee)
        bounds: dict[float, tuple[float, float]] = {}
        kinds: list[Kind] = []
        names: list[str] = []
        if profile is not None:
            checks.instance("profile", profile, Profile).check_about(guarantee)
        if profile is not None and profile.kind in (Kind.EXACT, Kind.UPPER_BOUND):
            kinds.append(profile.kind)
            names.append(profile.accountant)
            columns = (profile.epsilon, profile.remove, profile.add)
            for at, remove, add in zip(*(each.tolist() for each in columns), strict=True):
                _lower(bounds, at, remove, add)
        if math.isfinite(guarantee.epsilon) or not kinds:
            kinds.append(guarantee.kind)
            names.append(guarantee.accountant)
            told = math.isfinite(guarantee.epsilon)
            at, delta = (guarantee.epsilon, guarantee.delta) if told else (0.0, 1.0)
            _lower(bounds, at, delta, delta)
        # An estimate is about the same noise: what is estimated of it makes all of it one.
        kinds += [guarantee.kind] if guarantee.kind is Kind.ESTIMATE else []
        rows = [(at, *both) for at, both in sorted(bounds.items()) if at <= _LARGEST_EPSILON]
        epsilon, remove_side, add_side = zip(*(rows or [(0.0, 1.0, 1.0)]), strict=True)
        if floor is None:
            floor = min(max(guarantee.delta, LEAST_FLOOR), 0.25)
        return cls(
            epsilon=epsilon,
            remove=remove_side,
            add=add_side,
            floor=floor,
            kind=max(kinds, key=WEAKEST.index),
            accountant=", ".join(dict.fromkeys(names)),
            adjacency=guarantee.adjacency,
            unit=guarantee.unit,
        )

    @property
    def reversed(self) -> TradeOff:
        """The same bounds with the roles of the two worlds exchanged."""
        return dataclasses.replace(self, remove=self.add, add=self.remove)

    @functools.cached_property
    def sides(self) -> tuple[Array, Array, Array]:
        """ε from 0 on, and δ (remove, add) there: what the bounds say together, convex in e^ε.

        The first ε is 0, where both have one value. Between two ε the chord in e^ε holds, and
        beyond the last one its δ. Shape (number of ε,) each.
        """
        at = np.array(self.epsilon)
        remove, add = np.array(self.remove), np.array(self.add)
        if at[0] > 0.0:
            at = np.concatenate([[0.0], at])
            remove, add = (np.concatenate([[1.0], side]) for side in (remove, add))
        # At ε = 0 both directions have one δ, on which any bound of one and any of the other agree.
        middle = min(float(remove[0]), float(add[0]), self._advantage(at[1:], remove[1:], add[1:]))
        remove[0] = add[0] = middle
        return at, convex_envelope(at, remove), convex_envelope(at, add)

    @staticmethod
    def _advantage(epsilon: Array, remove: Array, add: Array) -> float:
        """The least bound on 1 - α - β that a bound of each direction give together."""
        least, share = 1.0, -np.expm1(-epsilon)
        for at, delta, part in zip(epsilon, remove, share, strict=True):
            terms = part * share + math.exp(-at) * share * delta + np.exp(-epsilon) * part * add
            least = min(least, float(np.min(terms / -np.expm1(-at - epsilon))))
        return min(least * (1.0 + _PAD), 1.0)

    @property
    def advantage(self) -> float:
        """The most by which the true positive rate of a test exceeds its false positive rate."""
        return float(self.sides[1][0])

    def true_positive_rate(self, false_positive_rate: npt.ArrayLike) -> Array:
        """The most that a test reaches at these false positive rates, rounded up; their shape.

        Raises:
            ValueError: if a rate is not in [0, 1].
        """
        rates = np.asarray(false_positive_rate, dtype=np.float64)
        if not ((rates >= 0.0) & (rates <= 1.0)).all():
            raise ValueError(
                f"{checks.named('false_positive_rate', false_positive_rate)} must be in [0, 1]"
            )
        at, remove, add = self.sides
        return _most(rates, at, remove, add)

    @functools.cached_property
    def corners(self) -> tuple[Array, Array]:
        """Corners of the polygon: false positive rates, falling, and the most true positives."""
        at, remove, add = self.sides
        few, positives = _corners(at, remove)
        misses, negatives = _corners(at, add)
        # In the other direction both rates are those of the opposite answer.
        fpr = np.concatenate([1.0 - negatives[::-1], few])
        tpr = np.concatenate([1.0 - misses[::-1], positives])
        order = np.argsort(-fpr, kind="stable")
        return np.clip(fpr[order], 0.0, 1.0), np.clip(tpr[order], 0.0, 1.0)

    @property
    def refusal(self) -> str | None:
        """The reason why there is no ``mu``, or ``None``."""
        if len(self.epsilon) == 1:
            return (
                "it is one (ε, δ) that was shown and not a profile: the rates follow from it, and a"
                " μ would say less"
            )
        if not math.isfinite(self._mu):
            return f"both rates may be below the floor of {self.floor:g} at once"
        return None

    @property
    def mu(self) -> float | None:
        """The least μ that the bounds prove, rounded up: tests are no better than under μ-GDP.

        Of tests whose false positive and false negative rates are both at least ``floor``; of all
        tests, those are off by no more than ``floor``: f(α) ≥ G_μ(α + floor) - floor. ``None``
        where ``refusal`` says why.
        """
        return None if self.refusal else self._mu

    @functools.cached_property
    def _mu(self) -> float:
        at, remove, add = self.sides
        if float(_most(np.array(self.floor), at, remove, add)) >= 1.0 - self.floor:
            return math.inf
        largest = 0.0
        for side, other in ((remove, add), (add, remove)):
            alpha, power = _corners(at, side)
            inside = (alpha >= self.floor) & (1.0 - power >= self.floor)
            alpha = np.append(alpha[inside], self.floor)
            power = np.append(power[inside], _most(np.array(self.floor), at, side, other))
            largest = max(largest, float(np.max(ndtri(power) - ndtri(alpha))))
        return largest * (1.0 + 1e-12)

    @property
    def regret(self) -> float | None:
        """Largest distance, by both rates, of the Gaussian curve of ``mu`` below the polygon.

        The least κ ≥ 0 with f(α + κ) - κ ≤ G_μ(α) for every α. Near 0, μ says nearly all that the
        bounds do. ``None`` where there is no μ.
        """
        if self.mu is None:
            return None
        at, remove, add = self.sides
        gap = gaussian.delta(at, self.mu) - np.minimum(remove, add)
        return max(0.0, float(np.max(gap / (1.0 + np.exp(at)))))

    def rates(self) -> list[tuple[float, float]]:
        """The most true positives at each of ``RATES`` that is not below the floor."""
        asked = [rate for rate in RATES if rate >= self.floor]
        return list(zip(asked, self.true_positive_rate(asked).tolist(), strict=True))

    def summary(self) -> dict[str, Any]:
        """The report, JSON-ready: rates, their floor, μ and its regret (or why there is no μ)."""
        return {
            "true_positive_rate_at": {f"{at:g}": value for at, value in self.rates()},
            "advantage": self.advantage,
            "mu": self.mu,
            "mu_refused": self.refusal,
            "regret": self.regret,
            "floor": self.floor,
            "kind": self.kind.value,
            "accountant": self.accountant,
        }

    def __str__(self) -> str:
        told = [f"{_percent(most)} at {_percent(at)}" for at, most in self.rates()]
        told = told or [f"{_percent(float(self.true_positive_rate(self.floor)))} at {self.floor:g}"]
        text = (
            "A test of whether the protected contribution was used, based on everything that is "
            f"released, has a true positive rate of at most {_joined(told)} false positives, and "
            f"an advantage (the one rate minus the other) of at most {_percent(self.advantage)}."
        )
        shown = f"{self.kind.sentence} (accountant: {self.accountant})"
        if self.mu is None:
            return f"{text} No μ is stated: {self.refusal}. These limits are {shown}."
        return (
            f"{text} Where both of its error rates are at least {self.floor:.3g}, it does no "
            f"better than under μ-GDP with μ = {_up(self.mu)} (regret {self.regret:.1e}). These "
            f"limits are {shown}."
        )

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back to an equal value."""
        adjacency = None if self.adjacency is None else self.adjacency.value
        value = dataclasses.asdict(self) | {"kind": self.kind.value, "adjacency": adjacency}
        return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> TradeOff:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: if it is no trade-off, or a field is missing, unknown or out of range.
        """
        value = parsed(text, "trade-off")
        if not isinstance(value, dict):
            raise ValueError(f"not a trade-off: {checks.shown(value)}")
        known = {field.name for field in dataclasses.fields(cls)}
        if wrong := sorted(set(value) ^ known):
            raise ValueError(f"not a trade-off: missing or unknown {wrong}; known: {sorted(known)}")
        lists = {
            name: tuple(checks.instance(name, value[name], list))
            for name in ("epsilon", "remove", "add")
        }
        about = {
            "adjacency": None if value["adjacency"] is None else Adjacency(value["adjacency"]),
            "unit": None if value["unit"] is None else Unit(**value["unit"]),
        }
        return cls(**{**value, **lists, **about, "kind": Kind(value["kind"])})


def check_same_subject(runs: Sequence[TradeOff]) -> None:
    """Refuse bounds of which no one statement can be made.

    Raises:
        ValueError: if they are about different adjacencies or units, or only some say which.
    """
    for number, run in enumerate(runs):
        if (run.adjacency, run.unit) != (runs[0].adjacency, runs[0].unit):
            raise ValueError(
                f"runs[0] protects {_subject(runs[0])} and runs[{number}] {_subject(run)}, so no "
                "single statement covers both; account for all runs with the same unit and "
                "adjacency"
            )


def _subject(run: TradeOff) -> str:
    unit = "a unit that is not told" if run.unit is None else f"each {run.unit.noun}"
    relation = "that is not told" if run.adjacency is None else repr(run.adjacency.value)
    return f"{unit} under adjacency {relation}"


def _lower(
    bounds: dict[float, tuple[float, float]], epsilon: float, remove: float, add: float
) -> None:
    """Add a bound in both directions; a δ that vanished in double precision stays positive."""
    before = bounds.get(epsilon, (1.0, 1.0))
    found = (min(before[0], remove), min(before[1], add))
    bounds[epsilon] = (max(found[0], SMALLEST_DELTA), max(found[1], SMALLEST_DELTA))


def _most(rates: Array, epsilon: Array, side: Array, other: Array) -> Array:
    """The largest chance of an event in one world, given its chances in the other; rounded up."""
    flat = rates.reshape(-1)
    found = np.ones_like(flat)
    for at, near, far in zip(epsilon.tolist(), side.tolist(), other.tolist(), strict=True):
        np.minimum(found, (near + math.exp(at) * flat) * (1.0 + _PAD), out=found)
        np.minimum(found, 1.0 - math.exp(-at) * (1.0 - far - flat) + _PAD, out=found)
    return np.asarray(np.maximum(found, flat).reshape(rates.shape))


def _corners(epsilon: Array, delta: Array) -> tuple[Array, Array]:
    """Corners of the bounds 1 - β ≤ δ + e^ε α of neighboring ε: α, falling, and 1 - β, rounded up.

    α may be rounded either way: between two corners the same one bound is taken at both.
    """
    gap = -np.expm1(epsilon[:-1] - epsilon[1:])
    alpha = np.maximum(delta[:-1] - delta[1:], 0.0) * np.exp(-epsilon[1:]) / gap
    both = [
        side + np.exp(at) * alpha
        for side, at in ((delta[:-1], epsilon[:-1]), (delta[1:], epsilon[1:]))
    ]
    return alpha, np.minimum(np.maximum(*both) * (1.0 + _PAD), 1.0)


def _joined(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _up(value: float, digits: int = 4) -> str:
    """So many digits, rounded up."""
    if value <= 0.0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit * (1.0 - 1e-13)) * unit:.{digits}g}"


def _percent(rate: float) -> str:
    return f"{min(float(_up(100.0 * rate, 3)), 100.0):.3g} %"
