"""Which scattering feature stands where: what mirrors it, and what it is normalized with."""

from __future__ import annotations

import dataclasses
import functools

import torch

from recipes.data.scattering import ANGLES, CORNERS, PATHS

_SMALL = 1e-5  # beside a variance, as of torch's GroupNorm


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """Which of ``scattering``'s features stand where.

    Args:
        colours: C, of the images.
    """

    colours: int

    @property
    def channels(self) -> int:
        """Features of a place."""
        return self.colours * (PATHS + CORNERS * (1 + ANGLES))

    def mirrored(self) -> list[int]:
        """Which feature of an image each feature of its mirror image is: waves at π - θ for θ."""
        turned = [-angle % ANGLES for angle in range(ANGLES)]
        first, coarse, both = 1, 1 + ANGLES, 1 + 2 * ANGLES
        one = [0, *(first + angle for angle in turned), *(coarse + angle for angle in turned)]
        one += [both + ANGLES * outer + inner for outer in turned for inner in turned]
        found = [PATHS * colour + path for colour in range(self.colours) for path in one]
        for kind in ([0], turned):  # averages of the image, and of moduli
            start = len(found)
            found += [
                start + CORNERS * (len(kind) * colour + path) + corner
                for colour in range(self.colours)
                for path in kind
                for corner in (1, 0, 3, 2)  # left for right
            ]
        return found

    def kinds(self) -> list[int]:
        """The group of each feature: a colour's of one kind, all angles together.

        Moduli of moduli are of one kind if their two angles differ by as much. A feature and what
        it is of a mirror image, or of one that is turned by a right angle, are of the same kind.
        """
        apart = [
            min((outer - inner) % ANGLES, (inner - outer) % ANGLES)
            for outer in range(ANGLES)
            for inner in range(ANGLES)
        ]
        one = [0, *[1] * ANGLES, *[2] * ANGLES, *(3 + turn for turn in apart)]
        of_paths = max(one) + 1
        kinds = of_paths + 2
        found = [kinds * colour + kind for colour in range(self.colours) for kind in one]
        for kind, paths in ((of_paths, 1), (of_paths + 1, ANGLES)):
            for colour in range(self.colours):
                found += [kinds * colour + kind] * (CORNERS * paths)
        return found

    def normalized(self, maps: torch.Tensor) -> torch.Tensor:
        """Each example's features less the mean of their kind, over its standard deviation.

        Args:
            maps: as ``scattering`` returns them, (B, channels, H, W).
        """
        kinds, sizes = _grouped(self)
        centred = maps - _of_kinds(maps.mean((2, 3)), kinds, sizes)[..., None, None]
        variances = _of_kinds(centred.square().mean((2, 3)), kinds, sizes)
        return centred * (variances + _SMALL).rsqrt()[..., None, None]


@functools.cache
def _grouped(layout: FeatureLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The kind of each feature, and how many are of it."""
    kinds = torch.tensor(layout.kinds())
    return kinds, kinds.bincount()


def _of_kinds(values: torch.Tensor, kinds: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """In place of each feature's value, (B, channels), the mean of those of its kind."""
    sums = values.new_zeros(len(values), len(sizes)).index_add_(1, kinds, values)
    return (sums / sizes)[:, kinds]
