"""Decoding many small images by threads, with the name of whatever cannot be used."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from recipes.data.packages import VISION, package

CHUNK = 256  # images a task: enough to make handing over cheap
MODES = ("RGB", "L")  # grey (L) becomes RGB with three equal channels


def decode(
    sources: Sequence[str | pathlib.Path | bytes],
    *,
    image_size: int,
    name: Callable[[int], str],
    description: str,
) -> torch.Tensor:
    """All images as one uint8 tensor (N, 3, image_size, image_size).

    Nothing is resized, and only grey images are converted: another size or mode (palette, alpha
    channel, 16 bits) means that these are not the images one believes to train on.

    Args:
        sources: files, or the encoded bytes themselves, in a format that pillow reads.
        image_size: height and width that every image must have.
        name: what to call image number i in an error.
        description: of the progress bar.

    Raises:
        ValueError: if pillow is not installed, or naming the first image that is damaged or of
            another size or mode.
    """
    pillow = package("PIL.Image", purpose="decoding images", extra=VISION)
    pixels = np.empty((len(sources), 3, image_size, image_size), dtype=np.uint8)

    def decode_chunk(start: int) -> int:
        stop = min(start + CHUNK, len(sources))
        for index in range(start, stop):
            try:
                pixels[index] = _decode(pillow, sources[index], image_size)
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
    return torch.from_numpy(pixels)


def _decode(
    pillow: ModuleType, source: str | pathlib.Path | bytes, image_size: int
) -> npt.NDArray[np.uint8]:
    with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        if image.size != (image_size, image_size):
            width, height = image.size
            raise ValueError(f"is {width}×{height} pixels, not {image_size}×{image_size}")
        if image.mode not in MODES:
            raise ValueError(
                f"has mode {image.mode}; only RGB and grey (L) images of 8 bits are taken, so "
                "convert it"
            )
        rgb: npt.NDArray[np.uint8] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        return rgb
