"""The place where output gradients are read: a layer's forward without its own parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dptrain.clipping.bookkeeping.rules import LayerRule, Uses, owned
from dptrain.clipping.bookkeeping.uses import Use
from dptrain.clipping.rows import summing_dtype


class Book(Protocol):
    """What taps report to."""

    def rows(self) -> int | None:
        """Rows that the model sees of the batch at hand; ``None`` without a batch."""

    def at_hand(self) -> Any:
        """What a backward pass has to find as its forward pass did: the batch, or ``None``."""

    def record(self, uses: Mapping[nn.Parameter, Use], since: Any) -> None:
        """Take in uses of parameters by a layer that ran when ``since`` was at hand."""

    def discard(self) -> None:
        """Forget what was recorded of the batch at hand."""


class LayerTap:
    """Stands in for ``layer.forward``: parameters detached, the output's gradient reported.

    Autograd then propagates output gradients only; the weights' gradients are the book's to form.
    State lives in the autograd graph alone: a forward pass that is not followed by a backward pass
    leaves nothing behind, and checkpointing (which drops the graph's tensors) saves what it should.
    Copies of the layer (by ``copy`` or ``pickle``) have its own forward again and report nothing.

    Args:
        layer: has a rule.
        rule: its rule.
        book: where gradients are reported to.
        anchor: a leaf that requires gradients and stands for the parameters in the graph.
    """

    def __init__(self, layer: nn.Module, rule: LayerRule, book: Book, anchor: torch.Tensor) -> None:
        self.layer, self.rule, self.book, self.anchor = layer, rule, book, anchor
        self.parameters = owned(layer, rule)
        self.keeps_inputs = rule.keeps_inputs(layer)
        self._own = vars(layer).get("forward")  # of this very layer, set by some library
        self._forward: Callable[..., Any] = layer.forward
        self._signature = inspect.signature(self._forward)
        # A compiled graph would run the bookkeeping once, when it is traced.
        self._run = torch.compiler.disable(self.forward)
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of this would run the layer that was copied, with its parameters.
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.layer, "forward")  # the class's: there is no other when it is loaded

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self._own is None:
            del self.layer.forward
        else:
            self.layer.forward = self._own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output; see the class."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        with detached(self.layer, recurse=self.rule.recurses):
            return self.rule.forward(self.layer, self._forward, args, self.observe)

    def observe(self, output: torch.Tensor, inputs: Sequence[Any], uses: Uses) -> torch.Tensor:
        """See :class:`~dptrain.clipping.bookkeeping.rules.Observe`."""
        output = one_row_each(self.layer, inputs, output, self.book.rows())
        if not self.keeps_inputs:
            inputs = ()
        places = [k for k, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        tensors = [inputs[k].detach() for k in places]
        since = self.book.at_hand()

        def report(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            self._report(uses, rest, places, saved, gradient, since)

        return _Tap.apply(output, self.anchor, report, *tensors)

    def _report(
        self,
        uses: Uses,
        rest: list[Any],
        places: list[int],
        saved: tuple[torch.Tensor, ...],
        gradient: torch.Tensor,
        since: Any,
    ) -> None:
        inputs = list(rest)
        # Half precision would round norms and sums past R; see summing_dtype.
        gradient = gradient.to(summing_dtype(gradient))
        for k, value in zip(places, saved, strict=True):
            kept = value.to(gradient.dtype) if value.is_floating_point() else value
            if len(kept) == 1 != len(gradient):  # one row for all, see one_row_each
                kept = kept.expand(len(gradient), *kept.shape[1:])
            inputs[k] = kept
        with torch.autocast(gradient.device.type, enabled=False):
            found = uses(self.layer, tuple(inputs), gradient)
            # A rule that observes several outputs has uses of some of the parameters in each, and
            # what has been frozen since the run was made takes no part.
            trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
            here = {p: found[name] for name, p in trained.items() if name in found}
            self.book.record(here, since)


def one_row_each(
    layer: nn.Module, inputs: Sequence[Any], output: torch.Tensor, rows: int | None
) -> torch.Tensor:
    """The output of an embedding with a row for each example, where all share one.

    What follows broadcasts it to the batch, as positions are (``position_ids`` of shape (1, T)):
    the gradient of the shared row would be the batch's, of no example in particular. What other
    layers make of a single row stays as it is, and is refused when its gradient is counted: more
    often than something shared it is the batch, with the examples in the second dimension.

    Args:
        layer: that made the output.
        inputs: of the layer.
        output: the layer's.
        rows: that the model sees; ``None`` if that is not known.

    Raises:
        RuntimeError: for ids that may be shared or one an example.
    """
    if rows is None or not isinstance(layer, nn.Embedding):
        return output
    ids = inputs[0]
    if ids.dim() == 1:
        if len(ids) != rows:  # positions (T,), to be added to what has shape (rows, T, width)
            return output.expand(rows, *output.shape)
        if rows > 1 and bool((ids.diff() == 1).all()):
            raise RuntimeError(
                f"an embedding looks up the {rows} consecutive ids {int(ids[0])} ... "
                f"{int(ids[-1])} in a batch of {rows} rows: these may be positions that all "
                "examples share or one id an example; give positions the shape (1, positions) or "
                "ids the shape (rows, 1)"
            )
    if len(output) != 1 or rows == 1:
        return output
    steps = ids.flatten().diff()
    if not bool(((steps == steps[:1]) & (steps >= 0) & (steps <= 1)).all()):
        raise RuntimeError(
            f"an embedding looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows: "
            "they are neither consecutive, as positions are, nor all the same, and may be the "
            "examples' own; put the examples in the first dimension, and give what they share a "
            "row for each of them (ids.expand(rows, -1))"
        )
    return output.expand(rows, *output.shape[1:])


class _Tap(torch.autograd.Function):
    """The identity; its backward pass reports the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        anchor: torch.Tensor,
        report: Callable[[tuple[torch.Tensor, ...], torch.Tensor], None],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.report = report
        ctx.save_for_backward(*tensors)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: grad_sample_mode='bookkeeping' does not see what a gradient "
                "penalty, or another derivative of a gradient, does with the parameters; leave it "
                "out, or estimate it by a difference of two forward passes"
            )
        saved = ctx.saved_tensors
        # torch.autograd.grad by an input (for adversarial examples, say) is not about parameters:
        # the leaf that stands for them is not asked for then.
        if torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            ctx.report(saved, gradient)
        passed = gradient if ctx.needs_input_grad[0] else None
        return (passed, None, None, *[None] * len(saved))


@contextlib.contextmanager
def detached(layer: nn.Module, *, recurse: bool) -> Iterator[None]:
    """The layer with its own parameters detached, and with its children's."""
    layers = list(layer.modules()) if recurse else [layer]
    kept = [(m, m._parameters) for m in layers]
    try:
        for m, parameters in kept:
            own: dict[str, Any] = {}
            for name, p in parameters.items():
                own[name] = None if p is None else p.detach()
            m._parameters = own
        yield
    finally:
        for m, parameters in kept:
            m._parameters = parameters
