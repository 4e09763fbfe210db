"""Calls of the operators of torch's database, with owners for what they are called with."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from tests.helpers.dependence import SHARED, Owned, Program, reset, tensors

# Numbers that end the process in torch 2.13.
_FAR = ("large", "nan")
AVOID = {
    "nn.functional.grid_sample": _FAR,
    "grid_sampler_2d": _FAR,
    "grid_sampler_3d": _FAR,
}
# Operators that other whole numbers let write where they must not.
CRASHING = {"_segment_reduce.lengths", "_segment_reduce.offsets"}
OWNERS = 3  # examples, where owners are drawn or rows counted
MOST_SAMPLES = 300  # of an operator: some have tens of thousands
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator called in one way, with owners for every tensor that it is given.

    Attributes:
        name: the operator, the number of its sample, the form of the call and of the owners.
        form: the operator and how it is called.
        program: calls it.
        arguments: tensors among what it is called with.
        leaves: numbers of the arguments that gradients may be asked for by.
        avoid: changes of floats that end the process.
    """

    name: str
    form: str
    program: Program
    arguments: list[Owned]
    leaves: tuple[int, ...]
    avoid: tuple[str, ...]


def dtype_of(op: Any) -> torch.dtype:
    """The first of ``DTYPES`` that an operator takes on a CPU."""
    supported = op.supported_dtypes("cpu")
    return next(dtype for dtype in DTYPES if dtype in supported)


def generator_of(name: str) -> np.random.Generator:
    """Random numbers that follow from a name alone."""
    return np.random.default_rng([20_271_145, zlib.crc32(name.encode())])


def calls(op: Any, samples: int | None) -> Iterator[Call]:
    """Calls of an operator: of all its samples, or of so many at random.

    Each sample is called as a function, in place and with ``out=`` where the operator can be, once
    with rows as owners where its first tensor has two or more, and once with owners drawn for
    every element.
    """
    rng = generator_of(op.full_name)
    reset(int(rng.integers(2**31)))
    dtype = dtype_of(op)
    differentiable = op.supports_autograd and dtype in (torch.float64, torch.complex128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(
            itertools.islice(
                op.sample_inputs("cpu", dtype, requires_grad=differentiable), MOST_SAMPLES
            )
        )
    for number in _chosen(found, samples, rng):
        sample = found[number]
        for form, function in _forms(op, sample):
            values, leaves, program = _program(sample, function)
            if form == "out" or (form == "in place" and not op.supports_inplace_autograd):
                leaves = ()
            for way, arguments in _owned(values, rng):
                name = f"{op.full_name}, sample {number}, {form}, {way}"
                label, avoid = f"{op.full_name}, {form}", AVOID.get(op.full_name, ())
                yield Call(name, label, program, arguments, leaves, avoid)


def _chosen(found: list[Any], samples: int | None, rng: np.random.Generator) -> list[int]:
    """Of so many samples, those with several rows first."""
    if samples is None or len(found) <= samples:
        return list(range(len(found)))
    several = [_rows(tensors((s.input, s.args, s.kwargs))) >= 2 for s in found]
    order = sorted(rng.permutation(len(found)).tolist(), key=lambda k: not several[k])
    return sorted(order[:samples])


def _rows(values: Sequence[Tensor]) -> int:
    """Of the first tensor, if it has numbers and dimensions."""
    return len(values[0]) if values and values[0].dim() and values[0].numel() else 0


def _forms(op: Any, sample: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op.op
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in place", lambda x, *args, **kwargs: _in_place(op.inplace_variant, x, args, kwargs)
    if op.supports_out:
        yield "out", lambda *args, **kwargs: _with_out(op.op, args, kwargs)


def _in_place(function: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
    written = x.clone() if isinstance(x, Tensor) else [each.clone() for each in x]
    function(written, *args, **kwargs)
    return written


def _with_out(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Results written over what belongs to an example."""
    with torch.no_grad():
        results = function(*args, **kwargs)
        first = next((x for x in tensors([args, kwargs]) if x.numel()), torch.zeros(1))
        old = first.reshape(-1)[0].isnan()
        over = _pytree.tree_map_only(
            Tensor, lambda result: old.to(result.dtype).expand(result.shape).clone(), results
        )
        function(*args, **kwargs, out=over)
    return over


def _program(
    sample: Any, function: Callable[..., Any]
) -> tuple[list[Tensor], tuple[int, ...], Program]:
    """Tensors among what a sample has, each once, which take gradients, and a program of them."""
    leaves, spec = _pytree.tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    given: dict[int, int] = {}
    values: list[Tensor] = []
    trained: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in given:
            given[id(leaf)] = len(values)
            trained += [len(values)] if leaf.requires_grad else []
            values.append(leaf.detach().clone())

    def program(*own: Tensor) -> Any:
        filled = [own[given[id(leaf)]] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first, args, kwargs = _pytree.tree_unflatten(filled, spec)
        return function(first, *args, **kwargs)

    return values, tuple(trained), program


def _owned(values: Sequence[Tensor], rng: np.random.Generator) -> Iterator[tuple[str, list[Owned]]]:
    """By rows of the first tensor, which belong to an example together, and at random."""
    length = _rows(values)
    if length >= 2:
        yield "rows", [_by_rows(value, length) for value in values]
    drawn = [Owned(v, torch.as_tensor(rng.integers(SHARED, OWNERS, v.shape))) for v in values]
    largest = max(drawn, key=lambda argument: argument.owners.numel(), default=None)
    if largest is not None and largest.owners.numel():
        largest.owners.view(-1)[0] = 0
        yield "drawn", drawn


def _by_rows(value: Tensor, length: int) -> Owned:
    if value.dim() and len(value) == length:
        rows = Owned.rows(value)
        return Owned(value, rows.owners % OWNERS)
    return Owned.shared(value)
