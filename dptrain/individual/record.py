"""A record of every example's spending: staged with the gradients, committed with the release."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import Array, checks

Indices = npt.NDArray[np.int64]
"""Positions of examples in the data set."""

Mask = npt.NDArray[np.bool_]
"""True for some of the examples, shape (N,)."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """One microbatch of the step under way.

    Attributes:
        indices: examples of the microbatch.
        ratios: norms of what they contribute, divided by R; min(‖g_i‖/R, 1) under flat clipping.
        shares: what is released of each clipped gradient, in [0, 1]; 0 where the budget is spent.
    """

    indices: Indices
    ratios: Array
    shares: Array


class IndividualRecord(ABC):
    """The private spending record of one run; made by ``IndividualFilter.record``.

    A logical step may come in microbatches and may be abandoned half-way. So ``admit`` decides
    from what is *committed*, and ``commit`` books the step when it is released.

    Everything here is computed from raw examples: not for release.

    Args:
        size: number N of examples.

    Attributes:
        active_counts: at every committed step, how many examples could take part.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.active_counts: list[int] = []
        self._staged: dict[int, Staged] = {}

    def __repr__(self) -> str:
        """Text that holds nothing of the examples: a record may end in a log."""
        return (
            f"{type(self).__name__}({self.size} examples, {self.steps} steps; not for release, "
            "IndividualReport.of(private) reads it)"
        )

    @property
    def steps(self) -> int:
        """Committed steps."""
        return len(self.active_counts)

    def admit(self, *, step: int, part: int, indices: Indices, ratios: Array) -> Array:
        """The shares of the gradients with which the examples at hand may take part.

        Args:
            step: logical step, from 0; the first one that is not committed.
            part: microbatch of this step; part 0 begins the step anew.
            indices: examples of the microbatch, shape (m,).
            ratios: now the norms of their clipped gradients, divided by R, shape (m,).

        Returns:
            Factors in [0, 1] on the clipped gradients, shape (m,).
        """
        checks.invariant(step == self.steps, "steps are admitted in order")
        if part == 0:
            self._staged.clear()
        shares = self._shares(indices, ratios)
        self._staged[part] = Staged(indices, ratios, shares)
        return shares

    def commit(self, step: int, parts: int) -> None:
        """Book the step, which has just been released in so many microbatches."""
        checks.invariant(step == self.steps, "steps are booked in order")
        checks.invariant(
            sorted(self._staged) == list(range(parts)), "a part of the step was not admitted"
        )
        staged = [self._staged[part] for part in range(parts)]
        self._staged.clear()
        merged = Staged(
            np.concatenate([part.indices for part in staged]),
            np.concatenate([part.ratios for part in staged]),
            np.concatenate([part.shares for part in staged]),
        )
        self.active_counts.append(self._book(merged))

    @abstractmethod
    def _shares(self, indices: Indices, ratios: Array) -> Array:
        """The answer of ``admit``; must not change what is committed."""

    @abstractmethod
    def _book(self, step: Staged) -> int:
        """Charge all examples for the step; returns how many could take part in it."""

    def open_round(self) -> None:
        """Begin the next round of an odometer.

        Raises:
            ValueError: if this is none, or all of its rounds are open.
        """
        raise ValueError(
            f"{type(self).__name__} has one budget and no rounds; give make_private "
            "individual=GDPOdometer(increments=..., ...), whose budget grows round by round"
        )

    def with_all_rounds(self) -> IndividualRecord:
        """The same record as if all rounds of an odometer were open; itself where this is none."""
        return self

    @property
    @abstractmethod
    def active(self) -> Mask:
        """True for examples that can still take part, at least with a small gradient; (N,)."""

    @abstractmethod
    def epsilons(self, delta: float) -> Array:
        """ε_i that each example has spent, at the common δ, shape (N,); not for release.

        Raises:
            ValueError: if δ is not in (0, 1).
        """

    @abstractmethod
    def epsilon_bound(self, delta: float) -> float:
        """ε at δ that the whole run keeps for every example, whatever the data are."""

    @property
    @abstractmethod
    def condition(self) -> str:
        """The premise of ``epsilon_bound``, in one sentence for the guarantee's notes."""

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """Refuse what ``state_dict`` cannot have given for these data; changes nothing.

        Args:
            state: a saved record.
            steps: how many steps the run it comes from had released; ``None``: unknown.

        Raises:
            ValueError: saying what differs.
        """
        if missing := sorted({"size", "active_counts", "spending"} - set(state)):
            raise ValueError(f"the individual record lacks {missing}; restore the checkpoint")
        if state["size"] != self.size:
            raise ValueError(
                f"the individual record has {state['size']} examples, but this data set has "
                f"{self.size}: resume with the data of the checkpoint"
            )
        booked = len(state["active_counts"])
        if steps is not None and booked != steps:
            raise ValueError(
                f"the individual record covers {booked} steps, but the run had released {steps}, "
                "so the checkpoint was changed after it was written: resume from an unchanged one"
            )
        here, there = _layout(self._spending()), _layout(state["spending"])
        if wrong := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
            raise ValueError(
                f"the individual record has {[there.get(n) for n in wrong]} as {wrong}, but this "
                f"run has {[here.get(n) for n in wrong]}: resume with the filter of the checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """The committed record; private data, as plain values and tensors."""
        return {
            "size": self.size,
            "active_counts": list(self.active_counts),
            "spending": self._spending(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved record.

        Raises:
            ValueError: if it is of other data.
        """
        self.check_state(state)
        self._staged.clear()
        self.active_counts = list(state["active_counts"])
        self._load_spending(state["spending"])

    @abstractmethod
    def _spending(self) -> dict[str, Any]:
        """The arrays of the record as torch tensors (copies), and whatever else it holds."""

    @abstractmethod
    def _load_spending(self, spending: dict[str, Any]) -> None:
        """Read what ``_spending`` gave."""


def _layout(spending: dict[str, Any]) -> dict[str, str]:
    """The layout of what is held, by name: the type, and the shape and dtype of a tensor."""
    return {
        name: f"{value.dtype}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for name, value in spending.items()
    }
