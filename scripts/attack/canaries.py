"""Canary audit: what an attacker of the real engine finds out must not exceed the stated ε.

Every canary has a coordinate of its own, to which it alone contributes a gradient of norm R; half
of them are in the data. The others' coordinates hold noise alone, and all are drawn and noised
independently, so that one run is many pairs of worlds. The attacker has the best test there is, the
likelihood ratio of what its coordinate released, with the law of the scheme by enumeration
(``tests/oracles``). Thresholds are chosen on one half and judged on the other, by Clopper and
Pearson's limits, each false with a chance below 1e-9.

Each case also audits an engine that adds a tenth of the noise it states: if that is not found
out, the case proves nothing, and fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import beta
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import (
    BandMF,
    Gradients,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    PrivacyEngine,
    account,
)
from dptrain.noise import FlatStream
from scripts.attack.harness import Finding, Part
from tests.oracles import enumeration
from tests.oracles.random_mechanisms import matrix_of
from tests.oracles.true_delta import World

Array = npt.NDArray[np.float64]

CANARIES = 40_000  # half of them in the data
BOUND = 0.7  # R
_CHANCE = 1e-9  # that one of the limits is false
SABOTAGE = 10.0


class _Coordinates(nn.Module):
    """A row's loss is its own weight: the gradient has one entry."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.Embedding(size, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Losses of the rows, shape (rows,); of gradients longer than R."""
        return 10.0 * self.weights(ids)[:, 0, 0]


def mechanism(seed: int) -> tuple[MatrixMechanism, World]:
    """A small mechanism, and the law of a canary's participations seen through C."""
    rng = np.random.default_rng([20_271_003, seed])
    steps, sigma = int(rng.integers(1, 5)), float(rng.uniform(2.0, 4.0))
    p, size = float(rng.uniform(0.3, 0.9)), CANARIES // 2
    if seed % 2:
        bands = min(2, steps)
        scheme: Any = MinSep(probability=p, min_sep=bands, dataset_size=size, steps=steps)
        law, strategy = enumeration.min_sep_warm(steps, p, bands), BandMF(bands=bands).bind(steps)
        made = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    else:
        scheme = Poisson(probability=p, dataset_size=size, steps=steps)
        law = enumeration.poisson(steps, p)
        made = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    patterns = World(np.asarray(law.probabilities), np.asarray(law.patterns, dtype=np.float64))
    return made, patterns.seen_through(matrix_of(made.strategy, steps))


def observe(subject: MatrixMechanism, seed: int, *, sabotage: float = 1.0) -> tuple[Array, Array]:
    """C times the releases over R, of the canaries within and of those without: (canaries, steps).

    The noise that the engine adds is divided by ``sabotage``.
    """
    torch.manual_seed(seed)
    size = CANARIES // 2
    model = _Coordinates(CANARIES)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=TensorDataset(torch.arange(size)[:, None]),
        mechanism=subject,
        max_grad_norm=BOUND,
        seed=seed,
        gradients=Gradients(loss="sum"),
    )
    module, optimizer, loader = private
    if sabotage != 1.0:
        optimizer.noise = _Quieter(optimizer.noise, sabotage)
    steps = []
    for (ids,) in loader:
        optimizer.zero_grad()
        module(ids).sum().backward()
        optimizer.step()
        (p,) = optimizer.params
        steps.append(p.grad.detach().double().flatten().numpy() / BOUND)
    seen = matrix_of(subject.strategy, subject.steps) @ np.stack(steps)
    return seen[:, :size].T, seen[:, size:].T


class _Quieter:
    """A stream of noise that adds less than it says."""

    def __init__(self, stream: FlatStream, factor: float) -> None:
        self._stream, self._factor = stream, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def release(self, sums: Sequence[torch.Tensor | None], deviation: float) -> list[torch.Tensor]:
        return self._stream.release(sums, deviation / self._factor)


def epsilon_below(within: Array, without: Array, law: World, sigma: float, delta: float) -> float:
    """A lower limit on ε at δ, from both directions; 0 if nothing is found."""
    nothing = World(np.ones(1), np.zeros((1, within.shape[1])))
    scores = [law.log_density(y, sigma) - nothing.log_density(y, sigma) for y in (within, without)]
    best = 0.0
    for inside, outside in (scores, [-scores[1], -scores[0]]):
        half = len(inside) // 2
        thresholds = np.quantile(inside[:half], np.linspace(0.02, 0.98, 49))
        limits = [_limit(inside[:half], outside[:half], t, delta, 0.05) for t in thresholds]
        chosen = thresholds[int(np.argmax(limits))]
        best = max(best, _limit(inside[half:], outside[half:], chosen, delta, _CHANCE / 4))
    return best


def _limit(inside: Array, outside: Array, threshold: float, delta: float, chance: float) -> float:
    """ln((P[inside ≥ t] - δ) / P[outside ≥ t]), each probability at its limit."""
    hits, false = int((inside >= threshold).sum()), int((outside >= threshold).sum())
    low = beta.ppf(chance, hits, len(inside) - hits + 1) if hits else 0.0
    high = beta.ppf(1 - chance, false + 1, len(outside) - false) if false < len(outside) else 1.0
    return float(np.log((low - delta) / high)) if low > delta else 0.0


def case(seed: int, sabotage: float = 1.0) -> int:
    """One mechanism audited as it is, and with too little noise."""
    subject, law = mechanism(seed)
    delta = 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = "gaussian" if isinstance(subject.scheme, MinSep) else None
        stated = account(subject, delta=delta, accountant=named).epsilon
        sigma = subject.noise_multiplier
        found = epsilon_below(*observe(subject, seed, sabotage=sabotage), law, sigma, delta)
        if found > stated:
            raise Finding(f"ε is above {found:.4f}, stated is {stated:.4f}: {subject!r}")
        quieter = subject.with_noise(sigma / SABOTAGE)
        seen = observe(subject, seed, sabotage=SABOTAGE)
        caught = epsilon_below(*seen, law, quieter.noise_multiplier, delta)
        if caught <= stated:
            raise Finding(
                f"no power: with a tenth of the noise the audit shows ε > {caught:.4f} only, "
                f"stated is {stated:.4f}: {subject!r}"
            )
    return 2


PART = Part("canaries", "audits", case)
