"""One model through the public engine, against one example at a time by plain autograd."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.clipping.base.stand_in import StandIn
from dptrain.clipping.bookkeeping import LayerRule, LayerTap
from dptrain.clipping.bookkeeping.operations.followed import OperationsRule
from dptrain.clipping.bookkeeping.rules.generic import GenericRule
from dptrain.engine.private_training import PrivateTraining
from tests.coverage.case import ROWS, Case, Inputs
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    Reference,
    assert_norms,
    assert_sums,
    flat_factors,
    reference,
    row_losses,
)
from tests.helpers.refusals import refuses

WITHOUT = "a model without gradients shows nothing"
ROUNDED_UP = 1e-2  # most that a norm in float32 may be above the loop's, relative


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a model.

    Attributes:
        refusal: the message, or ``None`` where the model works.
        modes: kinds of layers that have parameters, by how their gradients are found.
        unfollowed: the first thing in a step that owner maps could not follow; ``None`` where they
            showed that the examples stay apart.
    """

    refusal: str | None
    modes: dict[str, list[str]]
    unfollowed: str | None = None


class _Called(nn.Module):
    """The model for the loop: called with tensors, which it takes by name; returns one."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.model, self.case = model, case

    def forward(self, *rows: Tensor) -> Tensor:
        fed = [torch.cat([x, x]) for x in rows] if self.case.twice else rows
        output = self.model(**dict(zip(self.case.inputs(), fed, strict=True)))
        return self.case.read(output)[: len(rows[0])]


def built(case: Case) -> nn.Module:
    """The model in training mode, its dropout off, and nothing in it zero."""
    torch.manual_seed(0)
    model = case.build().train()
    _freeze_statistics(model)
    for layer in model.modules():
        for chance in ("p", "drop_prob"):  # of nn.Dropout, of dropped paths
            if isinstance(getattr(layer, chance, None), float):
                setattr(layer, chance, 0.0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            inputs = max(1, p[0].numel() // 16) if p.dim() > 1 else 1
            p.add_(0.1 / inputs**0.5 * torch.randn(p.shape, generator=noise))
    return model


def _freeze_statistics(model: nn.Module) -> None:
    """Keep what the builder has frozen in eval mode, as a user does after ``train()``."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            trained = [p for p in layer.parameters() if p.requires_grad]
            layer.train(bool(trained) or layer.weight is None)


def private_run(
    case: Case, model: nn.Module, tensors: tuple[Tensor, ...], *, lr: float = 0.0
) -> PrivateTraining:
    """A run in bookkeeping mode over the rows at hand."""
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr),
        data=TensorDataset(*tensors),
        scheme=Poisson(probability=1.0, dataset_size=ROWS, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(mode="bookkeeping", loss="sum"),
    )


def _tensors(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    inputs: Inputs = case.inputs()
    cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs.values()]
    targets = torch.tensor([0.5, -3.0, 20.0], dtype=dtype)  # some are clipped, others are not
    return *cast, targets


def bounds(wanted: Reference) -> list[float]:
    """Bounds that clip no example, some, and all of them."""
    norms = wanted.norms
    return [2 * float(norms.max()), float(norms.median()), float(norms.min()) / 2]


def examine(case: Case, dtype: torch.dtype) -> Outcome:
    """Compare norms and clipped sums with the loop's.

    Raises:
        AssertionError: if one is wrong.
        Exception: that is no refusal.
    """
    model = built(case).to(dtype)
    tensors = _tensors(case, dtype)
    *inputs, targets = tensors
    alone = _Called(case, copy.deepcopy(model))
    try:
        private = private_run(case, model, tensors)
        wanted = reference(alone, tuple(inputs), targets, doubles=case.precise)
        assert bool((wanted.norms > 0).all()), WITHOUT
        found = _norms_and_sums(case, private, bounds(wanted))
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if not refuses(str(error), model):
            raise
        return Outcome(str(error), {})
    for bound, (norms, sums) in zip(bounds(wanted), found, strict=True):
        _assert_norms(norms, wanted, TOLERANCE[dtype])
        factors = flat_factors(norms, bound, torch.ones(ROWS))
        assert_sums(sums, wanted, factors, TOLERANCE[dtype])
    return Outcome(None, modes(model), _unfollowed(private))


def _unfollowed(private: PrivateTraining) -> str | None:
    findings = private._attached.owners.findings
    assert findings.shown or findings.tested
    return findings.why


def _assert_norms(found: Tensor, wanted: Reference, tolerance: float) -> None:
    """That norms are those of the loop, and nowhere too small.

    In float32 those of many products are rounded up on purpose, by up to 8·2⁻²⁴ (S/‖g‖)² relative,
    S the sum of the lengths of the products (docs/theory/clipping.md#thm-convolution-norms).
    """
    if tolerance < 1e-6:
        assert_norms(found, wanted, tolerance)
        return
    above = found - wanted.norms
    assert bool((above >= -wanted.slack(tolerance)).all()), (found, wanted.norms)
    most = wanted.slack(tolerance) + ROUNDED_UP * wanted.norms
    assert bool((above <= most).all()), (found, wanted.norms)


def _norms_and_sums(
    case: Case, private: PrivateTraining, limits: list[float]
) -> list[tuple[Tensor, list[Tensor | None]]]:
    """Of the first batch, for each bound by itself: norms, and clipped sums by parameter."""
    *rows, targets = next(iter(private.loader))
    inputs = dict(zip(case.inputs(), rows, strict=True))
    clipper, found = private.optimizer.clipper, []
    for number, bound in enumerate(limits):
        row_losses(case.read(private.module(**inputs)), targets).sum().backward()
        if not number:
            private._attached.owners.end()  # what follows are steps of the same batch
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=torch.ones(ROWS))
        found.append((clipper.norms, sums))
    return found


def modes(model: nn.Module) -> dict[str, list[str]]:
    """Kinds of layers of a model in a run, by the way to their own parameters' gradients.

    What a layer has in common with one within it, as heads of BERT have a bias, is that one's.
    """
    ways: dict[nn.Module, str] = {}
    for layer in model.modules():
        tap = vars(layer).get("forward")
        while isinstance(tap, StandIn) and not isinstance(tap, LayerTap):
            tap = tap.own
        if isinstance(tap, LayerTap):
            rule = tap.observe.rule
            ways |= {holder: _way(rule) for _, holder in rule.holders(layer)}
    found: dict[str, set[str]] = {}
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            found.setdefault("frozen", set()).add(type(layer).__name__)
        elif own and layer in ways:
            found.setdefault(ways[layer], set()).add(type(layer).__name__)
    return {way: sorted(kinds) for way, kinds in sorted(found.items())}


def _way(rule: LayerRule) -> str:
    if isinstance(rule, GenericRule):
        return "replayed"
    return "operations" if isinstance(rule, OperationsRule) else "rule"
