"""The order of scattering features: their mirror images and normalization."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import torch

from recipes.data.scattering import ANGLES, CORNERS, PATHS

_SMALL = 1e-5  # beside a variance, as of torch's GroupNorm


class Feature(NamedTuple):
    """The average that a feature is.

    Attributes:
        color: of the image.
        kind: of waves.
        angles: of these, in eighths of a half turn; of moduli of moduli the outer one first.
        corner: of the 4×4 pixels, row and column; ``None`` for all of them.
    """

    color: int
    kind: str
    angles: tuple[int, ...] = ()
    corner: tuple[int, int] | None = None

    def mirrored(self) -> Feature:
        """Of the mirror image, left for right: waves at π - θ for θ."""
        angles = tuple(-angle % ANGLES for angle in self.angles)
        corner = None if self.corner is None else (self.corner[0], 1 - self.corner[1])
        return self._replace(angles=angles, corner=corner)

    def group(self) -> tuple[int, str, int]:
        """What stays in a mirror image, or one that is turned: not angles, but what is between."""
        first, last = (self.angles[0], self.angles[-1]) if self.angles else (0, 0)
        apart = min((first - last) % ANGLES, (last - first) % ANGLES)
        return self.color, self.kind, apart


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The positions of ``scattering``'s features.

    Args:
        colors: C, of the images.
    """

    colors: int

    def features(self) -> list[Feature]:
        """In the order in which they stand."""
        angles, corners = range(ANGLES), list(itertools.product(range(2), range(2)))
        one = [
            ("image", ()),
            *(("fine", (a,)) for a in angles),
            *(("coarse", (a,)) for a in angles),
        ]
        one += [("of fine", pair) for pair in itertools.product(angles, angles)]
        colors = range(self.colors)
        found = [Feature(color, *path) for color in colors for path in one]
        found += [Feature(color, "near", (), k) for color in colors for k in corners]
        found += [
            Feature(color, "fine, near", (a,), k)
            for color in colors
            for a in angles
            for k in corners
        ]
        return found

    @property
    def channels(self) -> int:
        """Features of a place."""
        return self.colors * (PATHS + CORNERS * (1 + ANGLES))

    def mirrored(self) -> list[int]:
        """The feature of an image for each feature of its mirror image."""
        features = self.features()
        places = {feature: place for place, feature in enumerate(features)}
        return [places[feature.mirrored()] for feature in features]

    def kinds(self) -> list[int]:
        """The group of each feature: a color's of one kind, all angles together.

        Moduli of moduli are of one kind if their two angles differ by as much. A feature and what
        it is of a mirror image, or of one that is turned by a right angle, are of the same kind.
        """
        groups = [feature.group() for feature in self.features()]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        return [numbers[group] for group in groups]

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
