"""What shared values are made of: parameters, and rows of tables that were looked up in them."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """A place in autograd's graph that gradients of shared values are pulled back to.

    No root lies behind another, so that their gradients add up.

    Attributes:
        parameter: behind it.
        edge: into the graph, where it begins.
        ids: rows of the parameter that were looked up, one after the other; ``None``: it is the
            parameter itself.
        padding: the id that gets no gradient.
    """

    parameter: nn.Parameter
    edge: GradientEdge
    ids: torch.Tensor | None = None
    padding: int | None = None

    @classmethod
    def of(cls, view: torch.Tensor, parameter: nn.Parameter) -> Root:
        """A view of a parameter."""
        return cls(parameter, get_gradient_edge(view))

    @classmethod
    def looked_up(
        cls, rows: torch.Tensor, parameter: nn.Parameter, ids: torch.Tensor, padding: int | None
    ) -> Root:
        """Rows of a table, by a view of it that nothing else was made of."""
        return cls(parameter, get_gradient_edge(rows), ids.flatten().clone(), padding)

    def use(self, gradients: torch.Tensor) -> Use:
        """The parameter's, from gradients by this place of shape (rows, *shape of what is here)."""
        # An operation may have had less precision.
        gradients = gradients.to(summing_dtype(self.parameter))
        if self.ids is None:
            return Materialized(gradients)
        length, width = self.parameter.shape
        gradients = gradients.reshape(len(gradients), len(self.ids), width)
        if self.padding is not None:
            gradients = gradients.masked_fill((self.ids == self.padding)[:, None], 0.0)
        return Gathered(self.ids.expand(len(gradients), -1), gradients, length)
