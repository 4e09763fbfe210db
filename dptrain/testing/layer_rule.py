"""Checks a layer's rule against one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.base import in_full_float32
from dptrain.clipping.bookkeeping import LayerRule, norms_of_sum
from dptrain.clipping.bookkeeping.rules import owned, register_imported, rule_of, without_rule
from dptrain.clipping.bookkeeping.uses import Use
from dptrain.testing.layer_uses import reported_uses, tensors_of
from dptrain.testing.norms_of_releases import check_norms_of_releases
from dptrain.testing.requiring import require

# The norms of a use may be rounded up, by this much of what they are made of.
_UP = 1e-6


@in_full_float32
def check_layer_rule(
    layer: nn.Module,
    inputs: torch.Tensor | Sequence[Any],
    *,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Compare what a layer's rule says with autograd on one example at a time, in float64.

    Per-example gradients, their norms, weighted sums and what is left when rows are taken out have
    to agree for random gradients of the output, one of them zero and one not a number; once with
    all parameters that are trainable, and once with each of them alone.

    Example:
        >>> check_layer_rule(torch.nn.Linear(3, 2), torch.randn(4, 7, 3))

    Args:
        layer: of a type that has a rule; copied. Without randomness: ``eval()``, or dropout 0.
        inputs: what it is called with, or a tuple of that: tensors with one row per example, three
            rows at least; floating-point ones are converted to float64.
        tolerance: relative to the length of each example's gradient of all parameters.
        seed: of the gradients of the output.

    Raises:
        AssertionError: saying what differs, for which parameter, and in which rows.
        ValueError: if there is nothing to check: no rule, too few rows, a random layer.
    """
    register_imported()
    layer, values, rule = _prepared(layer, inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = tensors_of(layer(*values))
        directions = [torch.randn_like(output) for output in outputs]
    rows = len(directions[0])
    for direction in directions:
        direction[0] = 0.0  # an example that has no gradient
    for output, again in zip(outputs, tensors_of(layer(*values)), strict=True):
        if not torch.equal(output, again):
            raise ValueError("the layer is random: use layer.eval(), or set its dropout to 0")

    whole = _loop(layer, rule, values, directions, outputs)
    lengths = torch.cat([g.flatten(1) for g in whole.values()], dim=1).norm(dim=1)
    scale = lengths.clamp(min=float(lengths.max()) * 1e-6)
    trained = list(owned(layer, rule).items())
    for some in [trained, *([one] for one in trained if len(trained) > 1)]:
        for _, p in trained:
            p.requires_grad_(any(p is other for _, other in some))
        names = list(owned(layer, rule))
        wanted = {name: whole[name] for name in names}
        found = _by_rule(layer, rule, values, directions)
        _compare(found, wanted, scale, tolerance)
        broken = [direction.clone() for direction in directions]
        for direction in broken:
            direction[rows - 1] = torch.nan
        _compare_others(_by_rule(layer, rule, values, broken), wanted, scale, tolerance)
    for _, p in trained:
        p.requires_grad_(True)
    check_norms_of_releases(layer, inputs, seed=seed)


def _prepared(layer: nn.Module, inputs: Any) -> tuple[nn.Module, list[Any], LayerRule]:
    """A copy of the layer in float64, the inputs as a list, the rule.

    Raises:
        ValueError: if one of them cannot be checked.
    """
    rule = rule_of(layer)
    if rule is None:
        raise ValueError(f"{without_rule(layer)}: register one with dptrain.register_layer()")
    if (why := rule.refusal(layer)) is not None:
        raise ValueError(f"the rule refuses this layer: {why}")
    layer = copy.deepcopy(layer).double()
    if not owned(layer, rule):
        raise ValueError(f"this {type(layer).__name__} has no trainable parameter of its own")
    values = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for k, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            values[k] = value.detach().double().requires_grad_()
    found = {len(value) for value in values if isinstance(value, torch.Tensor) and value.dim()}
    if len(found) != 1 or found.pop() < 3:
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in values]
        raise ValueError(
            f"inputs={shapes}: all tensors must have the same number of rows, at least 3"
        )
    return layer, values, rule


def _loop(
    layer: nn.Module,
    rule: LayerRule,
    values: list[Any],
    directions: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Gradients of shape (rows, *p.shape), each row alone in its batch."""
    parameters = owned(layer, rule)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    for i in range(len(directions[0])):
        one = [v[i : i + 1] if isinstance(v, torch.Tensor) and v.dim() else v for v in values]
        parts = tensors_of(layer(*one))
        for part, output in zip(parts, outputs, strict=True):
            require(
                torch.allclose(part[0], output[i], rtol=1e-9, atol=1e-9),
                f"the layer mixes the rows of a batch: row {i} has another output when it is alone",
            )
        loss = sum((part * d[i : i + 1]).sum() for part, d in zip(parts, directions, strict=True))
        assert isinstance(loss, torch.Tensor)
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            found[name].append(gradient)
    return {name: torch.stack(rows) for name, rows in found.items()}


def _by_rule(
    layer: nn.Module, rule: LayerRule, values: list[Any], directions: list[torch.Tensor]
) -> dict[str, list[Use]]:
    """The uses of every trainable parameter that the rule reports.

    Raises:
        AssertionError: if it raises, or if the layer's output or its input's gradient is another.
    """
    leaves = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    own = tensors_of(layer(*values))
    expected = _input_gradients(own, leaves, directions)
    try:
        outputs, uses = reported_uses(layer, rule, values, directions)
        for output, right in zip(outputs, own, strict=True):
            require(
                torch.allclose(output, right, rtol=1e-9, atol=1e-9),
                "the rule's forward() has another output than the layer",
            )
    except RuntimeError as error:
        raise AssertionError(f"the rule fails: {error}") from error
    finally:
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    for k, (gradient, right) in enumerate(zip(found, expected, strict=True)):
        if gradient is None:
            raise AssertionError(f"no gradient reaches input {k}")
        require(
            torch.allclose(gradient, right, rtol=1e-8, atol=1e-8, equal_nan=True),
            f"the gradient of input {k} is another than the layer's",
        )
    for name, p in owned(layer, rule).items():
        reached, p.grad = p.grad, None
        require(
            reached is None,
            f"autograd reaches {name!r} past the rule: forward() must read it from the layer",
        )
    return uses


def _input_gradients(
    outputs: list[torch.Tensor], leaves: list[torch.Tensor], directions: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    if not leaves:
        return []
    return torch.autograd.grad(
        outputs, leaves, directions, allow_unused=True, materialize_grads=True
    )


def _compare(
    found: dict[str, list[Use]],
    wanted: dict[str, torch.Tensor],
    scale: torch.Tensor,
    tolerance: float,
) -> None:
    """Per-example gradients, norms, weighted sums, and those of some of the rows."""
    rows = len(scale)
    for name, right in wanted.items():
        uses = found[name]
        require(uses, f"the rule gives no use of {name!r}")
        for use in uses:
            has, needs = (use.rows, *use.shape), tuple(right.shape)
            require(has == needs, f"{name!r}: gradients of shape {has}, expected {needs}")
        for start, stop in ((0, rows), (1, rows - 1)):
            total = _sum(use.per_example(start, stop) for use in uses)
            _same(name, "gradient", total, right[start:stop], scale[start:stop], tolerance)
        _check_norms(name, norms_of_sum(list(uses)), right, scale, tolerance)
        factors = torch.linspace(0, 1, rows, dtype=torch.float64, device=right.device).square()
        weighted = _sum(use.weighted_sum(factors) for use in uses).view(right.shape[1:])
        off = (weighted - torch.einsum("i,i...->...", factors, right)).norm()
        require(
            off <= tolerance * scale.sum(), f"{name!r}: the weighted sum is off by {float(off):.3g}"
        )
        index = torch.arange(rows - 1, 0, -2, device=right.device)
        few = _sum(use.select(index).per_example(0, len(index)) for use in uses)
        _same(name, "gradient of a selected row", few, right[index], scale[index], tolerance)


def _compare_others(
    found: dict[str, list[Use]],
    wanted: dict[str, torch.Tensor],
    scale: torch.Tensor,
    tolerance: float,
) -> None:
    """A gradient that is not a number, in the last row, is that row's alone."""
    for name, right in wanted.items():
        total = _sum(use.per_example(0, len(scale)) for use in found[name])
        norms = norms_of_sum(list(found[name]))
        what = "gradient beside a row that is not a number"
        _same(name, what, total[:-1], right[:-1], scale[:-1], tolerance)
        _check_norms(name, norms[:-1], right[:-1], scale[:-1], tolerance)


def _check_norms(
    name: str,
    norms: torch.Tensor,
    right: torch.Tensor,
    scale: torch.Tensor,
    tolerance: float,
) -> None:
    exact = right.flatten(1).norm(dim=1)
    require(norms.shape == exact.shape, f"{name!r}: norms of shape {tuple(norms.shape)}")
    good = (norms >= exact - tolerance * scale) & (norms <= exact + max(_UP, tolerance) * scale)
    bad = (~good).nonzero()[:, 0].tolist()
    require(
        not bad, f"{name!r}: norms {norms[bad].tolist()} of rows {bad}, not {exact[bad].tolist()}"
    )


def _same(
    name: str,
    what: str,
    found: torch.Tensor,
    right: torch.Tensor,
    scale: torch.Tensor,
    tolerance: float,
) -> None:
    off = (found.reshape(right.shape) - right).flatten(1).norm(dim=1) / scale
    bad = (~(off <= tolerance)).nonzero()[:, 0].tolist()
    require(
        not bad, f"{name!r}: the {what} is off by {off[bad].tolist()} of its length, rows {bad}"
    )


def _sum(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total
