"""A user's draws, with weight on those that add much: the law of what weighted samples draw."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.users.law import UserLaw
from dptrain.accounting.users.recursion import compiled, compiles
from dptrain.core import Array

# Of one participation's weight, so that values of different states fit float64 side by side.
_LARGEST_EXPONENT = 300.0


class TiltedChain:
    """Draws r of one user under their law times e^{κ Σ_t x_t² ‖c_t‖²}, divided by the mean of that.

    x is what the draws lead to (``UserLaw``). With M_t(a) the mean of the rest of the weight if the
    next a steps are barred, P_j the chance of j draws and w_j = P_j e^{κ j² ‖c_t‖²},

        M_t(0) = P_0 M_{t+1}(0) + Σ_{j≥1} w_j M_{t+1}(b-1)
        M_t(a) = P_0 M_{t+1}(a-1) + (1 - P_0) M_{t+1}(b-1),

    or M_t(a) = M_{t+1}(a-1) under ``"participation"``, from M_n = 1 down: the terms are also the
    chances to draw by, from the first step up (``test_draws_of_users_have_the_tilted_law``).

    Args:
        examples: k'.
        kappa: κ ≥ 0, with κ k'² ‖c_t‖² ≤ 300: see ``log_moments``.
    """

    def __init__(self, law: UserLaw, examples: int, kappa: float) -> None:
        self._law, self._examples, self._kappa = law, examples, kappa
        messages = np.ones((law.steps + 1, law.min_sep))
        rates = np.array([kappa])
        log_scale = 0.0
        for t in range(law.steps - 1, -1, -1):
            value, power = _before(law, examples, rates, t, messages[None, t + 1])
            messages[t] = value[0]
            log_scale += float(power[0]) * math.log(2.0)
        self._messages = messages
        self._start = np.cumsum(law.start(examples) * messages[0])
        self.log_moment = log_scale + math.log(float(self._start[-1]))

    def draw(
        self, rng: np.random.Generator, lanes: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """r_t, shape (steps, lanes), and how many of the first steps are barred, shape (lanes,)."""
        law, last = self._law, self._law.min_sep - 1
        uniform = rng.random(lanes) * self._start[-1]
        barred = np.minimum(np.searchsorted(self._start, uniform, side="right"), last)
        drawn = np.zeros((law.steps, lanes), dtype=np.uint8)
        sampling = law.exclusion == "sampling"
        weights = _weights(law, self._examples, self._kappa)
        step = compiled(_draws) if compiles() else _draws_at_once
        mass = law.mass(self._examples)
        step(rng.random((law.steps, lanes)), self._messages, weights, mass, sampling,
             barred.copy(), drawn)  # fmt: skip
        return drawn, barred


def log_moments(law: UserLaw, examples: int, kappa: Array) -> Array:
    """log E[e^{κ Σ_t x_t² ‖c_t‖²}] for every κ ≥ 0; ∞ where its weights do not fit float64."""
    value = np.ones((kappa.size, law.min_sep))
    fits = kappa * examples**2 * float(law.squared_norms.max()) <= _LARGEST_EXPONENT
    rates, powers = np.where(fits, kappa, 0.0), np.zeros(kappa.size)
    for t in range(law.steps - 1, -1, -1):
        value, power = _before(law, examples, rates, t, value)
        powers += power
    total = value @ law.start(examples)
    return np.where(
        fits & (value.min(axis=1) > 0.0), np.log(total) + powers * math.log(2.0), np.inf
    )


def _weights(law: UserLaw, examples: int, kappa: float) -> Array:
    """w_j of every step, shape (steps, k' + 1)."""
    j = np.arange(examples + 1)
    exponents = kappa * np.outer(law.squared_norms, j * j)
    return np.asarray(law.mass(examples) * np.exp(exponents))


def _before(law: UserLaw, examples: int, kappa: Array, t: int, after: Array) -> tuple[Array, Array]:
    """M_t from M_{t+1}, shape (len(κ), b), over a power of two: and that power."""
    mass, j = law.mass(examples), np.arange(1, examples + 1)
    some = float(mass[1:].sum())
    taking = np.exp(kappa[:, None] * (j * j * law.squared_norms[t])) @ mass[1:]
    barred = after[:, -1:]
    value = np.empty_like(after)
    value[:, :1] = mass[0] * after[:, :1] + taking[:, None] * barred
    if law.exclusion == "sampling":
        value[:, 1:] = mass[0] * after[:, :-1] + some * barred
    else:
        value[:, 1:] = after[:, :-1]
    power = np.frexp(value.max(axis=1))[1]
    return np.ldexp(value, -power[:, None]), power.astype(np.float64)


def _draws(
    uniform: Array,
    messages: Array,
    weights: Array,
    mass: Array,
    sampling: bool,
    barred: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.uint8],
) -> None:  # pragma: no cover (compiled)
    last = messages.shape[1] - 1
    k = mass.size - 1
    for t in range(uniform.shape[0]):
        after = messages[t + 1]
        row = weights[t]
        for i in range(uniform.shape[1]):
            a = barred[i]
            down = a - 1 if a > 0 else 0
            then = last if sampling or a == 0 else down
            total = mass[0] * after[down]
            for j in range(1, k + 1):
                total += (row[j] if a == 0 else mass[j]) * after[then]
            target = uniform[t, i] * total
            below = mass[0] * after[down]
            j = 0
            while j < k and target >= below:
                j += 1
                below += (row[j] if a == 0 else mass[j]) * after[then]
            drawn[t, i] = j
            barred[i] = then if j > 0 else down


def _draws_at_once(
    uniform: Array,
    messages: Array,
    weights: Array,
    mass: Array,
    sampling: bool,
    barred: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.uint8],
) -> None:
    last = messages.shape[1] - 1
    for t in range(uniform.shape[0]):
        free = barred == 0
        down = np.maximum(barred - 1, 0)
        then = np.where(free | sampling, last, down)
        chances = np.where(free, weights[t][:, None], mass[:, None])
        chances *= np.where(np.arange(mass.size)[:, None] > 0, messages[t + 1][then], 1.0)
        chances[0] *= messages[t + 1][down]
        below = np.cumsum(chances, axis=0)
        found = (uniform[t] * below[-1] >= below[:-1]).sum(axis=0)
        drawn[t] = found
        barred[:] = np.where(found > 0, then, down)
