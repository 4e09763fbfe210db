"""Decoding many small images by threads, with the name of whatever cannot be used."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from recipes.data.packages import VISION, package

CHUNK = 256  # images a task: enough to make handing over cheap


def decode(
    sources: Sequence[str | pathlib.Path | bytes],
    *,
    image_size: int,
    channels: int | None = None,
    name: Callable[[int], str],
    description: str,
) -> torch.Tensor:
    """All images as one uint8 tensor (N, channels, image_size, image_size).

    Nothing is resized, and only grey images are converted: another size or mode (palette, alpha
    channel, 16 bits) means that these are not the images one believes to train on.

    Args:
        sources: files, or the encoded bytes themselves, in a format that pillow reads.
        image_size: height and width that every image must have.
        channels: 3, where grey images become RGB with three equal channels; 1, where all have to
            be grey; ``None``: 1 if all are grey, otherwise 3.
        name: what to call image number i in an error.
        description: of the progress bar.

    Raises:
        ValueError: if pillow is not installed, or naming the first image that is damaged or of
            another size or mode.
    """
    pillow = package("PIL.Image", purpose="decoding images", extra=VISION)
    modes = ("L",) if channels == 1 else ("RGB", "L")
    pixels = np.empty((len(sources), len(modes[0]), image_size, image_size), dtype=np.uint8)
    grey = np.zeros(len(sources), dtype=bool)

    def decode_chunk(start: int) -> int:
        stop = min(start + CHUNK, len(sources))
        for index in range(start, stop):
            try:
                with _opened(pillow, sources[index]) as image:
                    _check(image, image_size, modes)
                    grey[index] = image.mode == "L"
                    array = np.asarray(image.convert(modes[0]))
                    pixels[index] = array.reshape(image_size, image_size, -1).transpose(2, 0, 1)
            except Exception as error:  # pillow raises many kinds, also for damaged headers
                raise ValueError(f"{name(index)}: {error}") from error
        return stop - start

    with (
        tqdm(total=len(sources), desc=description, unit="image", delay=2) as bar,
        ThreadPoolExecutor() as pool,
    ):
        try:
            for done in pool.map(decode_chunk, range(0, len(sources), CHUNK)):
                bar.update(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if channels is None and grey.all():
        pixels = pixels[:, :1].copy()
    return torch.from_numpy(pixels)


def side(source: str | pathlib.Path | bytes, *, name: str) -> int:
    """Height and width of an image, of which only the header is read.

    Raises:
        ValueError: if pillow is not installed, or by ``name`` if the image is damaged or is not as
            wide as high.
    """
    pillow = package("PIL.Image", purpose="decoding images", extra=VISION)
    try:
        with _opened(pillow, source) as image:
            width, height = image.size
    except Exception as error:  # as above
        raise ValueError(f"{name}: {error}") from error
    if width != height:
        raise ValueError(
            f"{name}: is {width}×{height} pixels; images have to be as wide as high, so cut or "
            "pad all of them to one size"
        )
    return int(width)


def _opened(pillow: ModuleType, source: str | pathlib.Path | bytes) -> Any:
    return pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _check(image: Any, image_size: int, modes: tuple[str, ...]) -> None:
    if image.size != (image_size, image_size):
        width, height = image.size
        raise ValueError(f"is {width}×{height} pixels, not {image_size}×{image_size}")
    if image.mode not in modes:
        taken = "only RGB and grey (L) images" if "RGB" in modes else "only grey (L) images"
        raise ValueError(f"has mode {image.mode}; {taken} of 8 bits are taken, so convert it")
