"""The part that one call of a layer has in the gradients of a parameter, by example."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import Gram, unit
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.base.rows import row_norms

CHUNK = 2**22  # numbers of per-example gradients that are formed at a time where none are kept
FEW = 2**20  # numbers of a layer's per-example gradients that are not worth avoiding


class Use(abc.ABC):
    """One use of a parameter: per-example gradients g_i, in whatever form is the smallest.

    Gradients are those of the reduced loss, one for each row of the batch. Uses of one parameter
    are added up before their norm is taken (``dptrain.clipping.bookkeeping.combine``).

    Attributes:
        rows: number of examples.
        shape: of the parameter.
        fills_up: whether ``folded`` fills up groups with zeros to the size of the largest.
    """

    rows: int
    shape: torch.Size
    fills_up = False

    @abc.abstractmethod
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """g_i of rows ``start`` to ``stop``, shape (stop - start, *shape)."""

    @abc.abstractmethod
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Sums of absolute values, shape (stop - start, *shape), of so many terms at most.

        What ``per_example`` and ``weighted_sum`` add up, each in its own order, differs by
        rounding errors in proportion to these; no terms where both have the very same numbers.
        """

    @abc.abstractmethod
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """Σ_i f_i g_i, shape ``shape``; ``factors`` has shape (rows,). The use is spent then."""

    @abc.abstractmethod
    def select(self, index: torch.Tensor) -> Self:
        """The use without all rows but those of ``index``."""

    def norms(self) -> torch.Tensor:
        """‖g_i‖₂ of what ``weighted_sum`` adds up, shape (rows,), as row_norms are exact."""
        return chunked_norms([self])

    def merged(self, other: Use) -> Use | None:
        """Both uses as one, or ``None`` where they have no common form."""
        return None

    def folded(self, views: int | RowGroups) -> Use:
        """The sum over each ``views`` rows that follow one another, as one row; or over groups."""
        return Folded(self, views)

    def compact(self) -> Use:
        """The same in the form that costs least from here on."""
        return self

    def keep(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Hold copies of all tensors that it is made of, but for those that nobody else has.

        They may be the user's own, the batch's for instance, or gradients that autograd hands on.
        What writes into them after norms were taken, through NumPy say, would have these clip other
        gradients than are released (docs/theory/clipping.md#thm-own-memory;
        ``test_what_is_written_after_the_backward_pass_is_not_released``).

        Args:
            copy: the same numbers in memory of our own.
        """
        own = vars(self)
        for name, value in list(own.items()):
            if isinstance(value, torch.Tensor):
                own[name] = copy(value)
            elif type(value) not in _WITHOUT_TENSORS:
                own[name] = _kept(value, copy)


_WITHOUT_TENSORS = frozenset((int, float, bool, type(None), torch.Size))


def _kept(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(value)
    if isinstance(value, Use):
        value.keep(copy)
    elif isinstance(value, Gram | SideNorms):  # of several uses, none of which has norms yet
        if not value.own:
            value.side, value.own = copy(value.side), True
    elif isinstance(value, list | tuple):
        kept = [_kept(item, copy) for item in value]
        make = getattr(value, "_make", type(value))  # a named tuple's
        return make(kept)
    return value


class SideNorms:
    """‖row‖₂ of a matrix that several uses have in common, taken once and when it is asked for.

    Args:
        side: shape (rows, numbers).
    """

    def __init__(self, side: torch.Tensor) -> None:
        self.side, self.own = side, False  # whether nobody else has its memory

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The norms, shape (rows,)."""
        return row_norms(self.side)


class Whole(Use):
    """A use that holds the very numbers that it adds up."""

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        return self.per_example(start, stop).abs(), 0


class Materialized(Whole):
    """The per-example gradients themselves.

    Args:
        gradients: shape (rows, *shape).
        norms: theirs, where others ask for them too or they are known, shape (rows,).
        own: whether nobody else has the memory of the gradients.
    """

    def __init__(
        self,
        gradients: torch.Tensor,
        norms: SideNorms | torch.Tensor | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.gradients = gradients
        self.rows, self.shape = gradients.shape[0], gradients.shape[1:]
        self._norms, self._own = norms, own

    @override
    def keep(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self._own:
            super().keep(copy)
            self._own = True

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return self.gradients[start:stop]

    @override
    def norms(self) -> torch.Tensor:
        if self._norms is None:
            return row_norms(flat_rows(self.gradients))
        return self._norms.values if isinstance(self._norms, SideNorms) else self._norms

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """A product of a vector and a matrix: each number is read once."""
        return (factors @ flat_rows(self.gradients)).view(self.shape)

    @override
    def select(self, index: torch.Tensor) -> Materialized:
        return Materialized(self.gradients[index])

    @override
    def folded(self, views: int | RowGroups) -> Use:
        if isinstance(views, int):
            return Materialized(self.gradients.unflatten(0, (-1, views)).sum(1), own=True)
        return Materialized(views.summed(self.gradients), own=True)

    def merged(self, other: Use) -> Use | None:
        """The sum, where the other is materialized too."""
        if isinstance(other, Materialized):
            return Materialized(self.gradients + other.gradients, own=True)
        return None

    def viewed(self, shape: torch.Size) -> Materialized:
        """The same numbers in another shape of the parameter."""
        return Materialized(self.gradients.reshape(self.rows, *shape), own=self._own)


class Folded(Use):
    """Sums over groups of rows of another use, for what has no better form.

    Args:
        use: has ``views`` rows for each of ours, or the groups' rows.
        views: at least 1, or the groups.
    """

    def __init__(self, use: Use, views: int | RowGroups) -> None:
        groups = RowGroups([views] * (use.rows // views)) if isinstance(views, int) else views
        self.use, self.groups = use, groups
        self.rows, self.shape = len(groups), use.shape

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        rows = self.use.per_example(*self.groups.span(start, stop))
        return self.groups.part(start, stop).summed(rows)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        rows, terms = self.use.magnitudes(*self.groups.span(start, stop))
        return self.groups.part(start, stop).summed(rows), self.groups.most * max(1, terms)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return self.use.weighted_sum(self.groups.spread(factors))

    @override
    def select(self, index: torch.Tensor) -> Self:
        left = RowGroups(self.groups.sizes[index.cpu()])
        return type(self)(self.use.select(self.groups.rows_of(index)), left)


def flat_rows(gradients: torch.Tensor) -> torch.Tensor:
    """(rows, *shape) as (rows, numbers), also of parameters without dimensions."""
    return gradients[:, None] if gradients.dim() == 1 else gradients.flatten(1)


def chunks(rows: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most ``CHUNK`` numbers, at least a row each."""
    step = max(1, CHUNK // max(1, numbers))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def chunked_norms(uses: list[Use], scale: torch.Tensor | None = None) -> torch.Tensor:
    """Norms of s ⊙ (the sum of all uses), shape (rows,), a few examples at a time.

    What is released adds up the same terms in another order, and where they cancel, rounding errors
    are all that is left. So what both may be off by is added
    (docs/theory/clipping.md#thm-released-norms;
    ``test_no_norm_is_of_one_number_and_the_release_another``).

    Args:
        uses: of one parameter.
        scale: s, of the parameter's shape; ``None``: 1.
    """
    found = []
    for start, stop in chunks(uses[0].rows, uses[0].shape.numel()):
        total = uses[0].per_example(start, stop)
        for use in uses[1:]:
            total = total + use.per_example(start, stop)
        norms = row_norms(flat_rows(total if scale is None else total * scale))
        slack = rounding_errors(uses, start, stop)
        if slack is not None:
            norms = norms + row_norms(flat_rows(slack if scale is None else slack * scale))
        found.append(norms)
    return torch.cat(found)


def rounding_errors(uses: list[Use], start: int, stop: int) -> torch.Tensor | None:
    """Bound on the distance between sums of per-example gradients and what is released.

    Args:
        uses: of one parameter.
        start: the first row.
        stop: one past the last.

    Returns:
        A bound for every number, shape (stop - start, *shape), ``None`` where they are the same.
    """
    total: torch.Tensor | None = None
    for use in uses:
        magnitudes, terms = use.magnitudes(start, stop)
        if len(uses) == 1 and not terms:
            return None
        additions = 2 * (terms + len(uses) + 2)
        part = magnitudes * (1.02 * additions * unit(magnitudes.dtype))
        total = part if total is None else total + part
    return total
