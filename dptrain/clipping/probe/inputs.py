"""The arguments of a module with a few of their rows, and with one example's numbers changed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dptrain.sampling.loading import map_leaves

NO_TARGET = -100  # torch's and Hugging Face's mark of a token without a label
_FAR = 1e3  # times the median of rows: their numbers are not like the others'
_LABELS = ("label", "target")
_LENGTHS = ("length", "lens")


class Items(list[Any]):
    """A list with an item for each row, as detection models take their targets: a leaf."""


def steps(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random steps from ±1 to ±4."""
    up = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return up * torch.randint(1, 5, shape, generator=generator)


# Change of a leaf's rows of one example: (rows, other rows, name) -> rows.
Change = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


class Named:
    """Positional arguments of a module by the names that they have in its ``forward``.

    Args:
        module: whose forward may be exchanged for another.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: tuple[Any, list[str]] | None = None  # a forward, and its names

    def __call__(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments by name, or by place where there is no name."""
        if not args:
            return {}
        own = vars(self._module).get("forward", type(self._module))
        if self._known is None or self._known[0] is not own:
            self._known = own, self._names()
        names = self._known[1]
        return dict(zip([*names, *map(str, range(len(names), len(args)))], args, strict=False))

    def _names(self) -> list[str]:
        try:
            parameters = list(inspect.signature(self._module.forward).parameters.values())
        except (TypeError, ValueError):
            return []
        single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in single]


def structure(arguments: dict[str, Any], rows: int) -> tuple[Any, ...]:
    """The public part of the arguments: names, types, shapes without the rows, and switches."""
    found: list[Any] = []

    def note(leaf: Any, name: str) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        shape = tuple(data.shape)
        d = _dimension(leaf, rows)
        others = shape if d is None else (*shape[:d], *shape[d + 1 :])
        found.append((name, type(leaf), data.dtype, others, d))
        return leaf

    map_leaves(arguments, note)
    found += [(n, v) for n, v in arguments.items() if isinstance(v, bool | int | str | None)]
    found += _switches(arguments)
    return tuple(found)


def _switches(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Within mappings and dataclasses what is true, missing or 0.

    Other numbers may be of every batch anew, as may what lists hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _switches(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Mapping | list | tuple) or dataclasses.is_dataclass(item):
                yield from _switches(item, name)
    elif isinstance(value, bool | None):
        yield name, value
    elif isinstance(value, int | float):
        yield name, value == 0


def _follows(leaf: Any, rows: int) -> bool:
    if isinstance(leaf, Items):
        return len(leaf) == rows
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0]) == rows
    return np.ndim(leaf) > 0 and len(leaf) == rows


def _dimension(leaf: Any, rows: int, *, second: bool = False) -> int | None:
    """The one that has the rows: the first, or the second of a tensor of (steps, rows, ...).

    Args:
        second: whether it is the second where both have so many, or there is but one row.
    """
    may_be = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == rows
    if may_be and second:
        return 1
    if _follows(leaf, rows):
        return 0
    # Values that all share are broadcast along a dimension of size 1.
    return 1 if may_be and rows > 1 else None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arguments of which some leaves are known, or supposed, to have a row for each row fed.

    Attributes:
        args, kwargs: of the call, by name.
        names: what a leaf is called, by its place.
        following: places of the leaves that have these rows.
        second: of these, and maybe others, those that have them in the second dimension.
    """

    args: dict[str, Any]
    kwargs: dict[str, Any]
    rows: int
    names: tuple[str, ...]
    following: frozenset[int]
    second: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        args: dict[str, Any],
        kwargs: dict[str, Any],
        rows: int,
        second: Container[tuple[int, str]] = (),
    ) -> Self:
        """Arguments whose leaves follow the batch wherever they have so many rows.

        Args:
            second: places and names of leaves that had the rows in their second dimension before.
        """
        names: list[str] = []
        found: dict[int, int] = {}
        args, kwargs = _with_items(args, rows), _with_items(kwargs, rows)

        def note(leaf: Any, name: str) -> Any:
            place = len(names)
            d = _dimension(leaf, rows, second=(place, name) in second)
            if d is not None:
                found[place] = d
            names.append(name)
            return leaf

        _map_leaves([args, kwargs], note)
        those = frozenset(place for place, d in found.items() if d)
        return cls(args, kwargs, rows, tuple(names), frozenset(found), those)

    def call(self, module: Callable[..., Any]) -> Any:
        """The module's output for these arguments."""

        def plain(leaf: Any, _: str) -> Any:
            return list(leaf) if isinstance(leaf, Items) else leaf

        args, kwargs = _map_leaves([self.args, self.kwargs], plain)
        return module(*args.values(), **kwargs)

    def moved(self, unit: Callable[[torch.Tensor], float]) -> Rows:
        """Floating-point numbers off by a few units in the last place, up or down at random."""
        generator = torch.Generator().manual_seed(2)

        def move(leaf: Any, _: str) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            return leaf * (1 + unit(leaf) * steps(leaf.shape, generator).to(leaf))

        args, kwargs = _map_leaves([self.args, self.kwargs], move)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def squares(self) -> dict[int, torch.Tensor]:
        """Leaves, by place, of which the first two dimensions may both be the rows."""
        return {
            place: leaf
            for place, leaf in enumerate(self.leaves())
            if place not in self.second
            and _follows(leaf, self.rows)
            and _dimension(leaf, self.rows, second=True) == 1 < self.rows
        }

    def say_second(self) -> str:
        """The arguments that have, or may have, rows as their second dimension; the remedy."""
        leaves, squares = self.leaves(), self.squares()
        places = sorted({*self.second, *squares})
        names = [f"{self.names[k]!r} of shape {tuple(leaves[k].shape)}" for k in places]
        if not names:
            return ""
        what = "may have" if set(squares) >= self.second else "have" if names[1:] else "has"
        first = self.names[places[0]]
        field = first if first.isidentifier() else "x"
        return (
            f". Of the module's arguments, {' and '.join(names)} {what} the batch's {self.rows} "
            "rows in the second dimension, which not every layer supports. Pass the module "
            "tensors with one row per example in the first dimension, and transpose them in its "
            f"forward for the layers that need it ({field}.transpose(0, 1))"
        )

    def supposing(self, following: frozenset[int]) -> Rows:
        """The same, with only these leaves following."""
        return dataclasses.replace(self, following=following)

    def sizes(self) -> set[int]:
        """Sizes of all other dimensions."""
        found: set[int] = set()
        for place, leaf in enumerate(self.leaves()):
            if isinstance(leaf, Items):
                continue
            data = leaf.data if isinstance(leaf, PackedSequence) else leaf
            sizes = list(data.shape)
            if place in self.following:
                del sizes[place in self.second]
            found.update(sizes)
        return found

    def leaves(self) -> list[Any]:
        """Numeric leaves, by their places."""
        found: list[Any] = []
        self._map(lambda leaf, _: found.append(leaf))
        return found

    def ordinary(self) -> torch.Tensor:
        """Mask of rows with numbers like most others', shape (rows,): finite, and of their size.

        Of these a run is likely to be finite, and only that shows something.
        """
        fine = torch.ones(self.rows, dtype=torch.bool)

        def note(leaf: Any, place: int) -> Any:
            follows = place in self.following and not isinstance(leaf, Items)
            rows = self._rows_first(leaf, place)[0] if follows else None
            if rows is not None and rows.is_floating_point() and rows.numel():
                size = rows.flatten(1).abs().amax(1) if rows.dim() > 1 else rows.abs()
                finite = size.isfinite()
                usual = float(size[finite].median()) if finite.any() else 0.0
                fine.logical_and_((finite & (size <= (_FAR * usual or torch.inf))).cpu())
            return leaf

        self._map(note)
        return fine

    def taken(self, index: torch.Tensor) -> Rows:
        """The arguments with these rows only, in ascending order, as tensors of their own."""

        def take(leaf: Any, place: int) -> Any:
            if place not in self.following:
                return _own(leaf)
            return _taken(leaf, index, int(place in self.second))

        args, kwargs = self._map(take)
        return dataclasses.replace(self, args=args, kwargs=kwargs, rows=len(index))

    def changed(self, own: range, other: range, change: Change) -> Rows | None:
        """Arguments with the rows ``own`` of one example changed; ``None`` if that changes nothing.

        Args:
            own, other: rows of two examples, which may be equal.
        """
        differs = False

        def apply(leaf: Any, place: int) -> Any:
            nonlocal differs
            if place not in self.following:
                return leaf
            if isinstance(leaf, Items):
                items = _changed_items(leaf, own, other, change)
                differs = differs or items is not leaf
                return items
            rows, back = self._rows_first(leaf, place)
            new = rows.clone()
            new[own.start : own.stop] = change(
                rows[own.start : own.stop], rows[other.start : other.stop], self.names[place]
            )
            differs = differs or not torch.equal(new, rows)
            return back(new)

        args, kwargs = self._map(apply)
        return dataclasses.replace(self, args=args, kwargs=kwargs) if differs else None

    def _rows_first(
        self, leaf: Any, place: int
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        rows, back = _padded(leaf)
        if place not in self.second:
            return rows, back
        return rows.transpose(0, 1), lambda new: back(new.transpose(0, 1).contiguous())

    def _map(self, change: Callable[[Any, int], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        places = iter(range(len(self.names)))
        call = _map_leaves([self.args, self.kwargs], lambda leaf, _: change(leaf, next(places)))
        return call[0], call[1]


def _map_leaves(value: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """``map_leaves``, to which lists of items are leaves."""
    if isinstance(value, Items):
        return change(value, name)
    if type(value) is dict:
        return {key: _map_leaves(item, change, str(key)) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_map_leaves(item, change, name) for item in value)
    return map_leaves(value, change, name)


def _with_items(value: Any, rows: int) -> Any:
    """Lists that have an item for each row, and are no tensors with rows, become ``Items``."""
    if type(value) is dict:
        return {key: _with_items(item, rows) for key, item in value.items()}
    if type(value) not in (list, tuple):
        return value
    if len(value) == rows and not all(_follows(item, rows) for item in value if _is_leaf(item)):
        return Items(value)
    if type(value) is list and len(value) == rows and not any(_is_leaf(item) for item in value):
        return Items(value)
    return type(value)(_with_items(item, rows) for item in value)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor | PackedSequence | np.ndarray)


def _changed_items(items: Items, own: range, other: range, change: Change) -> Items:
    """An example has another's items, or the first half of what its own hold."""
    if change in (contents, contents_of_sequences):
        new = [items[k] for k in other]
    elif getattr(change, "func", None) is ends_early:
        new = [_halved(items[k]) for k in own]
    else:
        return items
    found = Items(items)
    found[own.start : own.stop] = new
    return found


def _halved(item: Any) -> Any:
    """The first half of it: of a text, of a list, of the tensors in a record of equal lengths."""
    if isinstance(item, Mapping):
        sizes = {len(v) for v in item.values() if isinstance(v, torch.Tensor) and v.dim()}
        if len(sizes) != 1:
            return item
        lengths = isinstance(item, dict)
        return {k: _halved(v) for k, v in item.items()} if lengths else item
    if isinstance(item, torch.Tensor):
        return item[: max(1, len(item) // 2)].clone() if item.dim() else item
    if isinstance(item, str | list | tuple):
        return item[: max(1, len(item) // 2)]
    return item


def _own(leaf: Any) -> Any:
    if isinstance(leaf, Items):
        return leaf
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf if isinstance(leaf, PackedSequence) else leaf.copy()


def _taken(leaf: Any, index: torch.Tensor, dimension: int) -> Any:
    if isinstance(leaf, Items):
        return Items(leaf[k] for k in index.tolist())
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        return _packed(padded[index.to(padded.device)], lengths[index], leaf)
    if isinstance(leaf, torch.Tensor):
        index, rows = index.to(leaf.device), leaf.detach()
        rows = rows[:, index].contiguous() if dimension else rows[index]
        return rows.requires_grad_(leaf.requires_grad)
    return leaf[index.numpy()]


def _packed(padded: torch.Tensor, lengths: torch.Tensor, like: PackedSequence) -> PackedSequence:
    return pack_padded_sequence(
        padded, lengths, batch_first=True, enforce_sorted=like.sorted_indices is None
    )


def _padded(leaf: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """A leaf as a tensor with the rows first, and the way back."""
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        return padded, lambda rows: _packed(rows, lengths, leaf)
    if isinstance(leaf, torch.Tensor):
        needs = leaf.requires_grad
        return leaf.detach(), lambda rows: rows.requires_grad_(needs)
    return torch.from_numpy(leaf), lambda rows: rows.numpy()


def contents(rows: torch.Tensor, other: torch.Tensor, _: str) -> torch.Tensor:
    """Other numbers within the same range, whatever they mean."""
    if rows.is_floating_point() or rows.is_complex():
        flipped = other.flip(tuple(range(1, other.dim())))
        mixed = 0.5 * rows + 0.5 * flipped
        return torch.where(mixed == rows, 0.5 * rows, mixed)
    if rows.dim() > 1:
        other = other.roll(1, dims=-1)
    if not torch.equal(rows, other):
        return other
    # A smaller number is an index where a larger one may be none; of a mask something is left.
    new, start = rows.clone(), rows.shape[1] // 2 if rows.dim() > 1 else 0
    half = new[:, start:] if rows.dim() > 1 else new
    half.copy_(torch.where(half > 0, half.long() - 1, half.long()))
    return new


def contents_of_sequences(rows: torch.Tensor, other: torch.Tensor, name: str) -> torch.Tensor:
    """``contents``, without one number an example, which may be a length."""
    return rows if rows.dim() == 1 and not rows.is_floating_point() else contents(rows, other, name)


def contents_of_floats(rows: torch.Tensor, other: torch.Tensor, name: str) -> torch.Tensor:
    """``contents``, without ids and masks."""
    return contents(rows, other, name) if rows.is_floating_point() else rows


def huge(rows: torch.Tensor, _: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers that pass thresholds which others stay below."""
    return 1e4 * rows if rows.is_floating_point() else rows


def blank(rows: torch.Tensor, _: torch.Tensor, name: str) -> torch.Tensor:
    """Rows of zeros."""
    return torch.zeros_like(rows) if rows.is_floating_point() else rows


def broken(rows: torch.Tensor, _: torch.Tensor, name: str) -> torch.Tensor:
    """Rows of NaN: "is any NaN?" is asked of a whole batch, and 0 · NaN is NaN."""
    return torch.full_like(rows, torch.nan) if rows.is_floating_point() else rows


def ends_early(
    rows: torch.Tensor, _: torch.Tensor, name: str, *, padding: int = 0, labels: bool = True
) -> torch.Tensor:
    """The second half of a sequence is padding, of its mask hidden, of its labels no target.

    Args:
        rows: of an example, shape (views, positions, ...); (views,) are left alone, but lengths.
        name: of the argument: what is a label cannot be told from an id otherwise.
        padding: the id of padding.
        labels: whether labels may be marked as none: something might look them up.
    """
    name = name.lower()
    if rows.dim() == 1:
        counts = any(word in name for word in _LENGTHS) and rows.dtype != torch.bool
        return (rows // 2).clamp(min=1) if counts else rows
    new, rest = rows.clone(), slice(max(1, rows.shape[1] // 2), None)
    if rows.is_floating_point() or rows.is_complex():
        new[:, rest] = 0
    elif rows.dtype == torch.bool:  # a mask, whichever way round: the first position is not hidden
        new[:, rest] = ~rows[:, :1]
    elif any(word in name for word in _LABELS) or bool((rows < 0).any()):
        new[:, rest] = NO_TARGET if labels else rows[:, rest]
    else:
        zeros_and_ones = bool(((rows == 0) | (rows == 1)).all())
        new[:, rest] = 0 if zeros_and_ones else padding
    return new


def padding_id(module: nn.Module) -> int:
    """The id that the module takes for padding, 0 if it does not say."""
    told: Sequence[Any] = [getattr(getattr(module, "config", None), "pad_token_id", None)]
    told = [*told, *(m.padding_idx for m in module.modules() if isinstance(m, nn.Embedding))]
    return next((i for i in told if isinstance(i, int) and i >= 0), 0)
