"""Checks that a collate function or a data set keeps the examples of a batch apart."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from typing_extensions import override

from dptrain.core import seeded_globals
from dptrain.sampling.loading.padding import map_leaves

_MOST = 3  # examples that it is tried on
_TRIES = 16  # first batches that are looked at until enough of them could tell
_ENOUGH = 8  # batches that have to look right: what mixes may do so now and then only
_DOMAIN = 0x6170617274  # of these seeds
_SELDOM = 20  # and of the later ones about every so manieth, for as long as the run goes on

_TESTED = (
    "that {} keeps the examples of a batch apart was tested on a few examples of the first batches "
    "and of later ones at random, which proves nothing"
)
_ASSUMED = "the guarantee assumes that {} keeps the examples of a batch apart, which was not tested"
_ROWS = (
    "the guarantee assumes that row i of the data set, a {}, is made of record i alone, and not of "
    "other examples' records"
)


def notes_of(dataset: Any, collate_fn: Callable[[list[Any]], Any], *, tested: bool) -> list[str]:
    """The notes of a guarantee on how batches are made.

    Args:
        dataset: of the run.
        collate_fn: of the run.
        tested: whether the run tests that these keep the examples apart.
    """
    found, note = [], _TESTED if tested else _ASSUMED
    if collate_fn is not default_collate:
        found.append(note.format(f"collate_fn={_named(collate_fn)}"))
    if not _by_row(dataset):
        found.append(_ROWS.format(type(dataset).__name__))
        if callable(getattr(dataset, "__getitems__", None)):
            found.append(note.format(f"__getitems__ of the data set, a {type(dataset).__name__},"))
    return found


def _by_row(dataset: Any) -> bool:
    """True if a row of the data set is known to be of one record."""
    if type(dataset) is Subset:
        return _by_row(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_by_row, dataset.datasets))
    if type(dataset).__module__ == "datasets.arrow_dataset":  # no transform of the user's
        return getattr(dataset, "format", {}).get("type") != "custom"
    return isinstance(dataset, list | tuple) or type(dataset) is TensorDataset


class _Check:
    """A test that what makes a batch keeps its examples apart, on a few of some of the batches.

    All random generators are in the same state before and after the exchange of an example, of a
    seed that nobody knows beforehand. It is a test, and not a proof.
    """

    what: str  # that makes the batch, for messages

    def __init__(self, *, needed: bool) -> None:
        self._left = _TRIES if needed else 0
        self._needed = needed
        self._apart = 0  # batches that looked right

    def _look(self, few: list[Any], seed: int) -> None:
        """Try it on these, while it has not been seen to keep them apart, and seldom afterwards."""
        if not self._needed or len(few) < 2 or (self._left <= 0 and seed % _SELDOM):
            return
        self._left -= 1
        seeds = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,)).generate_state(len(few))
        moved = self._most_moved(few, seeds.tolist())
        self._apart += moved == 1
        if self._apart == _ENOUGH:
            self._left = 0
        if moved > 1:
            raise RuntimeError(
                f"{self.what} mixes the examples of a batch: when one of {len(few)} examples was "
                "exchanged for another, the rows of the others changed too, as with mixup, cutmix "
                "or statistics of the batch. One example then changes the gradients of others "
                "before they are clipped, so no example's contribution can be bounded. Leave it "
                "out, or mix only views of one example"
            )

    def _most_moved(self, few: list[Any], seeds: list[int]) -> int:
        """Most examples whose rows changed with one; 0 if nothing can be told."""
        raise NotImplementedError


class CollateCheck(_Check):
    """Has a few examples of a batch collated, with one of them exchanged for another.

    Of the rows that a collated batch has for each example, those of one example may change then,
    wherever they are. What mixes the rows of a batch (mixup and cutmix of a batch, its mean, its
    classes' counts) has several change, and no clipping bounds what an example does to the others'
    gradients. Examples of other shapes, and functions that draw more or fewer numbers for them,
    tell nothing. Nor does what a batch has besides rows.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(needed=collate_fn is not default_collate)
        self.collate_fn = collate_fn
        self.what = f"collate_fn={_named(collate_fn)}"

    def look_at(self, samples: Sequence[Any], seed: int) -> None:
        """Try it on some of these; see ``_Check``."""
        self._look(list(samples[:_MOST]), seed)

    @override
    def _most_moved(self, few: list[Any], seeds: list[int]) -> int:
        most, size = 0, len(few)
        try:
            more, _ = self._collated([*few, few[-1]], seed=seeds[0])
            for own, seed in enumerate(seeds):
                base, drawn = self._collated(few, seed=seed)
                rows = _rows(base, more, size)
                for other in (k for k in range(size) if k != own):
                    exchanged = [few[other] if k == own else few[k] for k in range(size)]
                    changed, drawn_then = self._collated(exchanged, seed=seed)
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
        with seeded_globals(seed):
            leaves = _leaves(own(copy.deepcopy(samples)))
            return leaves, _drawn()


class CompanionCheck(_Check):
    """Has a data set make a few rows of a batch at once, with one of them exchanged for another.

    Data sets with ``__getitems__`` (those of Hugging Face, for one, whose transforms get a batch of
    rows) may make a row of others of the batch. A row that ``__getitem__`` makes of several records
    is not seen to be.
    """

    def __init__(self, dataset: Any) -> None:
        self._many = getattr(dataset, "__getitems__", None)
        super().__init__(needed=callable(self._many) and not _by_row(dataset))
        self.what = f"__getitems__ of the data set, a {type(dataset).__name__},"

    def look_at(self, indices: Sequence[int], seed: int) -> None:
        """Try it on some of these rows; see ``_Check``."""
        self._look(list(indices[:_MOST]), seed)

    @override
    def _most_moved(self, few: list[Any], seeds: list[int]) -> int:
        most, size = 0, len(few)
        try:
            for own, seed in enumerate(seeds):
                base = self._made(few, seed)
                if base != self._made(few, seed):  # it has generators or a state of its own
                    return 0
                for other in (k for k in range(size) if k != own):
                    exchanged = [few[other] if k == own else few[k] for k in range(size)]
                    changed = self._made(exchanged, seed)
                    if len(changed) == len(base) and changed[-1] == base[-1]:
                        others = (k for k in range(size) if k != own)
                        most = max(most, 1 + sum(changed[k] != base[k] for k in others))
        except Exception:  # the real batch is left to show what is wrong
            return 0
        return most

    def _made(self, indices: list[int], seed: int) -> list[Any]:
        """The rows, as what can be compared, and what the generators would have drawn next."""
        assert self._many is not None
        with seeded_globals(seed):
            rows = [_content(row) for row in self._many(indices)]
            return [*rows, _drawn()]


def _content(row: Any) -> list[Any]:
    """The contents of a row: tensors, arrays and pictures by their bytes, all else by its text."""
    found: list[Any] = []

    def note(leaf: Any, name: str) -> Any:
        array = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf
        content = array.tobytes() if callable(getattr(array, "tobytes", None)) else repr(leaf)
        found.append((name, getattr(array, "shape", None), content))
        return leaf

    map_leaves(row, note)
    return found


def _leaves(batch: Any) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []

    def note(leaf: Any, _: str) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            leaves.append(leaf.detach())
        elif isinstance(leaf, np.ndarray):
            leaves.append(torch.from_numpy(leaf))
        return leaf

    map_leaves(batch, note)
    return leaves


def _drawn() -> tuple[float, ...]:
    """The numbers that the global generators draw next."""
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def _rows(
    leaves: list[torch.Tensor], more: list[torch.Tensor], examples: int
) -> collections.Counter[tuple[bytes, ...]]:
    """The rows of a batch by example, of those leaves that one more example makes longer."""
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
