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
from torch.nn.functional import pad, pixel_unshuffle

ANGLES = 8
SCALES = 2
STRIDE = 2**SCALES
"""Pixels a side that one feature stands for."""
PATHS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2
"""Averages over 4×4 pixels, for each color and place: 81."""
CORNERS = 4
"""Places of 2×2 pixels in one of 4×4."""


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Averages of an image, of moduli of its wavelet transform, and of moduli of these' transforms.

    Two scales, eight angles, Morlet wavelets (Bruna & Mallat 2013, arXiv 1203.1513; widths and
    frequencies of Oyallon & Mallat 2015, arXiv 1412.8659): x ∗ φ, |x ∗ ψ_λ| ∗ φ and
    ||x ∗ ψ_λ| ∗ ψ_μ| ∗ φ for μ coarser than λ. Borders are reflected. A feature stands at the
    middle of its 4×4 pixels, and what is kept at every second place at the middle of 2×2, so that
    the features of a mirror image are those of the image in another order.

    Averages over 4×4 pixels do not tell where in them an edge is. So the image and its moduli of
    the fine scale are averaged at the middle of every 2×2 as well, by half as wide a φ.

    Args:
        images: shape (B, C, H, W), with H and W multiples of 4 and at least 8.

    Returns:
        Shape (B, 117 C, H / 4, W / 4): 81 C averages over 4×4 pixels, a color's next to each
        other; then 4 C of the image over 2×2 pixels, of each color top left, top right, bottom
        left and bottom right; and 32 C of moduli, a color's angles next to each other.

    Raises:
        ValueError: for other sizes.
    """
    examples, colors, *sizes = images.shape
    for size in sizes:
        check_scattered(size)
    padded = pad(images, (STRIDE,) * 4, mode="reflect").flatten(0, 1)
    bank = _bank(*padded.shape[-2:])

    def moduli(spectrum: torch.Tensor, scale: int) -> torch.Tensor:
        """Of all angles, in a dimension before height and width, at every 2^scale-th place."""
        waves = torch.fft.ifft2(
            _filtered(spectrum[..., None, :, :], bank.wavelets[scale], 2**scale)
        )
        return (waves.real.square() + waves.imag.square()).sqrt()  # in half the time of abs()

    def averaged(spectrum: torch.Tensor, scale: int) -> torch.Tensor:
        """Around the middle of every 4×4 pixels, of maps at every 2^scale-th place."""
        smooth = _filtered(spectrum, bank.averages[scale], STRIDE >> scale)
        return torch.fft.ifft2(smooth).real[..., 1:-1, 1:-1]

    spectrum = torch.fft.fft2(padded)
    edges = torch.fft.fft2(moduli(spectrum, 0))
    joined = torch.cat(
        [
            averaged(spectrum, 0)[:, None],
            averaged(edges, 0),
            averaged(torch.fft.fft2(moduli(spectrum, 1)), 1),
            averaged(torch.fft.fft2(moduli(edges, 1)), 1).flatten(1, 2),
        ],
        dim=1,
    )
    found = joined.view(examples, colors * PATHS, *joined.shape[-2:])
    near = _filtered(torch.cat([spectrum[:, None], edges], dim=1), bank.near, 2)
    near = torch.fft.ifft2(near).real[..., 2:-2, 2:-2]
    near = near.unflatten(0, (examples, colors))
    return torch.cat(
        [found, *(pixel_unshuffle(part.flatten(1, 2), 2) for part in near.split([1, ANGLES], 2))],
        dim=1,
    )


def check_scattered(image_size: int) -> None:
    """Refuse a height or width, in pixels, that has no features.

    Raises:
        ValueError: naming it.
    """
    if image_size % STRIDE or image_size < 2 * STRIDE:
        raise ValueError(
            f"data.features (scattering) of images of {image_size} pixels: height and width have "
            f"to be multiples of {STRIDE}, and at least {2 * STRIDE}; set data.features to null"
        )


def _filtered(spectrum: torch.Tensor, filters: torch.Tensor, step: int) -> torch.Tensor:
    """The spectrum of every ``step``-th value, in both directions, of what filters let through.

    A block of frequencies at a time, without the whole product.
    """
    height, width = (size // step for size in spectrum.shape[-2:])
    filters = filters / step**2
    total: torch.Tensor | None = None
    for top in range(0, step * height, height):
        for left in range(0, step * width, width):
            block = (..., slice(top, top + height), slice(left, left + width))
            part = spectrum[block] * filters[block]
            total = part if total is None else total.add_(part)
    assert total is not None
    return total


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
        near: φ of half the width, to the middle of 2×2 places, shape (H, W).
    """

    averages: tuple[torch.Tensor, ...]
    wavelets: tuple[torch.Tensor, ...]
    near: torch.Tensor


@functools.cache
def _bank(height: int, width: int) -> _Bank:
    angles = [angle * math.pi / ANGLES for angle in range(ANGLES)]
    averages, wavelets = [], []
    for scale in range(SCALES):
        middle = _middle(2**scale)
        here = functools.partial(_gabor, _around(height, middle), _around(width, middle))
        spread, frequency = _width(scale), 0.75 * math.pi / 2**scale
        wavelets.append(torch.stack([_morlet(here, spread, angle, frequency) for angle in angles]))
        average = _average(height, width, SCALES - 1, _middle(STRIDE) - middle)
        averages.append(4**scale * _folded(average, 2**scale))
    near = _average(height, width, 0, _middle(2))
    return _Bank(tuple(averages), tuple(wavelets), near)


def _average(height: int, width: int, scale: int, offset: float) -> torch.Tensor:
    """The spectrum of φ of a scale, at pixels and an offset."""
    rows, columns = _around(height, offset), _around(width, offset)
    return _spectrum(_gabor(rows, columns, _width(scale), slant=1.0))


def _width(scale: int) -> float:
    """Of an envelope, in pixels."""
    return 0.8 * 2**scale


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
