"""What an owner map claims of a program's results, held against what really moves them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dptrain.clipping.owners import OwnerTrace
from tests.helpers.dependence import (
    Dependence,
    Owned,
    Program,
    dependence,
    differs,
    inexact,
    reset,
    tensors,
    unsound,
    with_gradients,
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a map says of a program.

    Attributes:
        results: tensors that the program returned while it was traced.
        owners: of every result, int tensors of their shapes.
        events: of the values ≤ -2 among the owners, where each arose.
        escapes: values that left the tensors.
    """

    results: list[Tensor]
    owners: list[Tensor]
    events: dict[int, Any]
    escapes: list[Any]


def claim(program: Program, arguments: Sequence[Owned], seed: int = 0) -> Claim:
    """Trace a program."""
    values = [argument.value.detach().clone() for argument in arguments]
    trace = OwnerTrace()
    for value, argument in zip(values, arguments, strict=True):
        trace.own(value, argument.owners)
    reset(seed)
    with trace:
        results = tensors(program(*values))
        owners = [trace.owners(result) for result in results]
    kinds = {int(value) for own in owners for value in own.unique() if value <= -2}
    events = {value: trace.event(value) for value in kinds}
    return Claim(results, owners, events, list(trace.escapes))


def faults(program: Program, arguments: Sequence[Owned], seed: int = 0) -> tuple[Claim, list[str]]:
    """The claim about a program, and what is wrong with it: nothing, or a sentence for each result.

    A value that left the tensors leaves a map without a claim about results.

    Raises:
        Unsteady: if the program's results differ without a cause.
    """
    truth = dependence(program, arguments, seed=seed)
    found = claim(program, arguments, seed)
    return found, [] if found.escapes else wrong(found, truth)


def wrong(found: Claim, truth: Dependence) -> list[str]:
    """A sentence for each result of which a map claims too much."""
    said = []
    if len(found.results) != len(truth.results):
        return [f"{len(found.results)} results traced, {len(truth.results)} untraced"]
    for k, (result, own, right, moved) in enumerate(
        zip(found.results, found.owners, truth.results, truth.moved, strict=True)
    ):
        dense = result.detach().resolve_conj().resolve_neg()
        if own.shape != right.shape or dense.shape != right.shape:
            said.append(f"result {k}: owners {tuple(own.shape)} of a shape {tuple(right.shape)}")
        elif dense.layout == torch.strided and differs(_plain(right), _plain(dense)).any():
            said.append(f"result {k}: the trace changes its numbers")
        else:
            bad = unsound(own, moved, truth.examples).nonzero()
            if len(bad):
                index = tuple(bad[0].tolist())
                said.append(
                    f"result {k} of {len(truth.results)}, {tuple(right.shape)}: {len(bad)} wrong; "
                    f"at {index} the map says {int(own[index])}, moved by {truth.movers(k, index)}"
                )
    for value, event in found.events.items():
        if event.kind not in ("mixed", "unknown") or not event.operator:
            said.append(f"{value} has no reason: {event}")
    return said


def _plain(value: Tensor) -> Tensor:
    """With zeros alike: formulas that torch takes under any mode have other signs there."""
    return value + 0 if inexact(value) else value


def check(program: Program, arguments: Sequence[Owned], seed: int = 0) -> tuple[Claim, Claim]:
    """Assert that a map claims nothing wrong of a program, forward and with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what operators do with odd numbers
        forward, said = faults(program, arguments, seed)
        backward, more = faults(with_gradients(program, seed), arguments, seed)
    assert not said + more, "\n".join([*said, *(f"with gradients: {each}" for each in more)])
    return forward, backward
