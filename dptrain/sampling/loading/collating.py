"""Whether a collate function keeps the examples of a batch apart."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from dptrain.core import seeded_globals
from dptrain.sampling.loading.padding import map_leaves

_MOST = 3  # examples that it is tried on
_TRIES = 8  # batches that are looked at until some can tell
_ENOUGH = 2  # batches that have to look right: what mixes may do so now and then only


class CollateCheck:
    """Has a few examples of the first batches collated, with one of them exchanged for another.

    Of the rows that a collated batch has for each example, those of one example may change then,
    wherever they are. What mixes the rows of a batch (mixup and cutmix of a batch, its mean, its
    classes' counts) has several change, and no clipping bounds what an example does to the others'
    gradients. All random generators are in the same state each time; examples of other shapes,
    and functions that draw more or fewer numbers for them, tell nothing. Nor does what a batch has
    besides rows. It is a test on a few examples, and not a proof.

    Args:
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn
        self._left = 0 if collate_fn is default_collate else _TRIES
        self._apart = 0  # batches that looked right

    def look_at(self, samples: Sequence[Any]) -> None:
        """Try it on some of these, while it has not been seen to keep them apart.

        Raises:
            RuntimeError: if it does not.
        """
        few = list(samples[:_MOST])
        if self._left <= 0 or len(few) < 2:
            return
        self._left -= 1
        moved = self._most_moved(few)
        self._apart += moved == 1
        if self._apart == _ENOUGH:
            self._left = 0
        if moved > 1:
            raise RuntimeError(
                f"collate_fn={_named(self.collate_fn)} mixes the examples of a batch: with one of "
                f"{len(few)} exchanged for another, the rows of others changed too, as in mixup, "
                "cutmix or where the batch's own mean or counts go into every row. An example then "
                "changes the gradients of others before they are clipped, and no example's "
                "contribution can be bounded: leave it out, or mix views of one example. "
                "Gradients(probe='off') goes on without this check, which the guarantee then "
                "says"
            )

    def _most_moved(self, few: list[Any]) -> int:
        """Most examples whose rows changed with one; 0 if nothing can be told."""
        most, size = 0, len(few)
        try:
            more, _ = self._collated([*few, few[-1]], seed=0)
            for own in range(size):  # under another seed each, for what is drawn now and then only
                base, drawn = self._collated(few, seed=own)
                rows = _rows(base, more, size)
                for other in (k for k in range(size) if k != own):
                    exchanged = [few[other] if k == own else few[k] for k in range(size)]
                    changed, drawn_then = self._collated(exchanged, seed=own)
                    shapes = [leaf.shape for leaf in changed] == [leaf.shape for leaf in base]
                    if shapes and drawn == drawn_then:
                        most = max(most, (rows - _rows(changed, more, size)).total())
        except Exception:  # the real batch is left to show what is wrong
            return 0
        return most

    def _collated(
        self, samples: list[Any], *, seed: int
    ) -> tuple[list[torch.Tensor], tuple[float, ...]]:
        """The leaves of a batch, and what the generators would have drawn next."""
        own: Any = self.collate_fn
        if not isinstance(own, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            own = copy.deepcopy(own)  # it may count its calls, or have a generator of its own
        leaves: list[torch.Tensor] = []

        def note(leaf: Any, _: str) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                leaves.append(leaf.detach())
            elif isinstance(leaf, np.ndarray):
                leaves.append(torch.from_numpy(leaf))
            return leaf

        with seeded_globals(seed):
            map_leaves(own(copy.deepcopy(samples)), note)
            drawn = (random.random(), float(np.random.random()), float(torch.rand(())))  # noqa: NPY002
        return leaves, drawn


def _rows(
    leaves: list[torch.Tensor], more: list[torch.Tensor], examples: int
) -> collections.Counter[tuple[bytes, ...]]:
    """What a batch holds of each example: the rows of leaves that have one more with one more."""
    parts: list[list[bytes]] = []
    for leaf, longer in zip(leaves, more, strict=True):
        follows = leaf.dim() > 0 and len(leaf) % examples == 0
        if follows and len(longer) * examples == len(leaf) * (examples + 1) and len(leaf):
            groups = leaf.unflatten(0, (examples, -1)).contiguous().cpu().unbind()
            raw = (group.reshape(-1).view(torch.uint8) for group in groups)
            parts.append([numbers.numpy().tobytes() for numbers in raw])
    return collections.Counter(zip(*parts, strict=True))


def _named(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
