"""The contents of a certificate of simulated terms, given what was asked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import secrets
from collections.abc import Callable
from typing import Any

from dptrain.accounting.base.curve import LARGEST_SIGMA
from dptrain.accounting.simulation.certificate_cache import (
    attempts_of,
    differing_verdict,
    whole_number,
)
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.estimate import estimate_depth
from dptrain.accounting.simulation.law import SimulatedLaw
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Point, Rule, verify_points
from dptrain.core import checks

METHOD = 3  # raise it when the meaning of every accountant's certificates changes
STEP = 1.01
ESTIMATE, VERIFY, GUARANTEE, PROFILE = 10, 11, 12, 13  # purposes of streams, never shared
# Points of the declared grid, from the most private one: the last is where the estimate was.
_OFFSETS = (2, 0)
# 1 % a step: a factor of 20,000 in all.
_DEEPEST = 1000

GridRows = list[dict[str, Any]]


def package_version() -> str:
    """Version of the installed package, or a remark that it runs from a source tree."""
    try:
        return importlib.metadata.version("dptrain")
    except importlib.metadata.PackageNotFoundError:
        return "source tree, not installed"


def fresh_seed(seed: int | None) -> int:
    """``seed``, or 128 fresh random bits."""
    if seed is None:
        return secrets.randbits(128)
    return checks.integer("seed", seed, minimum=0)


def declared_points(depth: int) -> list[int]:
    """The grid around an estimate, from its most private point on."""
    return sorted({depth - offset for offset in _OFFSETS if depth - offset > 0})


def verified_rows(terms_at: Point, rule: Rule, draws: SharedDraws, purpose: int) -> GridRows:
    """Estimate where to go, declare a grid up to there, and verify it by fresh samples."""
    depth = estimate_depth(terms_at, rule, draws, ESTIMATE, most=_DEEPEST)
    return verify_points(declared_points(depth), terms_at, rule, draws, purpose)


def chosen_point(rows: GridRows) -> int:
    """The last accepted point; 0 leaves only what needs no verdict."""
    return max((row["point"] for row in rows if row["accepted"] is True), default=0)


def evidence(
    method: Any, law: SimulatedLaw, rule: Rule, seed: int, rows: GridRows
) -> dict[str, Any]:
    """The part of a certificate that those of a σ and of an ε have in common."""
    return {
        "method": method,
        "law": law.to_dict(),
        "seed": str(seed),
        "violated": rule.violated,
        "failure_probability": rule.failure,
        "most": rule.most,
        "step": STEP,
        "grid": rows,
        "package": package_version(),
    }


@dataclasses.dataclass(frozen=True)
class Claim:
    """(ε, δ_v) of a law at a σ to be found, and all that this determines of its certificate.

    Attributes:
        rule: when a direction is accepted; its ``most`` is for a new certificate, as one that
            exists has its own.
        request: what is asked for: its digest finds the certificate in a folder.
    """

    law: SimulatedLaw
    rule: Rule
    request: dict[str, Any]

    def terms_at(self, ceiling: float) -> Point:
        """Both directions' terms at σ = ceiling/1.01^point."""
        epsilon = self.request["epsilon"]
        return lambda point: self.law.terms(ceiling / STEP**point)(epsilon)

    def certificate(self, draws: SharedDraws) -> dict[str, Any]:
        """The least σ that is shown, and the evidence.

        The grid's top is a σ at which the deterministic bounds show (ε, δ_v).
        """
        law, violated, epsilon = self.law, self.rule.violated, self.request["epsilon"]
        ceiling = law.least_sigma(epsilon, violated, progress=draws.progress)
        if ceiling is None:
            raise ValueError(
                f"epsilon={epsilon} at delta={self.request['delta']} is unreachable even at σ = "
                f"{LARGEST_SIGMA:g}"
            )
        rows = verified_rows(self.terms_at(ceiling), self.rule, draws, VERIFY)
        sigma = ceiling / STEP ** chosen_point(rows)
        better = law.better_sigma(sigma, epsilon, violated, progress=draws.progress)
        if better is not None:  # no sample has to show it
            sigma = ceiling = min(better, sigma)
            rows = []
        return {
            **evidence(self.request["method"], law, self.rule, draws.seed, rows),
            "request": self.request,
            "delta_proved": self._proved,
            "ceiling": ceiling,
            "noise_multiplier": sigma,
        }

    @property
    def _proved(self) -> float:
        rule = self.rule
        return rule.violated + attempts_of(self.request) * rule.failure * (1.0 - rule.violated)

    def problem(self, certificate: dict[str, Any]) -> str | None:
        """The deviation of a certificate from what its request determines, or ``None``.

        Computed again are the split of δ, the step and the points of the grid, that the
        deterministic bounds cover the ceiling, and for every accepted point the bound M of its
        terms, the threshold that follows from M and the samples, and how many these may be.
        """
        if certificate["request"] != self.request:
            return "it answers another request"
        rule, rows, ceiling = self.rule, certificate["grid"], certificate["ceiling"]
        expected = {
            **{key: self.request[key] for key in ("method", "law", "package")},
            "violated": rule.violated,
            "failure_probability": rule.failure,
            "delta_proved": self._proved,
            "step": STEP,
        }
        for key, value in expected.items():
            if certificate[key] != value:
                return f"its {key} is {certificate[key]!r} where the request makes it {value!r}"
        whole_number(certificate["seed"])
        checks.integer("most", certificate["most"])
        if wrong := _other_grid([row["point"] for row in rows], rows):
            return wrong
        if not (isinstance(ceiling, float) and 0.0 < ceiling < math.inf and self._covers(ceiling)):
            return f"the deterministic bounds do not cover its ceiling, σ = {ceiling}"
        terms_at = self.terms_at(ceiling)
        if rows and (wrong := _other_add(rows, terms_at, rule)):
            return wrong
        for row in rows:
            if row["accepted"] is not True:
                continue
            wrong = _unsupported(row["remove"], terms_at(row["point"])["remove"], rule)
            if wrong:
                return f"the remove direction of its point {row['point']} {wrong}"
        if certificate["noise_multiplier"] != ceiling / STEP ** chosen_point(rows):
            return "its verdicts do not support its noise multiplier"
        return None

    def _covers(self, sigma: float) -> bool:
        return self.law.curve.epsilon(sigma, self.rule.violated) <= self.request["epsilon"]

    def redrawn(
        self, draws: Callable[[int], SharedDraws]
    ) -> Callable[[dict[str, Any]], str | None]:
        """A check for what the seed does not give again, grid included, at its first cost."""

        def problem(certificate: dict[str, Any]) -> str | None:
            rows, terms_at = certificate["grid"], self.terms_at(certificate["ceiling"])
            if not rows:  # no sample shows anything
                return None
            rule = self.rule._replace(most=certificate["most"])
            again = verified_rows(terms_at, rule, draws(int(certificate["seed"])), VERIFY)
            return differing_verdict(rows, again, "point")

        return problem


def _other_grid(points: list[Any], rows: GridRows) -> str | None:
    """Reason why these are not a declared grid's points up to the first rejection, or ``None``."""
    if any(not isinstance(row["accepted"], bool) for row in rows):
        return "a point is neither accepted nor rejected"
    if any(row["accepted"] is not True for row in rows[:-1]):
        return "it goes on after a rejection"
    if any(type(point) is not int or not 0 < point <= _DEEPEST for point in points):
        return "its grid does not descend from its ceiling"
    # It may stop at a rejection, or at the last point where the add direction was accepted.
    stopped = bool(rows) and rows[-1]["accepted"] is not True
    limit = rows[-1]["add"].get("point") if rows and isinstance(rows[-1]["add"], dict) else None
    stopped = stopped or (bool(rows) and limit == points[-1])
    for depth in {point + offset for point in points[:1] for offset in _OFFSETS} or {0}:
        grid = declared_points(depth)
        if points == grid or (stopped and points == grid[: len(points)]):
            return None
    return f"its points {points} are not those of a declared grid"


def _other_add(rows: GridRows, terms_at: Point, rule: Rule) -> str | None:
    """Reason why add is not shown at a point of the grid from where on it holds, or ``None``."""
    add, last = rows[0]["add"], rows[-1]["point"]
    # As text: 1 is not true here.
    if (
        not isinstance(add, dict)
        or len({json.dumps(row["add"], sort_keys=True) for row in rows}) > 1
    ):
        return "the add direction has no verdict for all of its points"
    point = add.get("point")
    grids = [declared_points(depth) for depth in {rows[0]["point"] + each for each in _OFFSETS}]
    tested = {len(grid) for grid in grids if point in grid and last in grid}
    if type(point) is not int or point < last or not tested:
        return f"the add direction is shown at {point}, not at a point of its grid from {last} on"
    terms = terms_at(point)["add"]
    wrongs = [_unsupported(add, terms, rule.shared(count)) for count in sorted(tested)]
    return None if None in wrongs else f"the add direction of its point {point} {wrongs[0]}"


def _unsupported(side: dict[str, Any] | None, terms: WeightedTerms, rule: Rule) -> str | None:
    """The reason why an accepted direction should not have been, or ``None``."""
    if not isinstance(side, dict) or side["accepted"] is not True:
        return "has no verdict"
    # Another machine's last digits are as good.
    if not math.isclose(side["ceiling"], terms.ceiling, rel_tol=1e-9):
        return f"has terms of at most {terms.ceiling}, not {side['ceiling']}"
    samples, mean = side["samples"], side["mean"]
    rule, reach = rule.of(terms), terms.range_at(rule.violated)
    unneeded = terms.ceiling <= rule.violated
    if unneeded and (samples, mean) != (0, None):
        return "has samples although none are needed"
    if not unneeded and not (type(samples) is int and rule.is_look(reach, samples)):
        return f"has {samples} samples, a number after which no verdict is made"
    threshold = rule.violated if unneeded else rule.threshold(reach, samples)
    if not math.isclose(side["threshold"], threshold, rel_tol=1e-6):
        return f"has the threshold {side['threshold']} and should have {threshold}"
    if not unneeded and not 0.0 <= mean <= threshold * (1.0 + 1e-9):
        return "has a mean above what its samples support"
    return None
