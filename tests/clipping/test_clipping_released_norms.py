"""Norms that the engine clips by are those of what it releases, in every mode and precision."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, PrivacyEngine
from dptrain.clipping.base.rows import row_norms_error
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.opacus import per_example
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train

ROWS = 3
UNIT = 2.0**-24  # of float32, which half precision is summed up in
ODD = 0.7234567

# The module, the shape of its input, and the most terms that an entry of a gradient has.
LAYERS = {
    "linear": (lambda: nn.Linear(40, 30), (40,), 1),
    "linear over positions": (lambda: nn.Linear(70, 50), (6, 70), 6),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6), 36),
    "convolution, few pixels": (lambda: nn.Conv2d(20, 24, 3, padding=1), (20, 3, 3), 9),
    "group norm": (lambda: nn.GroupNorm(4, 4), (4, 5, 5), 25),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6), 5),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4), 16),
    "a net": (lambda: small_net(), (1, 4, 4), 16),
}
INPUTS = {
    "as drawn": lambda x: x,
    "blank": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, ODD),
    "far away": lambda x: x + 1e3,
    "padded": lambda x: torch.where(torch.arange(x.shape[-1]) < 2, x, 0.0),
}
DIRECTIONS = {
    "drawn": lambda d: d,
    "cancelling": lambda d: d - d.mean(1, keepdim=True),
    "cancelling in the end": lambda d: d - d.mean(-1, keepdim=True),
    "alternating": lambda d: ODD * (1.0 - 2 * (torch.arange(d.shape[-1]) % 2)).expand_as(d),
}
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = ["float32", *HALF, *(f"autocast to {half}" for half in HALF)]


def started(module, x, mode, **more):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        data=TensorDataset(x),
        scheme=everything_every_step(ROWS, 1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(loss="sum", mode=mode, **more),
    )
    return private, next(iter(private.loader))[0]


def released_of(private, x, direction, row, bound, autocast):
    """The length of what one example adds where all others weigh nothing, and its norm."""
    clipper = private.optimizer.clipper
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        out = private.module(x)
    (out.float() * direction).sum().backward()
    weights = (torch.arange(ROWS) == row).float()
    sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights)
    assert {s.dtype for s in sums} == {torch.float32}
    return float(torch.cat([s.flatten() for s in sums]).double().norm()), float(clipper.norms[row])


@pytest.mark.sample(every=16)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_released_is_what_norms_are_of(name, precision, mode):
    """‖Σ‖ ≤ R (1 + ρ + (T + 3) √u); and in the modes that form gradients the norm is that of them.

    The bound is that of ``check_norms_of_releases``, ρ that of ``row_norms``.
    Without products nothing is rounded up, and nothing added up in another order.
    """
    build, shape, terms = LAYERS[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, *shape, generator=generator)
    for kind, change in INPUTS.items():
        torch.manual_seed(0)
        module, inputs = build(), change(x)
        if precision in HALF:
            module, inputs = module.to(HALF[precision]), inputs.to(HALF[precision])
        # There functorch's group norm in bfloat16 has gradients 300 times as long as autograd's.
        refused = mode == "functorch" and kind == "far away"
        private, inputs = started(module, inputs, mode, probe="off" if refused else "shapes")
        autocast = (
            HALF.get(precision.removeprefix("autocast to ")) if precision not in HALF else None
        )
        numbers = len(flat(module))
        rho = row_norms_error(numbers, torch.float32) + 24 * UNIT
        with torch.no_grad():
            out = module(inputs[:1]).shape[1:]
        drawn = torch.randn(ROWS, *out, generator=generator)
        for turn in DIRECTIONS.values():
            direction = turn(drawn)
            for row in range(ROWS):
                length, norm = released_of(private, inputs, direction, row, 1e30, autocast)
                assert math.isfinite(norm)
                summed = terms if mode == "bookkeeping" else -3
                off = rho + (summed + 3) * math.sqrt(UNIT)
                assert length <= norm * (1 + off) + 1e-15
                if mode != "bookkeeping":
                    assert norm <= length * (1 + rho) + 1e-15
                bound = 0.5 * norm
                if bound > 0:
                    length, _ = released_of(private, inputs, direction, row, bound, autocast)
                    assert length <= bound * (1 + off)


@pytest.mark.parametrize("allowed", ["medium", "high"])
def test_sums_are_not_rounded_more_than_norms(mode, allowed, monkeypatch):
    """Where the user lets torch multiply in bfloat16 or TensorFloat32, clipping does not."""
    kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    if not all(hasattr(kind, "fp32_precision") for kind in kinds):
        pytest.skip("this torch has other switches")
    seen, names = [], set()

    def looking(name):
        within = getattr(OuterProducts, name)

        def call(*args):
            names.add(name)
            seen.append([kind.fp32_precision for kind in kinds])
            return within(*args)

        return call

    def casting(p):
        seen.append([kind.fp32_precision for kind in kinds])
        return torch.float32

    for name in ("compact", "norms", "weighted_sum"):
        monkeypatch.setattr(OuterProducts, name, looking(name))
    monkeypatch.setattr(per_example, "summing_dtype", casting)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(allowed)
    try:
        wanted = [kind.fp32_precision for kind in kinds]
        train(make(small_net(), images(), mode, scheme=everything_every_step(24, 1)))
        assert [kind.fp32_precision for kind in kinds] == wanted
        assert torch.get_float32_matmul_precision() == allowed
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen
    assert names == ({"compact", "norms", "weighted_sum"} if mode == "bookkeeping" else set())
    assert all(precision == ["ieee", "ieee"] for precision in seen)


@pytest.mark.parametrize("positions", [64, 512, 2048])
@pytest.mark.parametrize("apart", [0.0, *(10.0**-k for k in range(1, 7))])
def test_positions_that_nearly_cancel_hardly_exceed_the_bound(positions, apart):
    """Half of the positions undo the other half up to a relative ``apart``: the release of R = 1.

    docs/theory/clipping.md#thm-released-norms (b), with ρ of a rounded root and factor.
    """
    generator = torch.Generator().manual_seed(positions)
    left = torch.full((1, positions, 24), 0.1234567)
    left *= 1 + apart * torch.randn(left.shape, generator=generator)
    left[:, positions // 2 :] *= -1
    right = torch.full((1, positions, 20), 0.3456789)
    use = OuterProducts(left, right)
    released = float(use.weighted_sum(1.0 / use.norms()).double().norm())
    e = 0.26 * (positions + 3) * math.sqrt(UNIT)
    assert released <= (1 + 8 * UNIT) * math.sqrt(1 + e * e)
