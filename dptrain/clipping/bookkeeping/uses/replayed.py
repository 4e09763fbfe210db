"""Per-example gradients that are too many to be kept: found again when their sum is formed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from typing_extensions import override

from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.uses.use import Use, Whole

Parts = Iterator[tuple[int, int, Mapping[str, torch.Tensor]]]


class Replay:
    """Per-example gradients of several parameters of one call, a few rows at a time.

    Args:
        parts: runs through the rows in parts of (start, stop, gradients of shape
            (stop - start, *shape) by name), all those that have a row from the first number to
            below the second; the same parts each time.
    """

    def __init__(
        self, parts: Callable[[int, int], Parts], shapes: Mapping[str, torch.Size], rows: int
    ) -> None:
        self.parts, self.shapes, self.rows = parts, shapes, rows
        found: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
        for _, _, gradients in parts(0, rows):
            for name in shapes:
                found[name].append(row_norms(gradients[name].flatten(1)))
        self.norms = {name: torch.cat(norms) for name, norms in found.items()}
        self._sums: dict[str, torch.Tensor] = {}
        self._of: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def uses(self) -> dict[str, Use]:
        """The use of each parameter."""
        return {name: Replayed(self, name) for name in self.shapes}

    def sum_of(self, name: str, factors: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """Σ_i f_i g_i over the rows of ``index``; all parameters' at once where factors are equal.

        No row counts longer than the norm that it was clipped by, should a device not come to the
        same numbers again.
        """
        if name not in self._sums or not self._same(factors, index):
            self._of = factors, index
            whole = factors
            kept = torch.ones(self.rows, dtype=torch.bool, device=factors.device)
            if index is not None:
                kept[:] = False
                kept[index] = True
                whole = factors.new_zeros(self.rows).index_add_(0, index, factors)
            self._sums = {}
            for start, stop, gradients in self.parts(0, self.rows):
                here = kept[start:stop].nonzero()[:, 0]
                if not len(here):
                    continue
                for n, g in gradients.items():
                    rows = g.flatten(1) if index is None else g.flatten(1)[here]
                    norms = self.norms[n][start:stop][here]
                    again = row_norms(rows)
                    shorter = torch.where(again > norms, norms / again, 1.0)
                    part = (whole[start:stop][here] * shorter).to(rows.dtype) @ rows
                    self._sums[n] = part if n not in self._sums else self._sums[n].add_(part)
        shape = self.shapes[name]
        # Dropped: a use is spent when its sum is formed.
        found = self._sums.pop(name, None)
        return factors.new_zeros(shape) if found is None else found.view(shape)

    def _same(self, factors: torch.Tensor, index: torch.Tensor | None) -> bool:
        if self._of is None:
            return False
        before, places = self._of
        if (index is None) != (places is None) or not torch.equal(before, factors):
            return False
        return index is None or places is None or torch.equal(index, places)


class Replayed(Whole):
    """One parameter's gradients of a ``Replay``.

    Args:
        index: rows that are left; ``None``: all.
    """

    def __init__(self, replay: Replay, name: str, index: torch.Tensor | None = None) -> None:
        self.replay, self.name, self.index = replay, name, index
        self.rows = replay.rows if index is None else len(index)
        self.shape = replay.shapes[name]

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """As they come in the replay, so that rows are the same in whatever parts they are read."""
        device = self.replay.norms[self.name].device
        wanted = torch.arange(start, stop, device=device)
        if self.index is not None:
            wanted = self.index[start:stop]
        found: torch.Tensor | None = None
        for first, last, gradients in self.replay.parts(int(wanted.min()), int(wanted.max()) + 1):
            here = (wanted >= first) & (wanted < last)
            rows = gradients[self.name]
            if found is None:
                found = rows.new_empty(len(wanted), *self.shape)
            found[here] = rows[wanted[here] - first]
        assert found is not None
        return found

    @override
    def norms(self) -> torch.Tensor:
        norms = self.replay.norms[self.name]
        return norms if self.index is None else norms[self.index]

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return self.replay.sum_of(self.name, factors, self.index)

    @override
    def select(self, index: torch.Tensor) -> Replayed:
        return Replayed(self.replay, self.name, index if self.index is None else self.index[index])
