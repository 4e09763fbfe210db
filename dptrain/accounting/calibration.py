"""The least noise for a stated guarantee."""

from __future__ import annotations

import dataclasses
from typing import Any

from dptrain.accounting.base.accountant import Accountant
from dptrain.accounting.base.statement import check_delta, check_epsilon, told_once
from dptrain.accounting.dispatch import find_accountant
from dptrain.core import Adjacency, Guarantee, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A mechanism whose σ was chosen for a target, and the guarantee that it has.

    Attributes:
        mechanism: scheme, strategy and the calibrated σ.
        guarantee: what was shown; its ε is at most the target's.
    """

    mechanism: MatrixMechanism
    guarantee: Guarantee


def calibrate(
    *,
    scheme: Scheme,
    strategy: Strategy,
    epsilon: float,
    delta: float,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency | None = None,
    **options: Any,
) -> Calibration:
    """The least σ for which an accountant shows (ε, δ).

    Deterministic accountants bisect σ to a relative 1e-4, rounded up, on the best of their bounds.

    Args:
        scheme: how examples take part.
        strategy: how noise is correlated.
        epsilon: target ε > 0.
        delta: target δ in (0, 1), below 1 over the number of protected units.
        accountant: an accountant or its name; by default the automatic one.
        adjacency: the neighbouring relation, by default the mechanism's; most pairs only have
            theorems for zero-out.
        options: passed on to the accountant's ``calibrate``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the target is out of range or out of reach, or no accountant covers the pair.

    Warns:
        UserWarning: if δ is not below that.
    """
    epsilon = check_epsilon(epsilon)
    checks.instance("scheme", scheme, Scheme, example="Poisson.for_batch_size(...)")
    delta = check_delta(delta, scheme)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    member = find_accountant(mechanism, accountant, adjacency=adjacency)
    with told_once():
        best = member.calibrate(mechanism, epsilon=epsilon, delta=delta, **options)
    return Calibration(mechanism.with_noise(best.noise_multiplier), best)
