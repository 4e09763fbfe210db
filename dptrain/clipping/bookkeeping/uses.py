"""What one call of a layer adds to the gradients of a parameter, example by example."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Self

import torch

from dptrain.clipping.rows import row_norms

CHUNK = 2**22  # numbers of per-example gradients that are formed at a time where none are kept
FEW = 2**20  # numbers of a layer's per-example gradients that are not worth avoiding


class Use(abc.ABC):
    """One use of a parameter: per-example gradients g_i, in whatever form is the smallest.

    Gradients are those of the reduced loss, one for each row of the batch. Uses of one parameter
    are added up before their norm is taken (:mod:`~dptrain.clipping.bookkeeping.combine`).

    Attributes:
        rows: number of examples.
        shape: of the parameter.
    """

    rows: int
    shape: torch.Size

    @abc.abstractmethod
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """g_i of rows ``start`` to ``stop``, shape (stop - start, *shape)."""

    @abc.abstractmethod
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """Σ_i f_i g_i, shape ``shape``; ``factors`` has shape (rows,). The use is spent then."""

    @abc.abstractmethod
    def select(self, index: torch.Tensor) -> Self:
        """The use without all rows but those of ``index``."""

    def norms(self) -> torch.Tensor:
        """‖g_i‖₂, shape (rows,); at most a few units in the last place too small."""
        return chunked_norms([self])

    def merged(self, other: Use) -> Use | None:
        """Both uses as one, or ``None`` where they have no common form."""
        return None

    def folded(self, views: int) -> Use:
        """The sum over each ``views`` rows that follow one another, as one row."""
        return Folded(self, views)

    def compact(self) -> Use:
        """The same in the form that costs least from here on."""
        return self


class Materialised(Use):
    """The per-example gradients themselves.

    Args:
        gradients: shape (rows, *shape).
        norms: theirs, where they are known, shape (rows,).
    """

    def __init__(self, gradients: torch.Tensor, norms: torch.Tensor | None = None) -> None:
        self.gradients = gradients
        self.rows, self.shape = gradients.shape[0], gradients.shape[1:]
        self._norms = norms

    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """See :meth:`Use.per_example`."""
        return self.gradients[start:stop]

    def norms(self) -> torch.Tensor:
        """See :meth:`Use.norms`."""
        return row_norms(self.gradients.flatten(1)) if self._norms is None else self._norms

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """A product of a vector and a matrix: each number is read once."""
        return (factors @ self.gradients.flatten(1)).view(self.shape)

    def select(self, index: torch.Tensor) -> Materialised:
        """See :meth:`Use.select`."""
        return Materialised(self.gradients[index])

    def folded(self, views: int) -> Use:
        """See :meth:`Use.folded`."""
        return Materialised(self.gradients.unflatten(0, (-1, views)).sum(1))

    def merged(self, other: Use) -> Use | None:
        """The sum, where the other is materialised too."""
        if isinstance(other, Materialised):
            return Materialised(self.gradients + other.gradients)
        return None


class Folded(Use):
    """Sums over groups of rows of another use, for what has no better form.

    Args:
        use: has ``views`` rows for each of ours.
        views: at least 1.
    """

    def __init__(self, use: Use, views: int) -> None:
        self.use, self.views = use, views
        self.rows, self.shape = use.rows // views, use.shape

    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """See :meth:`Use.per_example`."""
        rows = self.use.per_example(start * self.views, stop * self.views)
        return rows.unflatten(0, (-1, self.views)).sum(1)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """See :meth:`Use.weighted_sum`."""
        return self.use.weighted_sum(factors.repeat_interleave(self.views))

    def select(self, index: torch.Tensor) -> Folded:
        """See :meth:`Use.select`."""
        within = torch.arange(self.views, device=index.device)
        return Folded(self.use.select((index[:, None] * self.views + within).flatten()), self.views)


def chunks(rows: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most ``CHUNK`` numbers, at least a row each."""
    step = max(1, CHUNK // max(1, numbers))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def chunked_norms(uses: list[Use], scale: torch.Tensor | None = None) -> torch.Tensor:
    """Norms of s ⊙ (the sum of all uses), shape (rows,), a few examples at a time.

    Args:
        uses: of one parameter.
        scale: s, of the parameter's shape; ``None``: 1.
    """
    found = []
    for start, stop in chunks(uses[0].rows, uses[0].shape.numel()):
        total = uses[0].per_example(start, stop)
        for use in uses[1:]:
            total = total + use.per_example(start, stop)
        found.append(row_norms((total if scale is None else total * scale).flatten(1)))
    return torch.cat(found)
