"""Simulated privacy losses of a ``UserLaw``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.simulation.simulation import DIRECTIONS, Direction, Simulation
from dptrain.accounting.users.law import Counts, UserLaw
from dptrain.accounting.users.recursion import log_ratio, participations, rescale_interval
from dptrain.core import Array

_ROWS = 64  # rows of C^T z made by one matrix product, beside those of the bands


@dataclasses.dataclass(frozen=True)
class UserLosses(Simulation):
    """Losses given the public information, the largest over the law's numbers of examples k'.

    Samples of all k' share noise, exposed steps and nested coins. Terms (1 - e^{ε-L})_+ grow with
    L, so the mean with max_{k'} L is at least the mean for every k': the largest δ of all of them
    is bounded, and what was public is averaged over.
    """

    law: UserLaw

    @property
    def sensitivity(self) -> float:
        """k·max ‖C x‖ over the patterns of participation."""
        return self.law.sensitivity

    @property
    def work(self) -> int:
        """Number of steps, once for every k'."""
        return self.law.steps * len(self.law.examples)

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return self.law.lanes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of the law."""
        return self.law.to_dict()

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Draw losses, every σ by itself from shared draws."""
        law = self.law
        directions = DIRECTIONS if direction == "both" else (direction,)
        noise = rng.standard_normal((law.steps, size))
        counts = law.draw_counts(rng, size)
        exposed = law.draw_exposed(rng, size)
        uniform = rng.random(size)
        product = transposed(law.columns, noise)
        half_norms = law.squared_norms / 2.0
        losses = np.full((len(directions), len(sigmas), size), -np.inf)
        buffer = np.empty_like(product)
        for examples, drawn in zip(law.examples, counts, strict=True):
            codes = (drawn + np.uint8(1)) * exposed.view(np.uint8)
            signal = None
            if "remove" in directions:
                x = participations(law, drawn, _barred(law.start(examples), uniform))
                signal = gram_product(law.columns, x)
            for index, sigma in enumerate(sigmas):
                every = rescale_interval(law, examples, sigma)
                for row, each in enumerate(directions):
                    if each == "remove":
                        assert signal is not None
                        np.multiply(signal, 1.0 / sigma, out=buffer)
                        buffer += product
                        buffer *= 1.0 / sigma
                    else:
                        np.multiply(product, 1.0 / sigma, out=buffer)
                    halves = half_norms / sigma**2
                    found = log_ratio(law, examples, buffer, halves, codes, rescale_every=every)
                    found = found if each == "remove" else -found
                    np.maximum(losses[row, index], found, out=losses[row, index])
        return losses if direction == "both" else losses[0]


def _barred(start: Array, uniform: Array) -> npt.NDArray[np.int64]:
    """Number of the first steps that are barred, by inversion."""
    found = np.searchsorted(np.cumsum(start), uniform, side="right")
    return np.minimum(found, start.size - 1)


def transposed(columns: Array, z: Array) -> Array:
    """C^T z, in blocks of rows as one product each."""
    steps, bands = columns.shape
    out = np.empty_like(z)
    for first in range(0, steps, _ROWS):
        rows = min(_ROWS, steps - first)
        last = min(first + rows + bands - 1, steps)
        block = np.zeros((rows, rows + bands - 1))
        at = np.arange(rows)
        for k in range(bands):
            block[at, at + k] = columns[first : first + rows, k]
        torch.mm(
            torch.from_numpy(block[:, : last - first].copy()),
            torch.from_numpy(z[first:last]),
            out=torch.from_numpy(out[first : first + rows]),
        )
    return out


def gram_product(columns: Array, x: Counts) -> Array:
    """C^T C x for a sparse x."""
    steps, bands = columns.shape
    out = np.zeros(x.shape)
    times, lanes = np.nonzero(x)
    value = x[times, lanes].astype(np.float64)
    for lag in range(bands):
        gram = np.zeros(steps)  # <c_t, c_{t+lag}>
        gram[: steps - lag] = (columns[: steps - lag, lag:] * columns[lag:, : bands - lag]).sum(1)
        # Later columns: participations are at least bands apart, but each row may meet two of
        # them, one from above and one from below; no row meets the same lag twice.
        fits = times + lag < steps
        out[times[fits] + lag, lanes[fits]] += gram[times[fits]] * value[fits]
        if lag:
            fits = times >= lag
            out[times[fits] - lag, lanes[fits]] += gram[times[fits] - lag] * value[fits]
    return out
