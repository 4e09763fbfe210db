"""Random mechanisms: every accountant against δ from below, by importance sampling far down.

The mechanisms and what they really release are those of ``tests/oracles``, which do not import the
library's accounting. There the losses are drawn as they fall, which shows δ down to about 1e-4;
here they are also drawn where the two worlds differ most, and weighted, which shows it down to
1e-9.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import numpy as np
import numpy.typing as npt

from dptrain.accounting import Accountant
from dptrain.accounting.base import DeterministicAccountant
from scripts.attack.harness import Finding, Part
from tests.oracles.enumeration import log_sum_exp
from tests.oracles.random_mechanisms import FAMILIES, Subject
from tests.oracles.test_every_bound import answering, check_guarantee, compare
from tests.oracles.true_delta import Branch, Evidence, TruePair, World

Array = npt.NDArray[np.float64]

DRAWS = 40_000
DEEP = (1e-3, 1e-5, 1e-7, 1e-9)  # where profiles are compared, roughly
_PLACES = 400  # most components of a proposal
_SHIFTS = (1.5, 3.0, 4.5, 6.0)  # how far beyond a mean it draws too, in σ
_SIGMAS = 6.0


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Losses log P/Q, drawn elsewhere than under P, and what each draw weighs."""

    losses: Array
    weights: Array

    def value(self, epsilon: float) -> float:
        """About δ(ε)."""
        return float(self._terms(epsilon).mean())

    def lower(self, epsilon: float) -> float:
        """δ(ε) less six standard errors: a few heavy draws raise the error more than the mean."""
        terms = self._terms(epsilon)
        return float(terms.mean() - _SIGMAS * terms.std(ddof=1) / np.sqrt(terms.size))

    def _terms(self, epsilon: float) -> Array:
        return np.asarray(self.weights * -np.expm1(np.minimum(epsilon - self.losses, 0.0)))


class DeepEvidence(Evidence):
    """Both directions, far below what plain draws resolve."""

    def where_one(self, delta: float) -> float:
        """An ε ≥ 0 at which the larger δ is about ``delta``."""
        low, high = 0.0, 700.0
        for _ in range(40):
            middle = (low + high) / 2
            above = max(side.value(middle) for side in (self.remove, self.add)) > delta
            low, high = (middle, high) if above else (low, middle)
        return low


def weighted(pair: TruePair, seed: int, draws: int = DRAWS) -> DeepEvidence:
    """Evidence of both directions."""
    remove, add = (
        _one_side(side, np.random.default_rng([seed, number]), draws)
        for number, side in enumerate((pair, pair.swapped()))
    )
    return DeepEvidence(remove, add)


def _one_side(pair: TruePair, rng: np.random.Generator, draws: int) -> Weighted:
    losses, weights = [], []
    share = np.array([branch.weight for branch in pair.branches])
    for branch, count in zip(
        pair.branches, rng.multinomial(draws, share / share.sum()), strict=True
    ):
        if count == 0:
            continue
        proposal = _proposal(branch, pair.sigma, rng)
        y = proposal.sample(rng, pair.sigma, int(count))
        log_p = branch.p.log_density(y, pair.sigma)
        losses.append(log_p - branch.q.log_density(y, pair.sigma))
        weights.append(np.exp(log_p - proposal.log_density(y, pair.sigma)))
    return Weighted(np.concatenate(losses), np.concatenate(weights))


def _proposal(branch: Branch, sigma: float, rng: np.random.Generator) -> World:
    """A mixture around P's means, its rare ones oftener, and beyond them away from Q's.

    All of P's means are in it, so that no weight is unbounded.
    """
    p, q = branch.p, branch.q
    means, logs = [p.means], [0.6 * np.log(p.weights)]
    pairs = list(itertools.product(range(len(p.weights)), range(len(q.weights))))
    most = _PLACES // len(_SHIFTS)
    if len(pairs) > most:
        pairs = [pairs[i] for i in rng.choice(len(pairs), most, replace=False)]
    for i, j in pairs:
        away = p.means[i : i + 1] - q.means[j : j + 1]
        distance = float(np.linalg.norm(away))
        for shift in _SHIFTS if distance else ():
            means.append(p.means[i : i + 1] + shift * sigma / distance * away)
            logs.append(np.array([0.6 * np.log(p.weights[i]) + 0.3 * np.log(q.weights[j])]))
    flat = np.concatenate(logs)
    weights = np.exp(flat - log_sum_exp(flat[None].copy())[0])
    return World(weights / weights.sum(), np.concatenate(means))


def check_deep(subject: Subject, members: list[Accountant], seed: int) -> int:
    """Profiles and guarantees of deterministic accountants, far down; how many were compared."""
    found = weighted(subject.pair(), seed)
    epsilons = np.unique([round(found.where_one(delta), 6) for delta in DEEP])
    true = found.lower(epsilons)
    count = 0
    for member in members:
        if not isinstance(member, DeterministicAccountant):
            continue
        claimed = member.profile(subject.mechanism, epsilons)
        for direction, stated, least in zip(
            ("remove", "add"), (claimed.remove, claimed.add), true, strict=True
        ):
            count += len(epsilons)
            if not (stated >= least).all():
                raise Finding(
                    f"{member.name}, {direction}: states {stated}, true is at least {least} at "
                    f"ε = {epsilons}; {subject}"
                )
        check_guarantee(subject, member, found, DEEP[seed % len(DEEP)])  # type: ignore[arg-type]
        count += 1
    return count


def case(seed: int) -> int:
    """One mechanism of one family, against all accountants that answer."""
    make, _ = FAMILIES[list(FAMILIES)[seed % len(FAMILIES)]]
    subject = make(np.random.default_rng([20_271_001, seed]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        near = compare(subject, seed)
        return near + check_deep(subject, answering(subject, seed), seed)


PART = Part("mechanisms", "comparisons", case, share=3.0)
