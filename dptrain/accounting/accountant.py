"""An accountant: turns a mechanism into δ(ε), in both directions."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism


@dataclasses.dataclass(frozen=True)
class Profile:
    """δ over a grid of ε in both directions.

    Attributes:
        epsilon: grid of ε ≥ 0, ascending.
        remove: δ of (P, Q) at each ε.
        add: δ of (Q, P) at each ε.
        kind: how the values were shown.
        accountant: who computed them.
    """

    epsilon: npt.NDArray[np.float64]
    remove: npt.NDArray[np.float64]
    add: npt.NDArray[np.float64]
    kind: Kind
    accountant: str

    @property
    def delta(self) -> npt.NDArray[np.float64]:
        """The larger δ of the two directions."""
        return np.maximum(self.remove, self.add)


class Accountant(ABC):
    """One way of proving (ε, δ) for some pairs of scheme and strategy.

    Attributes:
        name: short name that appears in guarantees.
        kind: how its statements are shown.
    """

    name: str
    kind: Kind

    @abstractmethod
    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` if the mechanism is covered, else why it is not, in one sentence."""

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Why it answers for a mechanism that it covers only when asked by name, or ``None``."""
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """How its statement about this mechanism is shown: :attr:`kind`, unless it can say more."""
        return self.kind

    @abstractmethod
    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε this accountant can show at δ (rounded up).

        Raises:
            ValueError: if the mechanism is refused or δ is not in (0, 1).
        """

    @abstractmethod
    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """δ(ε) in both directions on a grid of ε ≥ 0."""

    @abstractmethod
    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The guarantee of the least σ (rounded up) that meets (ε, δ); it carries that σ.

        ``mechanism`` gives scheme and strategy; its own σ is ignored.

        Raises:
            ValueError: if no σ reaches the target.
        """


def varying_noise(mechanism: MatrixMechanism) -> str | None:
    """Why an accountant that composes equal steps of C = c·I refuses the diagonal, or ``None``."""
    norms = mechanism.strategy.column_norms(mechanism.steps)
    if norms.min() < norms.max():
        return "it needs the same noise at every step, the diagonal of the strategy varies"
    return None
