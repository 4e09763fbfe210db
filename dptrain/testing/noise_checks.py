"""The base of the checks of a noise stream: its strategy, its Z drawn without it, comparisons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from dptrain.core import Array
from dptrain.noise import FlatStream, noise_stream
from dptrain.noise.generators import Normals
from dptrain.strategies import Strategy
from dptrain.testing.requiring import require

SEED = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321


class Watched(Normals):
    """Normals that remember how the rows of Z were asked for.

    Attributes:
        asked: by step, the bits of the grid and the scale.
    """

    def __init__(self, normals: Normals) -> None:
        super().__init__(normals.seed, secure=normals.secure)
        self.asked: dict[int, tuple[int, float]] = {}

    def fill(self, out: torch.Tensor, **place: Any) -> None:
        """As the normals that are watched."""
        self.asked[place["step"]] = place["bits"], place.get("scale", 1.0)
        super().fill(out, **place)


class NoiseChecks(ABC):
    """Base of the contracts.

    Attributes:
        steps: n of the checks.
        device: where the noise is drawn.
        samples: entries of the two parameters of the statistical checks.
    """

    steps: int = 19
    device: str = "cpu"
    samples: int = 150_000
    _bound: ClassVar[dict[tuple[type, int], Strategy]] = {}

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """The strategy whose noise is checked, as a user would declare it."""

    def foreign_strategy(self) -> Strategy:
        """A strategy of the same family whose state must be refused."""
        raise NotImplementedError

    def bound(self) -> Strategy:
        """The strategy for ``steps``; optimized once, as the checks open many streams."""
        key = (type(self), self.steps)
        if key not in self._bound:
            self._bound[key] = self.make_strategy().bind(self.steps)
        return self._bound[key]

    def left_inverse(self) -> Array:
        """W, shape (steps, rows)."""
        return self.bound().solve(np.eye(self.bound().rows(self.steps)))

    def like(self) -> list[torch.Tensor]:
        """Parameters of several shapes and dtypes, a scalar and an empty one among them."""
        shapes_dtypes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((3, 4), torch.float32),
            ((), torch.float32),
            ((5,), torch.float64),
            ((0, 2), torch.float32),
            ((2, 1, 3), torch.bfloat16),
        ]
        return [torch.zeros(s, dtype=d, device=self.device) for s, d in shapes_dtypes]

    def open(
        self,
        seed: int = SEED,
        *,
        steps: int | None = None,
        like: list[torch.Tensor] | None = None,
        strategy: Strategy | None = None,
        **options: Any,
    ) -> FlatStream:
        """The stream of the checks."""
        if strategy is None:
            strategy = self.bound() if steps in (None, self.steps) else self.make_strategy()
        return noise_stream(
            strategy,
            steps=self.steps if steps is None else steps,
            like=self.like() if like is None else like,
            seed=seed,
            **options,
        )

    def draws(self, **options: Any) -> list[tuple[int, float]]:
        """For each row of Z the bits of the grid it is drawn on, and the scale."""
        stream = self.open(like=[torch.zeros(1, device=self.device)], **options)
        watched = stream.normals = Watched(stream.normals)
        for _ in range(self.steps):
            next(stream)
        require(sorted(watched.asked) == list(range(self.steps)), "a row of Z for every step")
        return [watched.asked[step] for step in range(self.steps)]

    def fill(self, out: torch.Tensor, *, seed: int, **place: Any) -> None:
        """A row of Z, drawn without a stream."""
        Normals(seed).fill(out, **place)

    def whole_z(self, seed: int, size: int, *, group: int = 0) -> Array:
        """Z as it is drawn, whole numbers of its grid: shape (steps, size)."""
        rows = []
        for step, (bits, scale) in enumerate(self.draws()):
            row = torch.empty(size, dtype=torch.float64, device=self.device)
            self.fill(row, seed=seed, group=group, step=step, bits=bits, scale=scale)
            rows.append(row.cpu().numpy())
        return np.array(rows)

    def draw_z(self, seed: int, size: int, *, group: int = 0) -> Array:
        """Z, shape (steps, size), drawn without a stream: standard normals."""
        units = np.array([2.0**-bits / scale for bits, scale in self.draws()])
        return self.whole_z(seed, size, group=group) * units[:, None]

    def factor(self) -> Array:
        """L with L Lᵀ = W Wᵀ, lower-triangular: the noise is L times a row of normals a step.

        W itself where C is square; otherwise one normal a step has to stand for all that a row of
        W adds, and only L has the law.
        """
        inverse = self.left_inverse()
        if inverse.shape[1] == self.steps:
            return inverse
        return np.asarray(np.linalg.cholesky(inverse @ inverse.T))

    def rounding(self, stream: FlatStream) -> Array:
        """The largest move of the rows of Z by rounding: shape (steps,), in standard deviations.

        The noise is ⌊z_t + u_t⌉. Rounding it to a coarser grid than that of z_t moves z_t by half a
        unit, and u_t is off by ``rounding_error``; where that is not known, a row of C times half a
        unit is allowed, and half as much again.
        """
        units = 2.0**-stream.grid_bits / np.diag(self.factor())
        if stream.rounding_error is None:
            rows = np.abs(self.bound().columns(self.steps, np.arange(self.steps))).sum(axis=1)
            return np.asarray(0.75 * rows * units)
        finer = np.array([bits > stream.grid_bits for bits, _ in self.draws()])
        return np.asarray(stream.rounding_error + 0.5 * units * finer)

    def rows(self, stream: FlatStream, count: int) -> list[list[torch.Tensor]]:
        """The next rows, copied (a stream may reuse its memory)."""
        return [[tensor.clone() for tensor in next(stream)] for _ in range(count)]

    def matrix(self, stream: FlatStream) -> Array:
        """All rows of a stream, flattened, in standard deviations of Z: shape (steps, D)."""
        return np.array(
            [
                units(torch.cat([tensor.flatten() for tensor in row]), stream)
                for row in self.rows(stream, self.steps)
            ]
        )

    def assert_equal(self, a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> None:
        """Bitwise equality of rows."""
        for row_a, row_b in zip(a, b, strict=True):
            for tensor_a, tensor_b in zip(row_a, row_b, strict=True):
                require(torch.equal(tensor_a, tensor_b))

    def assert_solves(self, noise: Array, z: Array, stream: FlatStream) -> None:
        """``noise`` is L z up to how far rounding moved z, and the 1e-12 of products in float64."""
        factor = self.factor()
        moved = np.abs(factor) @ self.rounding(stream)
        gain = max(1.0, float(np.abs(factor).sum(axis=1).max()))
        require(np.all(np.abs(noise - factor @ z) <= moved[:, None] + 1e-12 * gain))


def units(row: torch.Tensor, stream: FlatStream) -> Array:
    """A row of noise in standard deviations of Z, float64."""
    return np.asarray(row.double().cpu().numpy() * 2.0**-stream.grid_bits)
