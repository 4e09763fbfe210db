"""Any one operation, example by example: the vector-Jacobian product of it alone, under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.operations.operation import Operation
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use
from dptrain.core import named_error


def replayed(op: Operation) -> Any:
    """The operation's result, its tracked tensors' gradients found by running it for each row.

    Raises:
        Unhandled: if the result is no tensor with a row for each example.
    """
    output = op.run()
    if not isinstance(output, torch.Tensor) or not output.dim():
        raise op.session.refusal(op.func, "returns something other than one tensor by rows")
    if any(leaf is output for leaf in op.leaves):
        raise op.session.refusal(op.func, "writes into its input")
    rows, factor, by_rows = op.session.rows, op.factor, op.by_rows
    constant = [
        x
        for k, x in enumerate(op.leaves)
        if isinstance(x, torch.Tensor) and k not in by_rows and not x.is_inference()
    ]
    versions = [x._version for x in constant]

    def uses(saved: tuple[Any, ...], gradient: torch.Tensor) -> dict[int, Use]:
        if versions != [x._version for x in constant]:
            raise op.session.refusal(op.func, "is given a tensor that is written into afterwards")
        # In half precision so would be the gradients, which are added up.
        values = [_like(op.leaves[k].detach(), gradient) for k in op.places]

        def one(g: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def run(*tracked: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = op.run(
                    {
                        **dict(zip(by_rows, inputs, strict=True)),
                        **dict(zip(op.places, tracked, strict=True)),
                    }
                )
                return found

            y, back = torch.func.vjp(run, *values)[:2]
            if y.shape != g.shape:
                raise op.session.refusal(op.func, "depends on the number of examples")
            found: tuple[torch.Tensor, ...] = back(g)
            return found

        numbers = sum(v.numel() for v in values) + gradient[:factor].numel()
        try:
            found = _over_rows(one, [gradient, *saved], rows, factor, chunk_size(gradient, numbers))
        except RuntimeError as error:
            why = f"cannot be run for one example ({named_error(error)})"
            raise op.session.refusal(op.func, why) from error
        return {k: Materialized(g) for k, g in zip(op.places, found, strict=True)}

    return op.session.observed(op, output, [op.leaves[k] for k in by_rows], uses)


def _over_rows(
    one: Callable[..., tuple[torch.Tensor, ...]],
    tensors: list[torch.Tensor],
    rows: int,
    factor: int,
    step: int,
) -> list[torch.Tensor]:
    """What ``one`` gives for every example's rows, stacked; a loop where vmap refuses."""
    apart = [t.unflatten(0, (rows, factor)) for t in tensors]
    try:
        return list(torch.func.vmap(one, chunk_size=step)(*apart))
    except RuntimeError as error:
        if "randomness" in str(error):  # another run would draw other numbers
            raise
    found = [one(*each) for each in zip(*apart, strict=True)]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def _like(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return value.to(gradient.dtype) if value.is_floating_point() else value
