"""Which of two sums is in a release: a game that nobody wins by numbers alone, if all is right.

The sums are so near each other, or read in such a way, that the Gaussian noise itself tells next to
nothing. Nothing here imports the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from scipy.stats import binom

from tests.oracles.reachable import (
    FLOAT32,
    Codes,
    Forward,
    noisy_sum,
    sum_on_grid,
    unreachable,
    whole,
)

Evidence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of noisy sums, a release a row, against a sum: a number a release."""


@dataclasses.dataclass(frozen=True)
class Game:
    """Many releases of one of two sums, which an observer knows to the last bit.

    Attributes:
        sums: without and with the example, shape (numbers,).
        released: of either, shape (releases, numbers); noisy sums, not divided.
        deviation: σR.
        bits: of the grid of σR·2^-``bits``; ``None`` if there is none.
        noisy: how noise that is floats would be added to a sum of deviation σR.
        codes: of such noise.
    """

    sums: tuple[torch.Tensor, torch.Tensor]
    released: tuple[torch.Tensor, torch.Tensor]
    deviation: float
    bits: int | None
    noisy: Callable[[torch.Tensor, float], Forward] = noisy_sum
    codes: Codes = FLOAT32

    @classmethod
    def play(
        cls,
        release: Callable[[torch.Tensor], torch.Tensor],
        sums: tuple[torch.Tensor, torch.Tensor],
        *,
        deviation: float,
        bits: int | None = None,
        rounds: int = 40,
        noisy: Callable[[torch.Tensor, float], Forward] = noisy_sum,
        codes: Codes = FLOAT32,
    ) -> Game:
        """Half of the rounds with either sum.

        Args:
            release: gives the noisy sum of a copy of a sum.
            sums: without and with the example.
            deviation: σR.
            bits: of the grid; ``None`` if none is stated.
            rounds: of both together.
            noisy: see the class.
            codes: likewise.
        """
        found = [
            torch.stack([release(total.clone()) for _ in range(rounds // 2)]) for total in sums
        ]
        return cls(sums, (found[0], found[1]), deviation, bits, noisy, codes)

    @property
    def rounds(self) -> int:
        """How many releases there are."""
        return sum(len(each) for each in self.released)

    def guesses(self, evidence: Evidence) -> torch.Tensor:
        """Of every release 1 if the sum that there is less evidence against is its, else -1.

        0 where there is as much against one as against the other.
        """
        found = []
        for truth, released in enumerate(self.released):
            against = [evidence(released, total).double() for total in self.sums]
            found.append((against[0] - against[1]).sign() * (2 * truth - 1))
        return torch.cat(found)

    def right(self, evidence: Evidence) -> int:
        """How often one is right who goes by the evidence, and by coins where there is none."""
        guesses = self.guesses(evidence)
        coins = torch.randint(0, 2, guesses.shape, generator=torch.Generator().manual_seed(7))
        return int(torch.where(guesses == 0, coins, guesses > 0).sum())

    def floats(self, released: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Numbers that no noise makes of this sum that is floats."""
        forward = self.noisy(total.expand_as(released).contiguous(), self.deviation)
        return unreachable(released, forward, self.codes).sum(dim=1)

    def grid(self, released: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Numbers that no whole number makes of this sum; of one without a grid, none."""
        if self.bits is None:
            return torch.zeros(len(released))
        forward = sum_on_grid(total.expand_as(released), self.deviation, self.bits)
        return unreachable(released, forward, whole(self.bits)).sum(dim=1)

    def odd(self, released: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Odd numbers among the noise on the grid, as if noise ended in zeros more often."""
        unit = self.deviation * 2.0 ** -(self.bits or 40)
        n = (released.double() / unit).round() - (total.double() / unit).round()
        return (n.long() & 1).sum(dim=1)


def leaks(game: Game, *, chance: float = 1e-6) -> tuple[str, ...]:
    """What contradicts that the release is on its grid and tells nothing by its numbers.

    Args:
        game: that was played.
        chance: that something is said of a release that is right, at most.
    """
    found = []
    beyond = sum(
        int(game.grid(released, total).sum())
        for released, total in zip(game.released, game.sums, strict=True)
    )
    if beyond:
        found.append(f"release not on a grid: {beyond} numbers are not whole numbers of it")
    for evidence, what in ((game.floats, "which floats it can reach"), (game.odd, "its last bit")):
        right = game.right(evidence)
        if binom.sf(right - 1, game.rounds, 0.5) < chance / 2:
            found.append(
                f"release not on a grid: {what} told which sum it was of, {right} times of "
                f"{game.rounds}"
            )
    return tuple(found)
