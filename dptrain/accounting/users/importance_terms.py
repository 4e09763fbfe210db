"""Weighted samples whose mean bounds δ(ε) of a user, none above what revealed draws prove."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from scipy.special import xlogy

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation.simulation import Direction
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.users.law import UserLaw
from dptrain.accounting.users.recursion import Codes, log_ratio, participations, rescale_interval
from dptrain.accounting.users.tilted_chain import TiltedChain, log_moments
from dptrain.accounting.users.user_losses import gram_product, transposed
from dptrain.core import Array

# α = 1 is the law itself, with terms in [0, 1].
ORDERS = np.concatenate([[1.0], 1.0 + np.geomspace(0.05, 100.0, 47)])
_LOG_CONVERSION = xlogy(ORDERS - 1.0, ORDERS - 1.0) - ORDERS * np.log(ORDERS)

UNIT = 2.0**-53
LARGEST_NORMAL = 13.75  # a true normal exceeds it with probability 1e-42, numpy's never
_LEAST_SLACK = 1e-9


class TiltedUser:
    """Importance sampling of both directions of a ``UserLaw`` at one σ.

    With Λ_x the loss of known participations x, A = E[e^{α(α-1)‖C x‖²/(2σ²)}] and any real
    α ≥ 1, draw r with weight e^{α(α-1)‖C x‖²/(2σ²)} (``TiltedChain``), the exposed steps as they
    come, and, for *remove*, y around αC x. Then

        T = A (P/Q)(y) (1 - e^{ε-L})_+ / E[e^{αΛ_x(y)} | what is public]

    has the mean δ(ε), and by Jensen's inequality T ≤ M = A e^{-(α-1)ε} (1-1/α)^α/(α-1), the bound
    that the divergence of order α would give if all draws were revealed. *Add*: y around -(α-1)C x,
    e^{-(α-1)Λ_x} in the mean and no P/Q, the same M (docs/theory/users.md#thm-users-weighted;
    ``test_weighted_terms_of_users_average_to_what_is_attained``). Both means are the
    program of ``log_ratio``, on multiples of the exponents.

    A term is the largest over the numbers k' of examples that occur, each with an α of its own:
    its mean is at least the largest δ of all of them.

    *Rounding.* L and the logarithm of the mean are taken that much to the side that makes terms
    larger (``rounding``), and so is A. The patterns drawn have chances that err by as much
    (relatively), and uniform numbers have 53 bits: each term has ``_missed`` of the ceiling more.
    """

    def __init__(self, law: UserLaw, sigma: float) -> None:
        self._law, self._sigma = law, sigma
        self._chains: dict[tuple[int, float], TiltedChain] = {}
        self._half_norms = law.squared_norms / (2.0 * sigma**2)

    @functools.cached_property
    def _log_moments(self) -> dict[int, Array]:
        kappa = ORDERS * (ORDERS - 1.0) / (2.0 * self._sigma**2)
        return {k: log_moments(self._law, k, kappa) for k in self._law.examples}

    def log_ceiling(self, examples: int, epsilon: float) -> tuple[float, float]:
        """(log M of the best order, that order), for users of so many examples."""
        found = self._log_moments[examples] - (ORDERS - 1.0) * epsilon + _LOG_CONVERSION
        best = int(np.argmin(found))
        return float(found[best]), float(ORDERS[best])

    def rounding(self, examples: int, power: float, order: float) -> float:
        """Bound on the error of log E[e^{power·Λ}] at outputs of order α, and of log A.

        A participation's exponent is j(u - jh): products of T ≤ bands + 74 normals, and of as many
        numbers for the signal, which is at most 2αk'‖c‖²/σ². A pattern has ⌈n/b⌉ of them; each of
        n steps of positive terms adds a few units, and what its probabilities err by; in log space
        as much as the largest logarithm has units.
        """
        law, k = self._law, examples
        norm = math.sqrt(float(law.squared_norms.max())) / self._sigma
        total = float(law.columns.sum(axis=1).max()) / self._sigma
        most = -(-law.steps // law.min_sep)
        signal = 2.0 * order * k * norm**2
        terms = law.columns.shape[1] + 74.0
        product = terms * UNIT * (total * LARGEST_NORMAL + signal)
        largest = k * (norm * LARGEST_NORMAL + signal + k * norm**2 / 2.0)
        exponent = power * (k * product + 8.0 * UNIT * largest) + 8.0 * UNIT * (k + 6.0)
        step = (2.0 * (k + 800.0) + 8.0 * (k + 4.0)) * UNIT
        if rescale_interval(law, k, self._sigma, power=power, copies=order) is None:
            quiet = -math.log(max(float(law.mass(k)[law.mass(k) > 0.0].min()), 1e-300))
            step += 8.0 * (k + 2.0) * UNIT * (1.0 + most * power * largest + law.steps * quiet)
        return 2.0 * (most * exponent + law.steps * step)

    def _terms(
        self,
        examples: int,
        order: float,
        chain: TiltedChain,
        epsilon: float,
        direction: Direction,
        ceiling: float,
        noise: Array,
        exposed: npt.NDArray[np.bool_],
        rng: np.random.Generator,
    ) -> Array:
        law, sigma = self._law, self._sigma
        drawn, barred = chain.draw(rng, noise.shape[1])
        codes = (drawn + np.uint8(1)) * exposed.view(np.uint8)
        power = order if direction == "remove" else 1.0 - order
        shift = gram_product(law.columns, participations(law, drawn, barred))
        exponents = noise / sigma + (power / sigma**2) * shift
        mean = self._log_mean(examples, power, order, exponents, codes)
        ratio = self._log_mean(examples, 1.0, order, exponents, codes)
        slack, pad = self._slack(examples, order)
        if direction == "remove":
            weight, loss = np.exp(chain.log_moment + ratio - mean + slack + pad), ratio
        else:
            weight, loss = np.exp(chain.log_moment - mean + pad), -ratio
        terms = weight * hockey_stick(loss, epsilon - slack) + ceiling * self._missed(examples)
        return np.where(np.isnan(terms), ceiling, np.minimum(terms, ceiling))

    def _slack(self, examples: int, order: float) -> tuple[float, float]:
        """Margins for the rounding of a loss, and that of the mean, of A and of the draws."""
        loss, mean = (self.rounding(examples, power, order) for power in (1.0, order))
        return max(_LEAST_SLACK, loss), 3.0 * max(_LEAST_SLACK, mean)

    def _missed(self, examples: int) -> float:
        """Distance in total variation that uniform numbers of 53 bits make."""
        return (self._law.steps + 1) * (examples + 4.0) * 2.0 * UNIT

    def _log_mean(
        self, examples: int, power: float, copies: float, exponents: Array, codes: Codes
    ) -> Array:
        """log E[e^{power·Λ} | what is public] at outputs with the signal of so many copies."""
        every = rescale_interval(
            self._law, examples, self._sigma, power=max(abs(power), 1.0), copies=copies
        )
        return log_ratio(
            self._law, examples, power * exponents, power * self._half_norms, codes,
            rescale_every=every,
        )  # fmt: skip

    def _chain(self, examples: int, order: float) -> TiltedChain:
        key = examples, order
        if key not in self._chains:
            for old in [each for each in self._chains if each[0] == examples]:
                del self._chains[old]
            kappa = order * (order - 1.0) / (2.0 * self._sigma**2)
            self._chains[key] = TiltedChain(self._law, examples, kappa)
        return self._chains[key]

    def terms(self, epsilon: float, direction: Direction) -> WeightedTerms:
        """Terms of one direction at ε ≥ 0."""
        law, chosen = self._law, {}
        for examples in law.examples:
            log_ceiling, order = self.log_ceiling(examples, epsilon)
            slack, pad = self._slack(examples, order)
            ceiling = math.exp(log_ceiling + 2.0 * order * slack + pad)
            ceiling *= 1.0 + 2.0 * self._missed(examples)
            chosen[examples] = order, self._chain(examples, order), ceiling

        def draw(rng: np.random.Generator, size: int) -> Array:
            noise = transposed(law.columns, rng.standard_normal((law.steps, size)))
            exposed = law.draw_exposed(rng, size)
            largest = np.zeros(size)
            for examples, (order, chain, ceiling) in chosen.items():
                found = self._terms(
                    examples, order, chain, epsilon, direction, ceiling, noise, exposed, rng
                )
                np.maximum(largest, found, out=largest)
            return largest

        return WeightedTerms(max(each for *_, each in chosen.values()), law.lanes, draw)

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        return {"remove": self.terms(epsilon, "remove"), "add": self.terms(epsilon, "add")}
