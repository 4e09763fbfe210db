"""Rules of layers on a GPU: against a loop over the examples, and norms against releases."""

import math

import pytest
import torch
from torch import nn

from dptrain.testing import check_layer_rule, check_norms_of_releases
from tests.clipping.bookkeeping.rules.test_rules_norms_of_releases import CASES
from tests.clipping.test_clipping_released_norms import LAYERS
from tests.cuda.runs import clipped, loop, module_on, started

UNIT = 2.0**-24
MODES = ["bookkeeping", "hooks", "functorch"]


def moved(values, device):
    return tuple(v.to(device) for v in values) if isinstance(values, tuple) else values.to(device)


def layer_on(name, device):
    build, inputs = CASES[name]
    torch.manual_seed(0)
    layer = build()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer.to(device), moved(inputs, device)


# Of GRUs and RNNs the second output has its rows in the second dimension.
ROWS_FIRST = [n for n, (build, _) in CASES.items() if not isinstance(build(), nn.GRU | nn.RNN)]


@pytest.mark.parametrize("name", ROWS_FIRST)
def test_a_rule_is_the_loop_over_the_examples(name, device):
    """In float64, as on the CPU."""
    layer, inputs = layer_on(name, device)
    check_layer_rule(layer, inputs)


@pytest.mark.parametrize("name", CASES)
def test_norms_are_of_what_is_released(name, device):
    """In float32 and half precision, on inputs that make it hard."""
    layer, inputs = layer_on(name, device)
    check_norms_of_releases(layer, inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_clipped_sum_is_the_loop_over_the_examples(name, mode, device):
    """Through the engine, in float64: to 1e-9 of the lengths that are added up."""
    build, shape, _ = LAYERS[name]
    module = module_on(build, device).double()
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(3)).double()
    rows = loop(module, x.to(device))
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    private = started(module, x, mode=mode, max_grad_norm=bound)
    found = clipped(private, x.to(device))
    factors = (bound / (norms + 1e-6)).clamp(max=1.0)
    torch.testing.assert_close(private.last_norms.to(norms), norms, rtol=1e-9, atol=1e-12)
    # 1e-6 of a norm is what the stability constant of a mode may differ by.
    torch.testing.assert_close(found, factors @ rows, rtol=0, atol=3e-6 * bound)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("allowed", ["exact", "TensorFloat32"])
@pytest.mark.parametrize("precision", ["float32", "autocast to bfloat16", "bfloat16", "float16"])
def test_what_is_released_is_what_norms_are_of(precision, allowed, mode, device):
    """One example's release is no longer than its norm says, however torch may multiply.

    Rounding in the forward and backward pass is the model's; the sum, of any 36 terms, is ours, and
    off by no more than ρ + 39 √u of a norm (docs/theory/clipping.md#thm-released-norms).
    """
    if allowed == "TensorFloat32":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    for name, (build, shape, _) in LAYERS.items():
        x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3))
        module = module_on(build, device).to(half or torch.float32)
        private = started(module, x.to(half or torch.float32), mode=mode, max_grad_norm=1.0)
        clipper = private.optimizer.clipper
        for row in range(3):
            with torch.autocast(device, torch.bfloat16, enabled="autocast" in precision):
                out = private.module(x.to(device, half or torch.float32))
            out.float().square().sum().backward()
            only = (torch.arange(3) == row).float()
            for bound in (1e30, 0.5):
                if bound == 0.5:
                    with torch.autocast(device, torch.bfloat16, enabled="autocast" in precision):
                        out = private.module(x.to(device, half or torch.float32))
                    out.float().square().sum().backward()
                sums = clipper.clipped_sum(max_grad_norm=bound, weights=only)
                length = float(torch.cat([s.flatten() for s in sums]).double().norm())
                limit = min(float(clipper.norms[row]), bound)
                assert math.isfinite(length), name
                assert length <= limit * (1 + 1e-5 + 39 * math.sqrt(UNIT)), name
