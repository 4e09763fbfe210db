"""Which examples really move an element of a result: every example's numbers are changed in turn.

Nothing of dptrain is used here, so that nothing of it can be wrong on both sides.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

SHARED = -1  # the owner of what depends on no example

# A result that moves by less than this much of itself was rounded otherwise: vectorized functions
# take another path where a neighbor is large, and sums of another length are added in blocks.
ROUNDING = 1e-9

# Changes kinds that a try makes to floats, and to integers and truth values.
FLOATS = ("other", "near", "permuted", "borrowed", "unit", "zero", "negative", "large", "nan")
CHOICES = ("other", "permuted", "least", "most", "borrowed")

Program = Callable[..., Any]


class Unsteady(ValueError):
    """A program whose results differ although nothing was changed."""


@dataclasses.dataclass(frozen=True)
class Owned:
    """An argument of a program.

    Args:
        value: its numbers.
        owners: of every element, shape of ``value``: an example's number or ``SHARED``.
    """

    value: Tensor
    owners: Tensor

    def __post_init__(self) -> None:
        if self.owners.shape != self.value.shape:
            raise ValueError("owners must have the shape of the value")

    @classmethod
    def rows(cls, value: Tensor, dim: int = 0) -> Owned:
        """An argument whose k-th row along ``dim`` belongs to example k."""
        place = [1] * value.dim()
        place[dim] = -1
        rows = torch.arange(value.shape[dim]).view(place)
        return cls(value, rows.expand(value.shape).clone())

    @classmethod
    def shared(cls, value: Tensor) -> Owned:
        """An argument that belongs to no example."""
        return cls(value, torch.full(value.shape, SHARED))

    def changed(self, example: int, change: str | None, generator: torch.Generator) -> Tensor:
        """The value with other numbers where the example owns them."""
        own = self.owners == example
        value = self.value.clone()
        before = value[own]
        if change is None or not len(before):
            return value
        if inexact(value):
            value[own] = _floats(before, value, change, generator)
        elif value.dtype == torch.bool:
            value[own] = _truths(before, value, change, generator)
        else:
            value[own] = _integers(before, value, change, generator)
        return value


def _floats(before: Tensor, value: Tensor, change: str, generator: torch.Generator) -> Tensor:
    normal = torch.randn(before.shape, dtype=before.dtype, generator=generator)
    if change == "near":
        return before * (1 + 0.1 * normal)
    if change == "unit":
        return torch.rand(before.shape, dtype=before.dtype, generator=generator)
    if change == "large":
        return 1e6 * normal
    if change == "negative":
        return -before
    if change in ("permuted", "borrowed"):
        return _placed(before, value, change, generator)
    constants = {"zero": 0.0, "nan": float("nan")}
    return torch.full_like(before, constants[change]) if change in constants else normal


def _integers(before: Tensor, value: Tensor, change: str, generator: torch.Generator) -> Tensor:
    """Other ids that are between those at hand, and so as valid as they are."""
    least, most = int(value.min()), int(value.max())
    if change in ("permuted", "borrowed"):
        return _placed(before, value, change, generator)
    if change in ("least", "most"):
        return torch.full_like(before, least if change == "least" else most)
    # 64 bits at most, which randint's upper end must not leave
    top = min(most, 2**62) + 1
    return torch.randint(max(least, -(2**62)), top, before.shape, generator=generator).to(before)


def _truths(before: Tensor, value: Tensor, change: str, generator: torch.Generator) -> Tensor:
    if change in ("permuted", "borrowed"):
        return _placed(before, value, change, generator)
    if change in ("least", "most"):
        return torch.full_like(before, change == "most")
    return ~before


def _placed(before: Tensor, value: Tensor, change: str, generator: torch.Generator) -> Tensor:
    """The same numbers in another order, or those that any example has."""
    if change == "permuted":
        return before[torch.randperm(len(before), generator=generator)]
    flat = value.flatten()
    return flat[torch.randint(len(flat), before.shape, generator=generator)]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What was found out about a program.

    Attributes:
        results: tensors that the unchanged program returns, in the order of its tree.
        examples: numbers of those that were changed.
        moved: for every result, shape (changed examples, *shape): whether that example moved it.
        tries: for every changed example, the number of changes under which the program ran.
    """

    results: list[Tensor]
    examples: list[int]
    moved: list[Tensor]
    tries: list[int]

    def movers(self, result: int, index: tuple[int, ...]) -> set[int]:
        """Examples that moved an element."""
        own = self.moved[result][(slice(None), *index)]
        return {example for example, moved in zip(self.examples, own, strict=True) if moved}


def inexact(value: Tensor) -> bool:
    """True for floats and complex numbers."""
    return value.is_floating_point() or value.is_complex()


def tensors(tree: Any) -> list[Tensor]:
    """Tensors of a tree of lists, tuples, dicts and registered classes."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def reset(seed: int) -> None:
    """Set every generator that a program may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def outcome(program: Program, values: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Copies of the tensors that a program returns when called with copies of the values."""
    reset(seed)
    returned = tensors(program(*(value.detach().clone() for value in values)))
    return [_dense(result.detach()).resolve_conj().resolve_neg().clone() for result in returned]


def _dense(result: Tensor) -> Tensor:
    return result if result.layout == torch.strided else result.to_dense()


def with_gradients(
    program: Program, seed: int = 0, *, by: Collection[int] | None = None
) -> Program:
    """A program that returns what ``program`` does and, beside it, a gradient by each argument.

    It is the gradient of the sum of the results, each element times a random number, by those of
    the arguments that the results follow from: the numbers ``by``, or all that are floats.
    """

    def both(*values: Tensor) -> list[Tensor]:
        leaves = [
            value.requires_grad_()
            for number, value in enumerate(values)
            if (inexact(value) if by is None else number in by)
        ]
        results = tensors(program(*values))
        ends = [result for result in results if result.requires_grad]
        if not (leaves and ends):
            return results
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(end.shape, dtype=end.dtype, generator=generator) for end in ends]
        found = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
        return [*results, *(gradient for gradient in found if gradient is not None)]

    return both


def dependence(
    program: Program,
    arguments: Sequence[Owned],
    *,
    seed: int = 0,
    avoid: Collection[str] = (),
) -> Dependence:
    """Change every example's numbers in several ways, and see which elements of results move.

    Args:
        program: called with the values of the arguments; returns a tree with tensors. Generators
            start in the same state at every call.
        arguments: with the owner of every element.
        seed: of the generators, and of what is put in the numbers' place.
        avoid: changes of floats that crash the program's process.

    Returns:
        What moved. An element that is there under one value of an example and not under another
        (results of another shape) was moved by it.

    Raises:
        Unsteady: if two calls with the same values differ.
    """
    values = [argument.value for argument in arguments]
    results = outcome(program, values, seed)
    again = outcome(program, values, seed)
    if len(again) != len(results) or any(
        differs(a, b).any() for a, b in zip(results, again, strict=True)
    ):
        raise Unsteady("two calls with the same values differ")
    present = {int(owner) for argument in arguments for owner in argument.owners.unique()}
    chosen = sorted(present - {SHARED})
    moved = [torch.zeros((len(chosen), *result.shape), dtype=torch.bool) for result in results]
    tries = [0] * len(chosen)
    generator = torch.Generator().manual_seed(seed)
    for number, example in enumerate(chosen):
        for changed in _changes(arguments, example, avoid, generator):
            try:
                others = outcome(program, changed, seed)
            except Exception:  # numbers that the program does not take show nothing
                continue
            tries[number] += 1
            if len(others) != len(results):
                for each in moved:
                    each[number] = True
                continue
            for each, before, after in zip(moved, results, others, strict=True):
                each[number] |= differs(before, after)
    return Dependence(results, chosen, moved, tries)


def _changes(
    arguments: Sequence[Owned],
    example: int,
    avoid: Collection[str],
    generator: torch.Generator,
) -> Iterator[list[Tensor]]:
    """Values with another example's numbers: of floats, of the other arguments, and of both."""
    own = [argument for argument in arguments if bool((argument.owners == example).any())]
    floats = any(inexact(argument.value) for argument in own)
    others = any(not inexact(argument.value) for argument in own)
    pairs: list[tuple[str | None, str | None]] = []
    pairs += [(change, None) for change in FLOATS if change not in avoid] if floats else []
    pairs += [(None, change) for change in CHOICES] if others else []
    pairs += [("other", "other"), ("near", "permuted")] if floats and others else []
    for of_floats, of_others in pairs:
        yield [
            argument.changed(
                example, of_floats if inexact(argument.value) else of_others, generator
            )
            for argument in arguments
        ]


def differs(before: Tensor, after: Tensor) -> Tensor:
    """Where two results differ by more than rounding, shape of ``before``.

    Where the second has no such element, they differ; a sign of zero counts, and so does NaN.
    """
    if before.dim() != after.dim() or before.dtype != after.dtype:
        return torch.ones(before.shape, dtype=torch.bool)
    common = tuple(slice(min(a, b)) for a, b in zip(before.shape, after.shape, strict=True))
    found = torch.ones(before.shape, dtype=torch.bool)
    found[common] = _apart(before[common], after[common])
    return found


def _apart(before: Tensor, after: Tensor) -> Tensor:
    if before.is_complex():
        parts = _apart(torch.view_as_real(before), torch.view_as_real(after))
        return parts.any(-1)
    if not before.is_floating_point():
        return before != after
    a, b = before.double(), after.double()
    near = (a - b).abs() <= ROUNDING * torch.maximum(a.abs(), b.abs())
    same = (a == b) & ((a != 0) | (a.signbit() == b.signbit()))
    return ~(same | (near & (a != 0)) | (a.isnan() & b.isnan()))


def unsound(found: Tensor, moved: Tensor, examples: Sequence[int]) -> Tensor:
    """Elements that an example moved although a map names another owner or none.

    Args:
        found: owners by the map, shape of the result.
        moved: shape (examples, *shape of the result).
        examples: their numbers.

    Returns:
        True where the map is wrong, shape of the result.
    """
    numbers = torch.tensor(list(examples)).view(-1, *[1] * found.dim())
    return ((found > -2) & moved & (found != numbers)).any(0)
