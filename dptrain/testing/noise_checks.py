"""What the checks of a noise stream share: its strategy, its Z drawn without it, comparisons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from dptrain.core import Array
from dptrain.noise import NoiseStream, noise_stream
from dptrain.noise.generators import fill_normal
from dptrain.strategies import Strategy

SEED = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321


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
    ) -> NoiseStream:
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

    def draw_z(self, seed: int, size: int, *, group: int = 0) -> Array:
        """Z, shape (rows of C, size), drawn without a stream."""
        rows = []
        for step in range(self.bound().rows(self.steps)):
            row = torch.empty(size, dtype=torch.float32, device=self.device)
            fill_normal(row, seed=seed, group=group, step=step)
            rows.append(row.double().cpu().numpy())
        return np.array(rows)

    def rows(self, stream: NoiseStream, count: int) -> list[list[torch.Tensor]]:
        """The next rows, copied (a stream may reuse its memory)."""
        return [[tensor.clone() for tensor in next(stream)] for _ in range(count)]

    def matrix(self, stream: NoiseStream) -> Array:
        """All rows of a stream, flattened: shape (steps, D)."""
        return np.array(
            [
                torch.cat([tensor.flatten().double() for tensor in row]).cpu().numpy()
                for row in self.rows(stream, self.steps)
            ]
        )

    def assert_equal(self, a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> None:
        """Bitwise equality of rows."""
        for row_a, row_b in zip(a, b, strict=True):
            for tensor_a, tensor_b in zip(row_a, row_b, strict=True):
                assert torch.equal(tensor_a, tensor_b)

    def assert_solves(self, noise: Array, z: Array) -> None:
        """``noise`` is W z up to float32 rounding: some ulps (6e-8) of entries of about 5."""
        gain = max(1.0, float(np.abs(self.left_inverse()).sum(axis=1).max()))
        np.testing.assert_allclose(noise, self.bound().solve(z), atol=5e-6 * gain, rtol=0)
