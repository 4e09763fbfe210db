"""Which scattering feature stands where: what mirrors it, and what it is normalized with."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.functional import group_norm

from recipes.data.scattering import ANGLES, CORNERS, PATHS

GROUPS = 27


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """Which of ``scattering``'s features stand where.

    Args:
        colours: C, of the images.
        fine: whether there are averages over 2×2 pixels.
    """

    colours: int
    fine: bool = False

    @property
    def channels(self) -> int:
        """Features of a place."""
        return self.colours * (PATHS + (CORNERS * (1 + ANGLES) if self.fine else 0))

    def mirrored(self) -> list[int]:
        """Which feature of an image each feature of its mirror image is: waves at π - θ for θ."""
        turned = [-angle % ANGLES for angle in range(ANGLES)]
        first, coarse, both = 1, 1 + ANGLES, 1 + 2 * ANGLES
        one = [0, *(first + angle for angle in turned), *(coarse + angle for angle in turned)]
        one += [both + ANGLES * outer + inner for outer in turned for inner in turned]
        found = [PATHS * colour + path for colour in range(self.colours) for path in one]
        for kind in ([0], turned) if self.fine else ():  # averages of the image, and of moduli
            start = len(found)
            found += [
                start + CORNERS * (len(kind) * colour + path) + corner
                for colour in range(self.colours)
                for path in kind
                for corner in (1, 0, 3, 2)  # left for right
            ]
        return found

    def normalized(self, maps: torch.Tensor) -> torch.Tensor:
        """Each example's features, in 27 groups; with ``fine`` the others' two kinds by colour."""
        colours = self.colours
        if not self.fine:
            return group_norm(maps, GROUPS)
        parts = maps.split([PATHS * colours, CORNERS * colours, CORNERS * ANGLES * colours], 1)
        groups = GROUPS, colours, colours
        return torch.cat([group_norm(*pair) for pair in zip(parts, groups, strict=True)], 1)
