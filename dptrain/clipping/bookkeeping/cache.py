"""Number of examples to work on at a time so that the memory they touch stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dptrain.core import on_processor

# Bytes of inputs, output gradients and results of the examples that are multiplied at once: what
# stays in the caches, for each thread that works on them, and what keeps a device busy. Threads
# wait for one another at the end of each product: with a quarter of it, two of them took 4 to 5 %
# longer for a whole step of a VGG or a ResNet, and one as long.
CACHE = 5 * 2**20
_DEVICE = 2**28
# Likewise of what is small: what stays in a core's own cache, as long as the examples of a product
# are so many for each thread that waiting does not count.
_OWN = 2**20
_ENOUGH = 32


def chunk_size(tensor: torch.Tensor, numbers: int) -> int:
    """Number of examples to handle at once if each needs ``numbers`` numbers."""
    budget = CACHE * torch.get_num_threads() if on_processor(tensor) else _DEVICE
    return max(1, budget // max(1, 4 * numbers))


def product_size(tensor: torch.Tensor, numbers: int) -> int:
    """Number of examples to multiply at once if each needs ``numbers`` numbers.

    With one thread of an Intel processor, a core of which has 2 MB of cache, two small convolutions
    took 0.83 of the time that they took by ``chunk_size``.
    """
    most = chunk_size(tensor, numbers)
    if not on_processor(tensor):
        return most
    return min(most, max(_ENOUGH, own_size(numbers)) * torch.get_num_threads())


def own_size(numbers: int) -> int:
    """Number of examples of ``numbers`` numbers each that stay in a core's own cache."""
    return max(1, _OWN // max(1, 4 * numbers))


def cached(tensor: torch.Tensor, numbers: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a tensor to handle at once, if each row needs so many numbers.

    There is one at least: of no rows, where there are none.
    """
    step = chunk_size(tensor, numbers)
    for start in range(0, max(1, len(tensor)), step):
        yield start, min(len(tensor), start + step)
