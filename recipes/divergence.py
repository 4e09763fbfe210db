"""Says once that a run has gone wrong: clipping makes a divergence look like any other step."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Iterable

import numpy as np
import torch

from dptrain import MatrixMechanism
from dptrain.core import Array
from dptrain.strategies import Workload

WINDOW = 50  # steps
_AT_BOUND = 0.9  # of R
# Of R², the largest error of one step's squared norm that still says something: the mean over a
# window has a third of it or less, also where the noise of steps near each other is alike.
_TELLING = 0.3

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EachStep(Workload):
    """A = I: the releases themselves."""

    def apply(self, x: Array) -> Array:
        return x

    def adjoint(self, x: Array) -> Array:
        return x


class Divergence:
    """Watches what is released and the loss on the examples that a run is evaluated on.

    A released gradient is the mean of clipped gradients, of norm at most R, plus noise whose square
    norm is d·(σR/B̄)²·|row of C⁻¹|² up to chance. What is left after subtracting that is near R²
    only if nearly every gradient is clipped and all point the same way, as where a loss explodes.
    With a public test set, all of this is computed from released values.

    Args:
        mechanism: of the run.
        max_grad_norm: R.
        parameters: number of trained numbers, d; ``None`` leaves releases alone, as where they are
            not bounded by R in one ball or scaled afterwards.
        start: test loss before the first step, if it is known.
    """

    def __init__(
        self,
        mechanism: MatrixMechanism,
        *,
        max_grad_norm: float,
        parameters: int | None,
        start: float | None = None,
    ) -> None:
        self._parameters, self._bound = parameters, max_grad_norm
        if parameters is not None:
            deviation = mechanism.noise_multiplier * max_grad_norm
            deviation /= mechanism.scheme.expected_batch_size
            self._noise = deviation * mechanism.strategy.errors(mechanism.steps, _EachStep())
        self._start = start
        self._squares: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._said: set[str] = set()

    def released(self, step: int, gradients: Iterable[torch.Tensor | None]) -> None:
        """Look at the gradients that step number ``step`` (from 1) released."""
        if self._parameters is None:
            return
        noise = float(self._noise[step - 1])
        expected = self._parameters * noise**2
        # Two standard deviations of the noise's square norm, and of its product with the signal.
        error = 2 * noise * (noise * math.sqrt(2 * self._parameters) + 2 * self._bound)
        if error > _TELLING * self._bound**2:
            self._squares.clear()
            return
        total = sum(
            float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
            for g in gradients
            if g is not None
        )
        self._squares.append(total - expected)
        if len(self._squares) == WINDOW and (
            np.mean(self._squares) > (_AT_BOUND * self._bound) ** 2
        ):
            self._say(
                "bound",
                f"step {step}: for {WINDOW} steps the mean clipped gradient has been as long as "
                f"max_grad_norm={self._bound:g} allows, so nearly all gradients are clipped and "
                "point the same way: the run has probably diverged, or the learning rate is far "
                "too large",
            )

    def tested(self, step: int, loss: float) -> None:
        """Look at the loss on test or held-out examples; without a start the first one is it."""
        if self._start is None:
            self._start = loss
        if not math.isfinite(loss):
            self._say(
                "loss",
                f"step {step}: the loss on other examples is {loss}; lower the learning rate",
            )
        elif loss > self._start:
            self._say(
                "loss",
                f"step {step}: the loss {loss:.4g} on other examples is above its start "
                f"{self._start:.4g}: the run learns nothing or has diverged; lower the learning "
                "rate, or max_grad_norm, which scales the noise",
            )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s", text)
