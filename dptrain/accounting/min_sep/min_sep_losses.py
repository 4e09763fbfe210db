"""Privacy losses of b-min-sep sampling with a banded Toeplitz strategy (bands ≤ b)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.min_sep import engine_compiled as min_sep_compiled
from dptrain.accounting.min_sep import engine_torch as min_sep_device
from dptrain.accounting.min_sep.law import MinSepLaw, participations
from dptrain.accounting.min_sep.recursion import Recursion, make_recursion
from dptrain.accounting.simulation.simulation import DIRECTIONS, Direction, Simulation
from dptrain.core import Array, checks


def _toeplitz_block(law: MinSepLaw) -> Array:
    """Columns s, …, s+B-1 of C, transposed: shape (B, B+bands-1), the same for every s.

    Columns that the end of C cuts need no block of their own: there, the outputs are zero.
    """
    rows = law.block_rows
    block = np.zeros((rows, rows + law.bands - 1))
    for k, value in enumerate(law.coefficients):
        block[np.arange(rows), np.arange(rows) + k] = value
    return block


class _Signal:
    """Rows of C^T C x for sampled participations x (``lanes`` examples side by side).

    The product is taken from a dense window of x, zero but for a one per participation: sixteen
    times fewer scattered writes than into C x. Row i needs x_{i-bands+1}, …, x_{i+bands-1}.
    """

    def __init__(self, law: MinSepLaw, rng: np.random.Generator, lanes: int) -> None:
        self._times, lane = participations(law, rng, lanes)
        self._cells = torch.from_numpy(self._times * lanes + lane)
        self._lanes, self._halo = lanes, law.bands - 1
        rows = law.block_rows
        self._window = torch.zeros((rows + 2 * self._halo, lanes), dtype=torch.float64)
        self._marked = self._cells[:0]
        block = _toeplitz_block(law)
        columns = np.zeros((rows + self._halo, rows + 2 * self._halo))
        for k, value in enumerate(law.coefficients):
            at = np.arange(rows + self._halo)
            columns[at, at + self._halo - k] = value
        self._gram = torch.from_numpy(block @ columns)
        # The block that ends at row n-1 sees columns of C that are cut there.
        self._last_gram = torch.from_numpy(block[:, :rows] @ columns[:rows])
        self._last_start = law.steps - rows

    def rows(self, start: int, scale: float, base: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write ``base`` (or zero) plus ``scale`` times rows start, start+1, … of C^T C x."""
        flat, low = self._window.view(-1), start - self._halo
        flat.index_fill_(0, self._marked, 0.0)
        first, last = np.searchsorted(self._times, [low, low + len(self._window)])
        self._marked = self._cells[first:last] - low * self._lanes
        flat.index_fill_(0, self._marked, 1.0)
        gram = self._last_gram if start == self._last_start else self._gram
        if base is None:
            torch.mm(gram * scale, self._window, out=out)
        else:
            torch.addmm(base, gram * scale, self._window, out=out)


def _run(
    law: MinSepLaw,
    recursions: Sequence[Recursion],
    sigmas: Sequence[float],
    lanes: int,
    fill: Callable[[int, Array], None],
    directions: Sequence[Direction] = ("add",),
    signal: _Signal | None = None,
) -> None:
    """Feed every recursion with its exponents <c_i, y>/σ², from the last row to the first.

    ``fill(first_row, block)`` writes z into the rows of ``block``; y = C x + σ z, so the exponents
    are (C^T z)/σ + (C^T C x)/σ², without the second term for "add". The recursions' lanes are those
    of the first direction, then those of the second; both share z and its product, and so do
    several σ.
    """
    rows, halo, n = law.block_rows, law.bands - 1, law.steps
    several = len(sigmas) > 1
    checks.invariant(
        (signal is not None) == ("remove" in directions),
        "a signal goes with the direction of removal, and with no other",
    )
    inverse = [1.0 / sigma for sigma in sigmas]
    matrix = torch.from_numpy(_toeplitz_block(law) * (1.0 if several else inverse[0]))
    # Row s+j of the block that starts at s is at position j; the rows after it are the halo.
    noise = np.zeros((rows + halo, lanes))
    exponents = torch.empty((rows, len(directions), lanes), dtype=torch.float64)
    by_direction = dict(zip(directions, exponents.unbind(1), strict=True))
    plain = by_direction["add" if "add" in directions else "remove"]
    from_noise = torch.empty((rows, lanes), dtype=torch.float64) if several else None
    from_signal = torch.empty((rows, lanes), dtype=torch.float64) if several and signal else None
    half_norms = law.squared_norms / 2.0
    for start in range(n - rows, -rows, -rows):
        first = max(0, -start)  # position of row 0 in the last, shorter block
        if start < n - rows:
            noise[rows:] = noise[:halo]
        fill(start + first, noise[first:rows])
        product = plain if from_noise is None else from_noise
        torch.mm(matrix, torch.from_numpy(noise), out=product)
        if signal is not None and from_signal is not None:
            signal.rows(start, 1.0, None, from_signal)
        elif signal is not None:
            signal.rows(start, inverse[0] ** 2, product, by_direction["remove"])
        for factor, recursion in zip(inverse, recursions, strict=True):
            if several:
                for direction, exponent in by_direction.items():
                    torch.mul(product, factor, out=exponent)
                    if direction == "remove" and from_signal is not None:
                        exponent.add_(from_signal, alpha=factor**2)
            recursion.consume(
                start + first,
                exponents.view(rows, -1)[first:],
                (half_norms[start + first : start + rows] * factor**2).tolist(),
            )


def _recursions(
    law: MinSepLaw, sigmas: Sequence[float], lanes: int, log_space: bool | None
) -> list[Recursion]:
    norm = math.sqrt(float(law.squared_norms[0]))
    return [
        make_recursion(
            probability=law.probability,
            min_sep=law.min_sep,
            warm_start=law.warm_start,
            lanes=lanes,
            norm=norm,
            sigma=sigma,
            log_space=log_space,
        )
        for sigma in sigmas
    ]


def log_ratio(
    law: MinSepLaw, sigma: float, outputs: npt.ArrayLike, *, log_space: bool = True
) -> Array:
    """log P(y)/Q(y) of given outputs y, shape (steps, k): shape (k,)."""
    y = np.asarray(outputs, dtype=np.float64)
    if y.ndim != 2 or y.shape[0] != law.steps:
        raise ValueError(f"outputs of shape {y.shape}: expected ({law.steps}, k)")

    def fill(row: int, block: Array) -> None:
        block[:] = y[row : row + len(block)] / sigma

    recursions = _recursions(law, [sigma], y.shape[1], log_space)
    _run(law, recursions, [sigma], y.shape[1], fill)
    return recursions[0].log_ratio(law.warm_start)


def sample_losses(
    law: MinSepLaw,
    sigmas: Sequence[float],
    direction: Direction | Literal["both"],
    rng: np.random.Generator,
    size: int,
    *,
    log_space: bool | None = None,
) -> Array:
    """Privacy losses, independent within a row: shape (len(sigmas), size).

    ``"remove"`` draws y ~ P and returns log P/Q; ``"add"`` draws y ~ Q and returns log Q/P;
    ``"both"`` returns both in shape (2, len(sigmas), size), in the order of DIRECTIONS, for about
    three quarters of the work. The entries of one row are independent; rows share their noise and
    participations, so a column shows one draw at several σ and in both directions. Time runs
    backwards in blocks, so memory does not grow with n beyond the participations. Everything is
    float64; the error of a loss is below 1e-10.
    """
    directions = DIRECTIONS if direction == "both" else (direction,)
    signal = _Signal(law, rng, size) if "remove" in directions else None

    def fill(row: int, block: Array) -> None:
        del row
        rng.standard_normal(out=block)

    recursions = _recursions(law, sigmas, len(directions) * size, log_space)
    _run(law, recursions, sigmas, size, fill, directions, signal)
    losses = np.empty((len(directions), len(sigmas), size))
    for index, recursion in enumerate(recursions):
        losses[:, index] = recursion.log_ratio(law.warm_start).reshape(len(directions), size)
    for index, each in enumerate(directions):
        if each == "add":
            losses[index] *= -1.0
    return losses if direction == "both" else losses[0]


Engine = Literal["auto", "numpy", "numba", "cuda"]
# Below this the float64 engine draws a certificate's ten million samples in seconds, which would
# not pay a first compilation.
LEAST_COMPILED_STEPS = 64


@dataclasses.dataclass(frozen=True)
class MinSepLosses(Simulation):
    """The privacy losses of a ``MinSepLaw``, exact for each simulated output.

    Args:
        law: the pair (P, Q).
        engine: ``"numpy"`` (``sample_losses``), ``"numba"`` (compiled: about five times faster;
            losses are raised by the bound on their rounding), ``"cuda"`` (the same on a GPU by
            torch), or ``"auto"``: numba where it is installed and there are at least
            ``LEAST_COMPILED_STEPS`` steps, else numpy. One seed means other draws in another
            engine, so the engine is part of ``to_dict``; once made, the field names it.

    Raises:
        ValueError: if the engine is unknown or cannot draw from this law on this machine; for
            ``"cuda"`` once something is drawn, so that certificates can be read without a GPU.
    """

    law: MinSepLaw
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        checks.choice("engine", self.engine, ("auto", "numpy", "numba", "cuda"))
        refusal = None
        if self.engine == "auto":
            compiled = self.law.steps >= LEAST_COMPILED_STEPS
            compiled = compiled and min_sep_compiled.refusal(self.law) is None
            object.__setattr__(self, "engine", "numba" if compiled else "numpy")
        elif self.engine == "numba":
            refusal = min_sep_compiled.refusal(self.law)
        if refusal is not None:
            raise ValueError(f"engine={self.engine!r}: {refusal}")

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖ over the patterns of participation."""
        return self.law.sensitivity

    @property
    def work(self) -> int:
        """Number of steps."""
        return self.law.steps

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        if self.engine == "numba":
            return min_sep_compiled.LANES
        return min_sep_device.lanes(self.law) if self.engine == "cuda" else self.law.lanes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of the law, and the engine that a seed is for."""
        return {**self.law.to_dict(), "engine": self.engine}

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Draw losses by the engine; all of them are coupled with those of ``sample_losses``."""
        if self.engine == "numpy":
            return sample_losses(self.law, sigmas, direction, rng, size)
        directions = DIRECTIONS if direction == "both" else (direction,)
        sample = min_sep_compiled.sample
        if self.engine == "cuda":
            sample = functools.partial(min_sep_device.sample, device="cuda")
        losses = sample(self.law, sigmas, directions, rng, size)
        return losses if direction == "both" else losses[0]
