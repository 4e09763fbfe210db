"""Scattering features of images: fixed wavelets in place of learnt convolutions.

On small private data sets a linear model of them beats convolutional nets that are trained from
nothing (Tramèr & Boneh 2021, arXiv 2011.11660). A feature is a function of its own image alone, and
the wavelets were not learnt, so that nothing of one example reaches another.
"""

from __future__ import annotations

import dataclasses
import functools
import math

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
    ||x ∗ ψ_λ| ∗ ψ_μ| ∗ φ for μ coarser than λ. Borders are reflected.

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
        """Around every fourth place of the image, of maps at every 2^scale-th."""
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
    """Filters by their spectra.

    Attributes:
        averages: φ at every place, and at every second, shapes (H, W) and (H / 2, W / 2).
        wavelets: ψ of each scale, shape (angles, H, W).
    """

    averages: tuple[torch.Tensor, ...]
    wavelets: tuple[torch.Tensor, ...]


@functools.cache
def _bank(height: int, width: int) -> _Bank:
    scales = []
    for scale in range(SCALES):
        spread, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
        angles = [angle * math.pi / ANGLES for angle in range(ANGLES)]
        each = [_morlet(height, width, spread, angle, frequency) for angle in angles]
        scales.append(torch.stack(each))
    average = _gabor(height, width, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, slant=1.0)
    full = torch.fft.fft2(average).real.float()
    return _Bank((full, 4 * _folded(full, 2)), tuple(scales))


def _morlet(height: int, width: int, spread: float, angle: float, frequency: float) -> torch.Tensor:
    """The spectrum of a Gabor function less as much of its envelope as makes the mean vanish."""
    slant = 4 / ANGLES
    wave = _gabor(height, width, spread, angle, frequency, slant=slant)
    envelope = _gabor(height, width, spread, angle, 0.0, slant=slant)
    return torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real.float()


def _gabor(
    height: int, width: int, spread: float, angle: float, frequency: float, *, slant: float
) -> torch.Tensor:
    """A plane wave under a Gaussian that integrates to one, on a torus; complex128, (H, W)."""
    rows, columns = torch.meshgrid(
        _around(height), _around(width), indexing="ij"
    )  # several turns of the torus, summed below
    along = columns * math.cos(angle) + rows * math.sin(angle)
    across = rows * math.cos(angle) - columns * math.sin(angle)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * spread**2))
    wave = envelope * torch.exp(1j * frequency * along)
    turns = wave.view(3, height, 3, width).sum((0, 2))
    return turns * slant / (2 * math.pi * spread**2)


def _around(size: int) -> torch.Tensor:
    """Three turns of positions, the middle one from 0."""
    return torch.arange(-size, 2 * size, dtype=torch.float64)
