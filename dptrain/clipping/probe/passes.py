"""Passes of a module over a few rows, there and back, of which nothing is left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.owners import Answers, Telling, Told
from dptrain.clipping.probe.inputs import Rows
from dptrain.clipping.probe.outputs import Outputs, take_back, weigh, weigh_rows
from dptrain.clipping.probe.restoring import eagerly, replay, untouched
from dptrain.clipping.probe.witness import Sighting, Witness
from dptrain.core import global_state, same_global_state


@dataclasses.dataclass(frozen=True)
class AtHand:
    """The batch that the user holds.

    Attributes:
        examples: those that count, without padding.
        rows: that the module is fed, all.
        views: rows of an example.
        reduction: ``"mean"`` or ``"sum"``, as the loss was declared to reduce over the rows.
    """

    examples: int
    rows: int
    views: int
    reduction: str


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward and a backward pass.

    Attributes:
        seen: calls of layers, from the last to the first.
        finite: whether all numbers there are.
        reduced: whether the module returned a loss, a single number.
        told: numbers that it was told.
        random: whether the forward pass drew random numbers.
    """

    seen: list[Sighting]
    finite: bool
    reduced: bool
    rows: Rows
    told: Told
    random: bool


class Passes:
    """Runs a module on a few rows, from the state that all random generators are in now.

    Args:
        module: the user's, with what reports to a witness.
        witnessed: a context in which it reports to the given one.
        views: rows of an example.
        hooked: whether Opacus's hooks form the gradients.

    Attributes:
        start: brings the generators into that state.
        outputs: where what the module returns has the rows.
        answers: what the program was told in passes that are compared.
    """

    def __init__(
        self,
        module: nn.Module,
        witnessed: Callable[[Witness], contextlib.AbstractContextManager[Any]],
        *,
        views: int = 1,
        hooked: bool = False,
    ) -> None:
        self.module, self._witnessed, self.views, self._hooked = module, witnessed, views, hooked
        self.layers = list(module.modules())
        self.outputs, self.answers, self.start = Outputs(), Answers(), replay()

    @contextlib.contextmanager
    def within(self, witness: Witness) -> Iterator[None]:
        """A context for one pass, which reports to the witness."""
        self.start()
        with untouched(self.module), eagerly(self.layers), self._witnessed(witness):
            yield

    def settle(self, rows: Rows) -> None:
        """A pass there, and back where that may run layers again that ran without gradients."""
        witness = Witness(rows.rows)
        with self.within(witness):
            every = self.outputs.of(rows.call(self.module), rows.rows, note=True)
            outputs = [y for y in every if y.requires_grad]
            if witness.hides:
                take_back(outputs, _gradients(outputs)[0])

    def run(
        self,
        rows: Rows,
        *,
        of: tuple[int, Sequence[int]] | None = None,
        loss: float = 1.0,
        steps_first: bool = False,
    ) -> Pass:
        """Run one forward and one backward pass.

        Args:
            of: how many rows these are some of, and which, so that they are weighed as there.
            loss: what a loss is weighed by.
            steps_first: whether what has several entries for each row has all rows' first ones
                first, as flattened (steps, rows) are.
        """
        witness, telling = Witness(rows.rows), Telling()
        with self.within(witness):
            before = global_state()
            with telling:
                output = rows.call(self.module)
            random = not same_global_state(before, global_state())
            every = self.outputs.of(output, rows.rows)
            outputs = [y for y in every if y.requires_grad]
            gradients, reduced = _gradients(outputs, rows.rows, of, loss, steps_first)
            if not reduced:
                weigh_rows(outputs, gradients, rows.rows)
            take_back(outputs, gradients)
        return Pass(witness.sightings, witness.finite, reduced, rows, telling.told, random)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of eval mode; with hooks, which see nothing then, only of what has no weights."""
        before = [
            (m, m.training)
            for m in self.layers
            if not self._hooked or not any(p is not None for p in m._parameters.values())
        ]
        try:
            for m, _ in before:
                m.training = False
            yield
        finally:
            for m, training in before:
                m.training = training


def _gradients(
    outputs: Sequence[torch.Tensor],
    rows: int = 0,
    of: tuple[int, Sequence[int]] | None = None,
    loss: float = 1.0,
    steps_first: bool = False,
) -> tuple[list[torch.Tensor], bool]:
    """By all outputs, of Σ w·y − cos y with random w (``weigh``); and whether one is a loss.

    A single number is taken for a loss, a sum over the examples as it is, or ``loss`` times that.
    """
    found: list[torch.Tensor] = []
    reduced = False
    generator = torch.Generator().manual_seed(0)
    for y in outputs:
        if y.numel() == 1:
            found.append(torch.full_like(y, loss))
            reduced = True
        else:
            shape, picked = y.shape, None
            if of is not None and not len(y) % rows:
                each = len(y) // rows
                shape = torch.Size((of[0] * each, *y.shape[1:]))
                picked = [k * each + j for k in of[1] for j in range(each)]
                if steps_first:
                    picked = [j * of[0] + k for j in range(each) for k in of[1]]
            w = torch.randn(shape, generator=generator)
            found.append(weigh(y, w if picked is None else w[picked]))
    return found, reduced
