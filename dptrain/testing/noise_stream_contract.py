"""The contract that every noise stream must fulfil; subclass it in a test module."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dptrain.core import Array
from dptrain.testing.noise_checks import SEED, units
from dptrain.testing.noise_options_contract import NoiseOptionsContract
from dptrain.testing.requiring import require


class NoiseStreamContract(NoiseOptionsContract):
    """Checks of the noise of one strategy: its algebra, its law, its restoration, its refusals.

    C may have more rows than columns (a tree): the noise then has the law of W Z for its left
    inverse W, and one row of normals a step.
    ``NoiseOptionsContract`` adds the checks of the options.
    """

    def two_long_parameters(self, seed: int = SEED) -> tuple[Array, ...]:
        """All noise of two parameters of ``samples`` entries: two arrays (steps, samples)."""
        like = [torch.zeros(self.samples, device=self.device) for _ in range(2)]
        stream = self.open(seed, like=like)
        rows = self.rows(stream, self.steps)
        return tuple(units(torch.stack([row[i] for row in rows]), stream) for i in (0, 1))

    def covariance(self) -> Array:
        """W Wᵀ, shape (steps, steps)."""
        inverse = self.left_inverse()
        return np.asarray(inverse @ inverse.T)

    def other_lengths(self) -> list[int]:
        """Run lengths besides ``steps`` that the strategy can be bound to; a dense C has none."""
        lengths = []
        for steps in (self.steps + 1, self.steps - 1):
            try:
                self.make_strategy().bind(steps)
            except ValueError:
                continue
            lengths.append(steps)
        return lengths

    # -- algebra ---------------------------------------------------------------------------------

    def small(self) -> list[torch.Tensor]:
        """Float32 parameters of 20 entries."""
        return [torch.zeros(s, device=self.device) for s in ((3, 4), (), (7,), (0, 2))]

    def test_a_row_of_z_is_drawn_for_every_step_with_the_deviation_of_its_noise(self) -> None:
        """The noise of a step adds L_tt z_t to what is known before it."""
        for bits, scale in self.draws():
            require(bits >= self.open().grid_bits)
            require(scale > 0)
        scales = [scale for _, scale in self.draws()]
        np.testing.assert_allclose(scales, np.diag(self.factor()), rtol=1e-12)

    def test_strategy_times_noise_is_z(self) -> None:
        """In exact arithmetic, up to half a unit of the grid and ``rounding_error``."""
        if self.bound().rows(self.steps) != self.steps:
            return  # W has a kernel: noise does not determine Z
        stream = self.open(like=self.small())
        moved = [Fraction(float(each)) for each in self.rounding(stream)]
        noise = [
            [Fraction(int(y), 1 << stream.grid_bits) for y in torch.cat([t.flatten() for t in row])]
            for row in self.rows(stream, self.steps)
        ]
        z = self.whole_z(SEED, 20)
        strategy = self.bound().columns(self.steps, np.arange(self.steps))
        for t, (bits, _) in enumerate(self.draws()):
            head = Fraction(strategy[t, t])
            coefficients = [(s, Fraction(strategy[t, s])) for s in np.flatnonzero(strategy[t])]
            for i in range(20):
                product = sum(c * noise[s][i] for s, c in coefficients)
                drawn = head * Fraction(int(z[t, i]), 1 << bits)  # scale is 1/head
                # C is given in float64, each entry within some units of its last place.
                given = 2.0**-50 * sum(abs(float(c * noise[s][i])) for s, c in coefficients)
                require(abs(product - drawn) <= moved[t] + Fraction(given))

    def test_dense_and_streaming_agree(self) -> None:
        stream = self.open(like=self.small())
        self.assert_solves(self.matrix(stream), self.draw_z(SEED, 20), stream)

    def test_a_declared_and_a_bound_strategy_give_the_same_noise(self) -> None:
        declared = self.open(strategy=self.make_strategy())
        self.assert_equal(self.rows(declared, self.steps), self.rows(self.open(), self.steps))

    def test_shapes_devices_and_position(self) -> None:
        stream = self.open()
        require(stream.step == 0)
        require(stream.steps == self.steps)
        for row in range(3):
            noise = next(stream)
            require(stream.step == row + 1)
            for tensor, parameter in zip(noise, self.like(), strict=True):
                require(tensor.shape == parameter.shape)
                require(tensor.dtype == torch.int64)
                require(tensor.device == parameter.device)
                require(not tensor.requires_grad)

    def test_parameters_that_require_gradients(self) -> None:
        like = [torch.nn.Parameter(tensor) for tensor in self.like()]
        ours = self.rows(self.open(like=like), self.steps)  # type: ignore[arg-type]
        self.assert_equal(ours, self.rows(self.open(), self.steps))

    def test_scaling_the_result_in_place_leaves_later_rows_alone(self) -> None:
        stream, scaled = self.open(), self.open()
        for _ in range(self.steps):
            expected = [tensor.clone() for tensor in next(stream)]
            noise = next(scaled)
            self.assert_equal([noise], [expected])
            for tensor in noise:
                tensor.mul_(100)

    # -- what leaves the machine -----------------------------------------------------------------

    def sums(self, deviation: float) -> list[torch.Tensor | None]:
        """Clipped sums of both dtypes and none, of many sizes, half units of the grid too."""
        grid = math.ldexp(deviation, -self.open().grid_bits)
        sums: list[torch.Tensor | None] = []
        for index, tensor in enumerate(self.like()):
            count = tensor.numel()
            if index % 3 == 2:
                sums.append(None)
                continue
            values = deviation * np.linspace(-16.0, 17.0, count) ** 3 / 100
            values[::3] = grid * (np.arange(len(values[::3])) + 0.5)
            dtype = torch.float64 if index % 2 else torch.float32
            row = torch.from_numpy(values).to(dtype).view(tensor.shape)
            sums.append(row.to(tensor.device))
        return sums

    @pytest.mark.parametrize("deviation", [1.0, 0.7, 3.1e-3, 123.4])
    def test_what_is_released_is_a_whole_number_of_the_grid(self, deviation: float) -> None:
        """h (⌊sum/h⌉ + noise), to the bit: in float64, then in the dtype of the sum."""
        stream, noise = self.open(), self.open()
        grid = math.ldexp(deviation, -stream.grid_bits)
        for _ in range(3):
            sums = self.sums(deviation)
            before = [None if total is None else total.clone() for total in sums]
            released = stream.release(sums, deviation)
            require(stream.step == noise.step + 1)
            for total, found, row, like in zip(
                before, released, next(noise), self.like(), strict=True
            ):
                require(found.shape == like.shape)
                require(found.device == like.device)
                if total is None:
                    total = torch.zeros_like(found)
                require(found.dtype == total.dtype)
                for s, v, n in zip(
                    total.flatten().tolist(), found.flatten(), row.flatten().tolist(), strict=True
                ):
                    self.assert_on_grid(s, v, n, grid)

    def assert_on_grid(self, total: float, found: torch.Tensor, noise: int, grid: float) -> None:
        """One number, by whole numbers and fractions."""
        ratio = Fraction(total) / Fraction(grid)
        near = math.floor(ratio)
        # A quotient in float64 may fall on the other side of a half.
        limit = Fraction(1, 2) + abs(ratio) / 2**51
        whole = [near + k for k in (-1, 0, 1, 2) if abs(near + k - ratio) <= limit]
        require(all(abs(k + noise) < 2**53 for k in whole))
        expected = torch.tensor([float(k + noise) * grid for k in whole], dtype=torch.float64)
        require(found.cpu() in expected.to(found.dtype))

    def test_a_release_without_noise_leaves_the_sums_alone_and_counts(self) -> None:
        stream = self.open()
        sums = self.sums(1.0)
        before = [None if total is None else total.clone() for total in sums]
        for total, found in zip(before, stream.release(sums, 0.0), strict=True):
            require(torch.equal(found, torch.zeros_like(found) if total is None else total))
        require(stream.step == 1)

    def test_refuses_sums_that_are_not_those_of_the_parameters(self) -> None:
        stream = self.open()
        for sums in (self.sums(1.0)[:-1], [*self.sums(1.0), None]):
            with pytest.raises(ValueError):  # noqa: PT011 - a stream says it in its own words
                stream.release(sums, 1.0)
        for deviation in (-1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="deviation"):
                stream.release(self.sums(1.0), deviation)

    # -- law; 6 sigma a comparison: 2e-9 each, fixed seed, fewer than 1000 comparisons ------------

    def assert_covariance(self, x: Array, y: Array, expected: Any) -> None:
        """E[x_s y_t] = ``expected`` within 6 standard errors of the mean of a product."""
        size = x.shape[1]
        sigma = self.covariance()
        variance = np.outer(np.diag(sigma), np.diag(sigma)) + np.square(expected)
        deviation = np.abs(x @ y.T / size - expected) / np.sqrt(variance / size)
        require(deviation.max() < 6)

    def test_covariance_over_steps(self) -> None:
        for noise in self.two_long_parameters():
            self.assert_covariance(noise, noise, self.covariance())
            means = noise.mean(axis=1) / np.sqrt(np.diag(self.covariance()) / self.samples)
            require(np.abs(means).max() < 6)

    def test_parameters_are_independent(self) -> None:
        first, second = self.two_long_parameters()
        self.assert_covariance(first, second, np.zeros((self.steps, self.steps)))

    def test_neighboring_entries_are_independent(self) -> None:
        first, _ = self.two_long_parameters()
        for shift in (1, 2, self.samples // 3):
            shifted = np.roll(first, shift, axis=1)
            self.assert_covariance(first, shifted, np.zeros((self.steps, self.steps)))

    def test_seeds_are_independent(self) -> None:
        first, _ = self.two_long_parameters()
        for bit in (0, 32, 64, 127):  # a generator that drops high bits repeats itself here
            other, _ = self.two_long_parameters(SEED ^ (1 << bit))
            self.assert_covariance(first, other, np.zeros((self.steps, self.steps)))

    # -- a pure function of the seed, restored bit for bit ----------------------------------------

    def test_is_a_function_of_the_seed_and_of_nothing_global(self) -> None:
        torch.manual_seed(0)
        first = self.rows(self.open(), self.steps)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        self.assert_equal(first, self.rows(self.open(), self.steps))
        require(torch.equal(before, torch.get_rng_state()))

    def test_no_row_repeats(self) -> None:
        like = [torch.zeros(50, device=self.device)]
        rows = torch.stack([row[0] for row in self.rows(self.open(like=like), self.steps)])
        require(len(torch.unique(rows, dim=0)) == self.steps)

    @pytest.mark.parametrize("position", [0, 1, 2, 3, 8, -1, None])
    def test_restores_bit_for_bit(self, position: int | None) -> None:
        position = self.steps if position is None else position % self.steps
        whole = self.open()
        self.rows(whole, position)
        file = io.BytesIO()
        state = whole.state_dict()
        rest = self.rows(whole, self.steps - position)  # the state must not move with its stream
        torch.save(state, file)
        file.seek(0)
        resumed = self.open(seed=SEED + 1)
        self.rows(resumed, 5)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        require(resumed.step == position)
        self.assert_equal(self.rows(resumed, self.steps - position), rest)

    # -- refusals --------------------------------------------------------------------------------

    def test_refuses_more_rows_than_steps(self) -> None:
        stream = self.open()
        self.rows(stream, self.steps)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=str(self.steps)):
                next(stream)
            with pytest.raises(RuntimeError, match=str(self.steps)):
                stream.release(self.sums(1.0), 1.0)

    def assert_refuses(self, state: dict[str, Any], match: str) -> None:
        """The state is refused and the stream goes on as if nothing had happened."""
        stream, undisturbed = self.open(), self.open()
        self.rows(stream, 4)
        self.rows(undisturbed, 4)
        with pytest.raises(ValueError, match=match):
            stream.load_state_dict(state)
        rest = self.steps - 4
        self.assert_equal(self.rows(stream, rest), self.rows(undisturbed, rest))

    def test_refuses_the_state_of_another_run(self) -> None:
        for steps in self.other_lengths():
            self.assert_refuses(self.open(steps=steps).state_dict(), "steps")
        transposed = [tensor.clone() for tensor in self.like()]
        transposed[0] = transposed[0].t()
        self.assert_refuses(self.open(like=transposed).state_dict(), "shapes")
        double = [tensor.double() for tensor in self.like()]
        self.assert_refuses(self.open(like=double).state_dict(), "dtypes")
        foreign = self.open(strategy=self.foreign_strategy()).state_dict()
        self.assert_refuses(foreign, "strategy")

    def test_refuses_a_damaged_state(self) -> None:
        for name in self.open().state_dict():
            state = self.open().state_dict()
            del state[name]
            self.assert_refuses(state, "state")
        self.assert_refuses({**self.open().state_dict(), "step": self.steps + 1}, "step")

    @pytest.mark.parametrize("seed", [-1, 1 << 128, 0.5, "1", None, True])
    def test_refuses_what_is_no_seed(self, seed: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="seed"):
            self.open(seed)

    def test_refuses_parameters_without_noise(self) -> None:
        with pytest.raises(ValueError, match="like"):
            self.open(like=[])
        with pytest.raises(ValueError, match="int64"):
            self.open(like=[torch.zeros(3, dtype=torch.int64, device=self.device)])
