"""The cost of rounding in a run: a share of the clipping norm, and a little of ε and δ."""

from __future__ import annotations

import dataclasses
import math

from dptrain.noise.generators.rounded import RATIO, REST

_REST = 1e-12  # δ₀: what is spent on the tail of what rounding adds to the privacy loss


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The numbers of docs/theory/noise.md#thm-release for a run.

    Attributes:
        grid_bits: j; what is released are whole numbers of 2^-j σR.
        entries: d, of all parameters that are trained.
        steps: n.
        noise_multiplier: σ.
        examples: N, more than a batch ever has.
        error: how far rounding within the recursion moves a number of Z, in standard deviations, at
            most; ``None`` if that is not known.
    """

    grid_bits: int
    entries: int
    steps: int
    noise_multiplier: float
    examples: int
    error: float | None

    @property
    def pad(self) -> float:
        """The share of R that rounding a clipped sum to the grid takes: √d·2^-j·σ, and N·2^-50.

        Gradients are clipped to R·(1 - pad), so that two sums on the grid differ by R at most.

        Raises:
            ValueError: if it is half of R or more.
        """
        if self.noise_multiplier == 0.0:
            return 0.0
        grid = math.sqrt(self.entries) * self.noise_multiplier * 2.0**-self.grid_bits
        pad = grid + self.examples * 2.0**-50
        if not pad < 0.5:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} with {self.entries:,} parameters: the "
                f"noise is rounded to a grid, which has {self.grid_bits} bits with 32-bit buffers, "
                f"and this rounding takes {pad:.3g} of max_grad_norm. Use less noise, or a "
                "strategy without buffers of past noise"
            )
        return pad

    def left(self, epsilon: float, delta: float) -> tuple[float, float]:
        """Upper bounds on what pseudorandom normals and rounding in the recursion add to ε and δ.

        Args:
            epsilon: of the run, finite.
            delta: δ of the run.

        Raises:
            ValueError: if the error of the recursion is not known.
        """
        if self.error is None:
            raise ValueError("error=None: how the noise is rounded is not known")
        numbers = float(self.steps) * self.entries
        tail = math.log(1.0 / _REST) + epsilon + 2.0
        law = RATIO * math.sqrt(2.0 * numbers * tail) + numbers * RATIO**2
        moved = math.sqrt(numbers) * self.error
        both = law + moved * math.sqrt(2.0 * tail) + moved**2
        rare = numbers * REST * (1.0 + math.exp(min(epsilon, 700.0) + 1.0))
        if both > 0.25:
            return math.inf, 1.0
        return 2.0 * both, min(1.0, math.expm1(both) * delta + 5.0 * _REST + rare)

    def note(self, epsilon: float, delta: float) -> str:
        """A sentence for the guarantee.

        Args:
            epsilon: ε that is stated.
            delta: δ that is stated.
        """
        said = (
            f"Every release is a multiple of 2^-{self.grid_bits} σR; gradients are clipped to a "
            f"norm {_up(100 * self.pad)} % below R, which covers the rounding of their sums to "
            "these multiples; the guarantee assumes that float32 sums of clipped gradients differ "
            "by no more than the gradients (by 4.8e-4 R more at worst, for 64 rows in a part)"
        )
        if self.error is None:
            return f"{said}, and that the rounding within the noise stream is immaterial"
        if not math.isfinite(epsilon):
            return said
        more, rare = self.left(epsilon, delta)
        return (
            f"{said}; the distribution of the computed normals and the rounding within the noise "
            f"add at most {_up(more)} to ε and {_up(rare)} to δ, beyond the numbers above"
        )


def _up(value: float) -> str:
    """A number with two digits, rounded up."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.2g}"
