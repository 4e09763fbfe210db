"""Scattering features of images: fixed wavelets in place of learnt convolutions.

On small private data sets a linear model of them beats convolutional nets that are trained from
nothing (Tramèr & Boneh 2021, arXiv 2011.11660). A feature is a function of its own image alone, and
the wavelets were not learnt, so that nothing of one example reaches another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

ANGLES = 8
SCALES = 2
STRIDE = 2**SCALES
"""Pixels a side that one feature stands for."""
PATHS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2
"""Features for each colour and place: 81."""


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Averages of an image, of moduli of its wavelet transform, and of moduli of these' transforms.

    Two scales, eight angles, Morlet wavelets (Bruna & Mallat 2013, arXiv 1203.1513; widths and
    frequencies of Oyallon & Mallat 2015, arXiv 1412.8659): x ∗ φ, |x ∗ ψ_λ| ∗ φ and
    ||x ∗ ψ_λ| ∗ ψ_μ| ∗ φ for μ coarser than λ. Borders are reflected. A feature stands at the
    middle of its 4×4 pixels, and what is kept at every second place at the middle of 2×2, so that
    the features of a mirror image are those of the image in another order.

    Args:
        images: shape (B, C, H, W), with H and W multiples of 4 and at least 8.

    Returns:
        Shape (B, 81 C, H / 4, W / 4), a colour's features next to each other.

    Raises:
        ValueError: for other sizes.
    """
    examples, colours, *sizes = images.shape
    for size in sizes:
        check_scattered(size)
    padded = pad(images, (STRIDE,) * 4, mode="reflect").flatten(0, 1)
    bank = _bank(*padded.shape[-2:])

    def moduli(maps: torch.Tensor, scale: int) -> torch.Tensor:
        """Of all angles, in a dimension before height and width, at every 2^scale-th place."""
        spectrum = torch.fft.fft2(maps)[..., None, :, :] * bank.wavelets[scale]
        return torch.fft.ifft2(_folded(spectrum, 2**scale)).abs()

    def averaged(maps: torch.Tensor, scale: int) -> torch.Tensor:
        """Around the middle of every 4×4 pixels, of maps at every 2^scale-th place."""
        left = STRIDE >> scale
        spectrum = torch.fft.fft2(maps) * bank.averages[scale]
        smooth = torch.fft.ifft2(_folded(spectrum, left)).real
        return smooth[..., 1:-1, 1:-1]

    fine, coarse = moduli(padded, 0), moduli(padded, 1)
    features = [
        averaged(padded, 0)[:, None],
        averaged(fine, 0),
        averaged(coarse, 1),
        averaged(moduli(fine, 1), 1).flatten(1, 2),
    ]
    joined = torch.cat(features, dim=1)
    return joined.view(examples, colours * PATHS, *joined.shape[-2:])


def check_scattered(image_size: int) -> None:
    """Refuse a height or width, in pixels, that has no features.

    Raises:
        ValueError: naming it.
    """
    if image_size % STRIDE or image_size < 2 * STRIDE:
        raise ValueError(
            f"data.features=scattering with images of {image_size} pixels: height and width have "
            f"to be multiples of {STRIDE}, and at least {2 * STRIDE}; set data.features to null"
        )


def _folded(spectrum: torch.Tensor, step: int) -> torch.Tensor:
    """The spectrum of every ``step``-th value in both directions."""
    *rest, height, width = spectrum.shape
    return spectrum.view(*rest, step, height // step, step, width // step).mean((-4, -2))


@dataclasses.dataclass(frozen=True)
class _Bank:
    """Filters by their spectra, complex.

    Attributes:
        averages: φ at every place, and at every second, shapes (H, W) and (H / 2, W / 2); from one
            place to the middle of those that it stands for.
        wavelets: ψ of each scale, shape (angles, H, W), likewise.
    """

    averages: tuple[torch.Tensor, ...]
    wavelets: tuple[torch.Tensor, ...]


@functools.cache
def _bank(height: int, width: int) -> _Bank:
    angles = [angle * math.pi / ANGLES for angle in range(ANGLES)]
    averages, wavelets = [], []
    for scale in range(SCALES):
        middle = _middle(2**scale)
        here = functools.partial(_gabor, _around(height, middle), _around(width, middle))
        spread, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
        wavelets.append(torch.stack([_morlet(here, spread, angle, frequency) for angle in angles]))
        onward = _middle(STRIDE) - middle
        average = _gabor(
            _around(height, onward), _around(width, onward), 0.8 * 2 ** (SCALES - 1), slant=1.0
        )
        averages.append(4**scale * _folded(_spectrum(average), 2**scale))
    return _Bank(tuple(averages), tuple(wavelets))


def _middle(side: int) -> float:
    """Of so many pixels next to each other, from the first of them."""
    return (side - 1) / 2


def _morlet(
    gabor: Callable[..., torch.Tensor], spread: float, angle: float, frequency: float
) -> torch.Tensor:
    """The spectrum of a Gabor function less as much of its envelope as makes the mean vanish."""
    slant = 4 / ANGLES
    wave = gabor(spread, angle, frequency, slant=slant)
    envelope = gabor(spread, angle, slant=slant)
    return _spectrum(wave - wave.sum() / envelope.sum() * envelope)


def _gabor(
    rows: torch.Tensor,
    columns: torch.Tensor,
    spread: float,
    angle: float = 0.0,
    frequency: float = 0.0,
    *,
    slant: float,
) -> torch.Tensor:
    """A plane wave under a Gaussian that integrates to one, on a torus; complex128, (H, W)."""
    down, right = torch.meshgrid(rows, columns, indexing="ij")
    along = right * math.cos(angle) + down * math.sin(angle)
    across = down * math.cos(angle) - right * math.sin(angle)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * spread**2))
    wave = envelope * torch.exp(1j * frequency * along)
    turns = wave.view(3, len(rows) // 3, 3, len(columns) // 3).sum((0, 2))
    return turns * slant / (2 * math.pi * spread**2)


def _around(size: int, first: float) -> torch.Tensor:
    """Positions on three turns of a torus of so many pixels, the middle turn's from ``first``."""
    return torch.arange(-size, 2 * size, dtype=torch.float64) + first


def _spectrum(filter_: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft2(filter_).to(torch.complex64)
