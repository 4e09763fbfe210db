"""Scattering features against sums over pixels, and in a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch.nn.functional import group_norm

from recipes.data.images import Images
from recipes.data.opponent import opponent
from recipes.data.scattered import scattered
from recipes.data.scattered_layout import FeatureLayout
from recipes.data.scattering import ANGLES, PATHS, scattering
from recipes.data.split import Split

CHANNELS = PATHS + 4 * (1 + ANGLES)  # of each color
REACH = 20  # pixels, beyond which the widest envelope is below 1e-30


def _wave(
    spread: float, angle: float, frequency: float, slant: float, offset: float = 0.0
) -> np.ndarray:
    """A plane wave under a Gaussian, value by value, at whole numbers and an offset."""
    found = np.zeros((2 * REACH + 1, 2 * REACH + 1), dtype=complex)
    positions = [place + offset for place in range(-REACH, REACH + 1)]
    for y, row in enumerate(positions):
        for x, column in enumerate(positions):
            along = column * math.cos(angle) + row * math.sin(angle)
            across = row * math.cos(angle) - column * math.sin(angle)
            envelope = math.exp(-(along**2 + slant**2 * across**2) / (2 * spread**2))
            found[y, x] = envelope * np.exp(1j * frequency * along)
    return found * slant / (2 * math.pi * spread**2)


def _morlet(scale: int, angle: int) -> np.ndarray:
    spread, direction = 0.8 * 2**scale, math.pi * angle / ANGLES
    wave = _wave(spread, direction, 0.75 * math.pi / 2**scale, 4 / ANGLES)
    envelope = _wave(spread, direction, 0.0, 4 / ANGLES)
    return wave - wave.sum() / envelope.sum() * envelope


def _convolved(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    real, imaginary = (
        scipy.ndimage.convolve(image, part, mode="wrap") for part in (kernel.real, kernel.imag)
    )
    return real + 1j * imaginary


def test_features_are_sums_over_pixels() -> None:
    """One path of every kind of the middle of 4×4 pixels. Maps of the coarse scale are kept
    at the middle of every 2×2 only, which folds what is left of them beyond half the frequencies
    onto the rest: one or two parts in a hundred. Here they are kept at every pixel.
    """
    image = np.random.default_rng(0).normal(size=(16, 16))
    padded = np.pad(image, 4, mode="reflect")
    average = _wave(1.6, 0.0, 0.0, 1.0, offset=1.5).real

    def kept(maps: np.ndarray) -> np.ndarray:
        return _convolved(maps, average).real[4:-4:4, 4:-4:4]

    found = scattering(torch.from_numpy(image).float()[None, None])[0].double().numpy()
    assert found.shape == (CHANNELS, 4, 4)
    assert np.allclose(found[0], kept(padded), atol=1e-5)
    for angle in (0, 3):
        fine = abs(_convolved(padded, _morlet(0, angle)))
        assert np.allclose(found[1 + angle], kept(fine), atol=1e-5)
        coarse = kept(abs(_convolved(padded, _morlet(1, angle))))
        assert np.linalg.norm(found[1 + ANGLES + angle] - coarse) < 0.03 * np.linalg.norm(coarse)
        for second in (1, 6):
            twice = kept(abs(_convolved(fine, _morlet(1, second))))
            place = 1 + 2 * ANGLES + ANGLES * angle + second
            assert np.linalg.norm(found[place] - twice) < 0.03 * np.linalg.norm(twice)


def test_fine_features_are_sums_over_pixels() -> None:
    """At the middle of every 2×2 pixels, by a Gaussian half as wide, of two colors."""
    images = np.random.default_rng(3).normal(size=(2, 16, 16))
    average = _wave(0.8, 0.0, 0.0, 1.0, offset=0.5).real
    found = scattering(torch.from_numpy(images).float()[None])[0].double().numpy()
    assert found.shape == (2 * CHANNELS, 4, 4)
    for color, image in enumerate(images):
        padded = np.pad(image, 4, mode="reflect")
        maps = {0: padded} | {1 + k: abs(_convolved(padded, _morlet(0, k))) for k in (0, 5)}
        for path, each in maps.items():
            near = _convolved(each, average).real[4:-4:2, 4:-4:2]
            for corner, (down, right) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
                place = 2 * PATHS + 4 * color + corner
                if path:
                    place = 2 * PATHS + 8 + 4 * (ANGLES * color + path - 1) + corner
                assert np.allclose(found[place], near[down::2, right::2], atol=1e-5)


def test_an_even_image_has_averages_only() -> None:
    found = scattering(torch.full((1, 2, 8, 8), 3.0))[0]
    averages = [0, PATHS, *range(2 * PATHS, 2 * PATHS + 8)]
    assert torch.allclose(found[averages], torch.tensor(3.0), atol=1e-5)
    rest = [place for place in range(2 * CHANNELS) if place not in averages]
    assert found[rest].abs().max() < 1e-5


def test_an_image_has_the_same_features_in_any_company() -> None:
    images = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    together = scattering(images)
    alone = torch.cat([scattering(image[None]) for image in images])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-6)


def _pixels(count: int, size: int = 16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, 3, size, size), generator=draw).to(torch.uint8)


def _split(count: int, size: int = 16, **options: object) -> Split:
    pixels = _pixels(count, size)
    images = Images(pixels, torch.arange(count) % 2, **options)  # type: ignore[arg-type]
    return Split(images, images, channels=3, classes=2, image_size=size)


def _kinds() -> list[list[int]]:
    """Features of a color image that are normalized together, written out."""
    found = []
    for color in range(3):
        first = PATHS * color
        found += [[first], [*range(first + 1, first + 9)], [*range(first + 9, first + 17)]]
        for apart in range(5):
            pairs = [(o, i) for o in range(8) for i in range(8) if abs(o - i) in (apart, 8 - apart)]
            found.append([first + 17 + 8 * outer + inner for outer, inner in pairs])
        near, edges = 3 * PATHS + 4 * color, 3 * PATHS + 12 + 32 * color
        found += [[*range(near, near + 4)], [*range(edges, edges + 32)]]
    return found


def test_a_split_of_features_is_normalized_for_each_image() -> None:
    split = scattered(_split(25))
    (features, labels) = split.train.tensors  # type: ignore[union-attr]
    assert features.shape == (25, 3 * CHANNELS, 4, 4)
    assert (split.channels, split.image_size) == (3 * CHANNELS, 4)
    assert labels.tolist() == [row % 2 for row in range(25)]
    raw = scattering(opponent(_pixels(25).float() / 127.5 - 1))
    seen = []
    for kind in _kinds():
        found, before = features[:, kind].flatten(1), raw[:, kind].flatten(1)
        assert found.mean(1).abs().max() < 1e-5
        spread = before.var(1, unbiased=False)
        # As torch's GroupNorm, which keeps what hardly varies from being blown up.
        assert torch.allclose(found.var(1, unbiased=False), spread / (spread + 1e-5), rtol=1e-3)
        assert torch.allclose(found, group_norm(before[:, None], 1)[:, 0], rtol=1e-4, atol=1e-4)
        seen += kind
    assert sorted(seen) == list(range(3 * CHANNELS))


def test_a_feature_of_an_image_is_of_the_same_kind_in_its_mirror_image() -> None:
    layout = FeatureLayout(3)
    kinds = layout.kinds()
    assert [kinds[feature] for feature in layout.mirrored()] == kinds
    maps = torch.randn(2, layout.channels, 4, 4, generator=torch.Generator().manual_seed(5))
    ours = layout.normalized(maps.flip(-1)[:, layout.mirrored()])
    theirs = layout.normalized(maps).flip(-1)[:, layout.mirrored()]
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("size", [4, 18])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"images of {size} pixels.*multiples of 4"):
        scattered(_split(2, size))
