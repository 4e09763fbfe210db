"""The base of individual filters of Poisson-sampled batches."""

from __future__ import annotations

import dataclasses
from abc import ABC

from dptrain.accounting.base import checked_sigma
from dptrain.core import checks
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledFilter(IndividualFilter, ABC):
    """A filter for any Poisson rate; ``SampledRecord`` books it.

    Args:
        target_epsilon, target_delta, max_steps: see ``IndividualFilter``.
        personal_clipping: g ≥ 1: clip each example to g times its norm at its last draw, and charge
            that between draws. ``None``: charge R between draws, which for a small q is most of the
            time. The first pays for what is released and lets small gradients take part longer, at
            the price of a bias where gradients grow by more than g between draws.
    """

    personal_clipping: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_number("personal_clipping")
        if self.personal_clipping is not None and not self.personal_clipping >= 1:
            raise ValueError(
                f"personal_clipping={self.personal_clipping}: must be finite and at least 1, e.g. "
                "1.5, or None to charge the full norm between draws"
            )

    def _settle_number(self, field: str) -> None:
        """Leave an optional number as a float."""
        value = getattr(self, field)
        if value is None:
            return
        object.__setattr__(self, field, checks.number(field, value, owner=type(self).__name__))

    def check(self, mechanism: MatrixMechanism) -> None:
        """Refuse what the filter is not proven for; any rate will do."""
        super().check(mechanism)
        checked_sigma(mechanism)

    def _check_first_step(self, mechanism: MatrixMechanism) -> None:
        """Refuse what would leave everybody out from the first step on."""
        rate, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        before_the_norm = rate < 1 or self.personal_clipping is not None
        if before_the_norm and self.full_norm_steps(mechanism) == 0:
            raise ValueError(
                f"target_epsilon={self.target_epsilon:g}: not one step of the full norm fits the "
                f"budget at noise_multiplier={sigma:g} and probability={rate:g}, and every example "
                "is charged it before its norm is known; raise the noise or the target"
            )
