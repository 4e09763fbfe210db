"""Comparison of the sum of a mode's gradients with those that autograd finds without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.base.precision import exact_products, in_full_float32
from dptrain.clipping.base.rows import HALF, summing_dtype
from dptrain.clipping.base.stand_in import untapped
from dptrain.clipping.probe.inputs import Rows, steps
from dptrain.clipping.probe.outputs import take_back, weigh
from dptrain.clipping.probe.passes import Passes
from dptrain.clipping.probe.witness import Witness

_SMALL = 2**16  # numbers of a parameter that is moved by a rounding error
_MEASURED = 32  # rounding errors that were measured may be so many times as large elsewhere
_SHAKEN = 0.25  # the same, in those terms, of what comes of roundings of the inputs
_UNITS = 256  # of the examples' lengths: what sums in other orders may be off by
_HALF_FACTORS = (8, 8)  # the same where numbers are rounded to half precision


class Sums(Witness):
    """Adds up the examples' gradients that layers report, each example's with a factor.

    Args:
        rows: that the module is fed.
        factors: shape (rows,).

    Attributes:
        half: a half precision that some of them were computed in.
        sums: Σ_i f_i g_i by the parameters, of examples whose factor is not 0.
        lengths: Σ_i f_i ‖g_i‖ by the parameters, over all uses.
        replayed: whether a layer was run again for its gradients.
    """

    def __init__(self, rows: int, factors: torch.Tensor) -> None:
        super().__init__(rows)
        self._factors = factors
        self.half: torch.dtype | None = None
        self._counted = factors.nonzero()[:, 0]
        self.replayed = False
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.lengths: dict[nn.Parameter, float] = {}

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Uses are made of every call; how precise it is is noted."""
        kinds = {x.dtype for x in (gradient, *inputs) if isinstance(x, torch.Tensor)}
        self.half = self.half or next((kind for kind in kinds if kind in HALF), None)
        return False

    def replays(self, costs: Any) -> None:
        """Note that a layer was run again."""
        self.replayed = True

    @in_full_float32
    def record(
        self, uses: Mapping[nn.Parameter, Any], since: Any, doubt: str | None = None
    ) -> None:
        """Add up the uses."""
        for p, use in uses.items():
            use = use.compact()
            factors = self._factors.to(p.device, summing_dtype(p))
            if len(self._counted) < len(factors):  # 0 · NaN is NaN
                index = self._counted.to(p.device)
                use, factors = use.select(index), factors[index]
            length = float((use.norms() * factors).sum())
            total = use.weighted_sum(factors).view_as(p)
            self.lengths[p] = self.lengths.get(p, 0.0) + length
            self.sums[p] = total if p not in self.sums else self.sums[p] + total


class Confirmation:
    """Compares the two on a few rows, for a loss that treats every number of the output by itself.

    Every second example counts twice, so that it shows if gradients are another example's. What
    both may differ by is measured: roundings come out otherwise when parameters and loss are moved
    by units in the last place, and so do gradients of which rounding errors are all that is left
    (docs/theory/limits.md#thm-confirmed).

    Attributes:
        replayed: whether layers were run again for the gradients that were compared.
        plainly: whether autograd is to keep the tensors that it saves as they are.
    """

    def __init__(self, passes: Passes, trained: Mapping[str, nn.Parameter]) -> None:
        self.passes, self.module = passes, passes.module
        self._trained = trained
        self._half: torch.dtype | None = None  # that it computes in
        self._by_rows = True  # whether every output has a row for each
        self.replayed = self.plainly = False

    def disagreement(self, rows: Rows) -> tuple[str, bool] | None:
        """The parameter that is off by most, beyond rounding, and whether no use of it is known."""
        parameters = {n: p for n, p in self._trained.items() if p.requires_grad}
        self.replayed = False
        with exact_products():
            wanted = self._by_autograd(rows, parameters)
            found = self._reported(rows, self._factors(rows.rows))
            self._half, self.replayed = found.half, found.replayed
        noise = dict.fromkeys(parameters, 0.0)
        off = self._beyond(wanted, found, noise)
        if off:
            with exact_products():
                again = self._by_autograd(rows, parameters, moved=True)
            for n in parameters:
                noise[n] = _length(wanted[n], again[n])
            again.clear()
            off = self._beyond(wanted, found, noise)
        if off:
            # Of what is constant but for rounding, a norm makes numbers that are nothing but that.
            with exact_products():
                shaken = self._by_autograd(rows.moved(self._unit), parameters)
            for n in parameters:
                noise[n] += _SHAKEN * _length(wanted[n], shaken[n])
            off = self._beyond(wanted, found, noise)
        if not off:
            return None
        name, (_, unseen) = max(off.items(), key=lambda item: item[1][0])
        return name, unseen

    def _beyond(
        self, wanted: Mapping[str, torch.Tensor | None], found: Sums, noise: Mapping[str, float]
    ) -> dict[str, tuple[float, bool]]:
        """By parameter: off by so many limits, and whether unseen."""
        off: dict[str, tuple[float, bool]] = {}
        whole = sum(_length(a) ** 2 for a in wanted.values()) ** 0.5
        for n in wanted:
            p = self._trained[n]
            difference, length = _length(found.sums.get(p), wanted[n]), _length(wanted[n])
            limit = self._limit(p, noise[n], max(length, found.lengths.get(p, 0.0)), whole)
            # Values that are no numbers are not compared: the run itself leaves such examples out.
            if difference > limit:
                off[n] = (difference / limit, p not in found.sums)
        return off

    def moved_others(self, base: Rows, changed: Rows, own: range) -> str | None:
        """The parameter of which the others' gradients moved when one example was changed.

        What a layer that is run again takes from elsewhere (a number, an attribute) moves its
        gradients, and maybe nothing that the layers are given.

        Args:
            own: rows of the example that is changed.
        """
        factors = 1.0 + torch.arange(base.rows) % 2
        factors[own.start : own.stop] = 0
        with exact_products():
            before = self._reported(base, factors)
            after = self._reported(changed, factors)
        worst: tuple[float, str | None] = (1.0, None)
        for n, p in self.module.named_parameters():
            off = _length(after.sums.get(p), before.sums.get(p))
            length = max(before.lengths.get(p, 0.0), after.lengths.get(p, 0.0))
            worst = max(worst, (off / max(1e-30, self._unit(p) ** 0.5 * length), n), key=_first)
        return worst[1]

    def _reported(self, rows: Rows, factors: torch.Tensor) -> Sums:
        found = Sums(rows.rows, factors)
        with self.passes.within(found), torch.enable_grad():
            self._backward(rows)  # every example once: the factors are those of the sums
        return found

    def _by_autograd(
        self, rows: Rows, parameters: Mapping[str, nn.Parameter], *, moved: bool = False
    ) -> dict[str, torch.Tensor | None]:
        """Gradients as of training without privacy; ``moved``: by a few roundings."""
        all_of_them = list(self.module.parameters())  # frozen ones are computed with as well
        context = _moved(all_of_them, self._unit) if moved else contextlib.nullcontext()
        with (
            self.passes.within(Witness(rows.rows)),
            torch.enable_grad(),
            untapped(),
            _without_hooks(parameters.values()),
            context,
        ):
            self._backward(rows, by_factors=True, moved=moved)
            return {n: p.grad for n, p in parameters.items()}

    def _backward(self, rows: Rows, *, by_factors: bool = False, moved: bool = False) -> None:
        """Σ_i f_i (Σ w·y - cos y) over the numbers y of row i of all outputs, taken back."""
        as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with as_it_is if self.plainly else contextlib.nullcontext():
            outputs = list(self.passes.outputs.of(rows.call(self.module), rows.rows))
        factors: torch.Tensor | None = None
        if by_factors:
            self._by_rows = all(y.dim() > 0 and len(y) == rows.rows for y in outputs)
            factors = self._factors(rows.rows) if self._by_rows else None
        generator = torch.Generator().manual_seed(0)
        gradients = []
        for y in outputs:
            w = torch.randn(y.shape, generator=generator)
            w = w.to(device=y.device, dtype=torch.promote_types(y.dtype, torch.float32))
            if moved:
                w = w * (1 + self._unit(y) * steps(y.shape, generator).to(w))
            found = y.isfinite().to(y.dtype) if y.numel() == 1 else weigh(y, w)
            if factors is not None:
                found.mul_(factors.to(found).view(-1, *[1] * (y.dim() - 1)))
            gradients.append(found)
        take_back(outputs, gradients)

    def _factors(self, rows: int) -> torch.Tensor:
        """Factors of the rows; powers of two, which change no digit."""
        if not self._by_rows:  # the module made one loss of all rows
            return torch.ones(rows)
        return 1.0 + torch.arange(rows) % 2

    def _limit(self, p: torch.Tensor, noise: float, length: float, whole: float) -> float:
        half = p.dtype in HALF or self._half is not None
        measured, units = _HALF_FACTORS if half else (_MEASURED, _UNITS)
        return measured * noise + self._unit(p) * (units * length + whole)

    def _unit(self, tensor: torch.Tensor) -> float:
        return unit(tensor, self._half)


def unit(tensor: torch.Tensor, half: torch.dtype | None = None) -> float:
    """One unit in the last place of a number near one, as it is computed with.

    That a module of float64 numbers rounds nothing to float32 on the way cannot be seen.

    Args:
        tensor: of a floating-point type.
        half: the half precision that is computed with, if that is known.
    """
    kind = half or tensor.dtype
    return float(torch.finfo(torch.float32 if kind == torch.float64 else kind).eps)


def _first(pair: tuple[float, str | None]) -> float:
    return pair[0]


def _length(a: torch.Tensor | None, b: torch.Tensor | None = None) -> float:
    """‖a - b‖₂, where nothing is zero."""
    if a is None or b is None:
        a, b = (b if a is None else a), None
    if a is None:
        return 0.0
    a = a.to_dense() if a.is_sparse else a
    if b is not None:
        b = b.to_dense() if b.is_sparse else b
        a = a.to(torch.promote_types(a.dtype, summing_dtype(b))) - b
    return float(torch.linalg.vector_norm(a.to(summing_dtype(a))))


@contextlib.contextmanager
def rounded_otherwise(module: nn.Module, rows: Rows) -> Iterator[Rows]:
    """The module and the rows off by a few units in the last place, as roundings are, meanwhile."""
    with _moved(list(module.parameters()), unit):
        yield rows.moved(unit)


@contextlib.contextmanager
def _moved(parameters: Any, by: Callable[[torch.Tensor], float]) -> Iterator[None]:
    """Small parameters off by a few units in the last place, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    before = [(p, p.data) for p in parameters if p.is_floating_point() and p.numel() <= _SMALL]
    try:
        for p, data in before:
            p.data = data * (1 + by(p) * steps(p.shape, generator).to(data))
        yield
    finally:
        for p, data in before:
            p.data = data


@contextlib.contextmanager
def _without_hooks(parameters: Any) -> Iterator[None]:
    """Context without the hooks that take a gradient as it comes."""
    kept = []
    for p in parameters:
        hooks = getattr(p, "_post_accumulate_grad_hooks", None)
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)
