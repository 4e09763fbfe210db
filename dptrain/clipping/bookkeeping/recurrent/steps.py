"""Places of the steps of a batch of sequences: one after the other, and by rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import PackedSequence


class Steps:
    """Flat tensors (numbers of steps, width) and the same by rows (rows, longest, width).

    A flat tensor holds all sequences' first steps, then their second ones, and so on, the longest
    sequence first, so that those that go on are always the first. Packed sequences are flat.

    Args:
        sizes: how many sequences have a step t.
        reverse: whether the recurrence goes from the last step to the first.
        order: the row of each sequence; ``None``: as they come.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        reverse: bool = False,
        order: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.sizes, self.reverse = tuple(sizes), reverse
        self.order, self.device = order, device
        self.rows, self.longest, self.total = self.sizes[0], len(self.sizes), sum(self.sizes)
        self.even = self.sizes[-1] == self.rows
        ends = itertools.accumulate(self.sizes)
        spans = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        self.spans = spans[::-1] if reverse else spans  # as the recurrence goes
        if not self.even or order is not None:
            self._index()

    @classmethod
    def of(cls, packed: PackedSequence) -> Steps:
        """The steps of a packed sequence."""
        sizes, order = packed.batch_sizes.tolist(), packed.sorted_indices
        return cls(sizes, order=order, device=packed.data.device)

    def reversed(self) -> Steps:
        """The same, gone through from the last step to the first."""
        return Steps(self.sizes, reverse=not self.reverse, order=self.order, device=self.device)

    def _index(self) -> None:
        sizes = torch.tensor(self.sizes)
        starts = sizes.cumsum(0) - sizes
        step = torch.repeat_interleave(torch.arange(self.longest), sizes)
        sequence = torch.arange(self.total) - starts[step]
        row = sequence if self.order is None else self.order.cpu()[sequence]
        self._place = (row * self.longest + step).to(self.device)
        lengths = torch.bincount(sequence, minlength=self.rows)
        self._last = (starts[lengths - 1] + torch.arange(self.rows)).to(self.device)
        if self.reverse:
            following = (step + 1).clamp(max=self.longest - 1)
            goes_on = step + 1 < lengths[sequence]
            before = torch.where(goes_on, starts[following] + sequence, self.total + sequence)
        else:
            preceding = self.rows + starts[(step - 1).clamp(min=0)] + sequence
            before = torch.where(step > 0, preceding, sequence)
        self._before = before.to(self.device)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The steps, as the recurrence goes."""
        parts = list(flat.split(self.sizes))
        return parts[::-1] if self.reverse else parts

    def backwards(self, most: int) -> Iterator[tuple[slice, list[tuple[slice, slice | None]]]]:
        """Runs of steps against the recurrence's way, and in each its steps.

        Args:
            most: rows of a flat tensor in one run, if it is not a single step.

        Yields:
            Where a run lies; and for each step where that lies and the next one.
        """
        spans = self.spans[::-1]
        pairs = list(zip(spans, [*spans[1:], None], strict=True))
        while pairs:
            taken, count = 0, 0
            for span, _ in pairs:
                taken += span.stop - span.start
                if count and taken > most:
                    break
                count += 1
            run, pairs = pairs[:count], pairs[count:]
            ends = run[0][0], run[-1][0]
            yield slice(min(s.start for s in ends), max(s.stop for s in ends)), run

    def by_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Shape (rows, longest, width); after a sequence's end there are zeros."""
        if self.even and self.order is None:
            return flat.unflatten(0, (self.longest, self.rows)).transpose(0, 1)
        found = flat.new_zeros(self.rows * self.longest, flat.shape[1])
        return found.index_copy_(0, self._place, flat).unflatten(0, (self.rows, self.longest))

    def states(self, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the initial states and those after each step, and the part of the latter."""
        whole = initial.new_empty(self.rows + self.total, initial.shape[1])
        (whole[self.total :] if self.reverse else whole[: self.rows]).copy_(initial)
        return whole, self.after(whole)

    def after(self, whole: torch.Tensor) -> torch.Tensor:
        """The states after each step, flat."""
        return whole[: self.total] if self.reverse else whole[self.rows :]

    def before(self, whole: torch.Tensor) -> torch.Tensor:
        """The states that the steps start from, flat."""
        if not self.even:
            return whole[self._before]
        return whole[self.rows :] if self.reverse else whole[: self.total]

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """The state that every sequence ends with, of flat states after each step."""
        if self.reverse:
            return states[: self.rows]
        return states[self.total - self.rows :] if self.even else states[self._last]

    def add_to_last(self, states: torch.Tensor, added: torch.Tensor) -> None:
        """Add to what ``last`` takes, in place."""
        if self.reverse or self.even:
            self.last(states).add_(added)
        else:
            states.index_add_(0, self._last, added)


def fit(state: torch.Tensor, initial: torch.Tensor, rows: int) -> torch.Tensor:
    """The state of so many sequences: of those that go on, or also of some that begin."""
    if len(state) == rows:
        return state
    if len(state) > rows:
        return state[:rows]
    return torch.cat([state, initial[len(state) : rows]])
