"""What is summed is capped by a norm of itself, whatever user code does between the two.

No example moves the sum by more than R(1 + tiny): with weight 0 for all others, that is the length
of the sum. The first order of float32's rounding is what norms may be off by.
"""

import contextlib

import pytest
import torch
from torch import nn

from tests.clipping.test_clipping_released_norms import started
from tests.helpers.engine import small_net

ROWS = 3
TINY = 1e-3  # far below what any of the attacks gains, far above what rounding does


def embedded():
    return nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 2))


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0][:, -1]

    return Last()


class Scale(nn.Module):
    """Of bare parameters, which no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


NETS = {
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "wide linear over positions": (lambda: nn.Linear(600, 700), (3, 600)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    "wide convolution": (lambda: nn.Conv1d(300, 400, 3), (300, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6)),
    "bare parameter": (Scale, (6,)),
    "a net": (small_net, (1, 4, 4)),
}
BOOKKEPT = {"recurrent": (recurrent, (5, 4))}


def length_of(private, row, bound=1.0, **more):
    weights = (torch.arange(ROWS) == row).float()
    sums = private.optimizer.clipper.clipped_sum(max_grad_norm=bound, weights=weights, **more)
    return float(torch.cat([s.flatten() for s in sums if s is not None]).double().norm())


def passed(name, mode, *, scale=1.0, within=contextlib.nullcontext):
    """A run after a backward pass, and its batch."""
    build, shape = (NETS | BOOKKEPT)[name]
    torch.manual_seed(0)
    private, x = started(build(), torch.randn(ROWS, *shape), mode)
    with within():
        out = private.module(x)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        ((out * direction).sum() * scale).backward()
    return private, x


def by_numpy(x):
    x.numpy()[...] = 1e3


def by_data(x):
    x.data.mul_(1e3)


def by_another(x):
    x.data[:] = 1e3 * x.data.flip(0)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("write", [by_numpy, by_data, by_another])
@pytest.mark.parametrize("name", [*NETS, *BOOKKEPT])
def test_what_is_written_after_the_backward_pass_is_not_released(name, write, mode):
    """The sums are those of the numbers that norms were taken of, to the last digit."""
    if name in BOOKKEPT and mode != "bookkeeping":
        pytest.skip("Opacus has a layer of its own for it")
    if name == "bare parameter" and mode == "hooks":
        pytest.skip("Opacus leaves it out")
    for row in range(ROWS):
        private, x = passed(name, mode)
        untouched = length_of(private, row)
        private, x = passed(name, mode)
        write(x)
        length = length_of(private, row)
        assert length <= 1 + TINY
        assert length == pytest.approx(untouched, rel=1e-6)


def in_place(x):
    x.mul_(1e3)


@pytest.mark.parametrize("write", [by_numpy, by_data, by_another, in_place])
def test_gradients_may_be_written_into_too(write):
    """What autograd hands on is the very tensor that a bias has for its gradient."""
    for row in range(ROWS):
        torch.manual_seed(0)
        private, x = started(nn.Linear(6, 6), torch.randn(ROWS, 6), "bookkeeping")
        gradient = torch.randn(ROWS, 6)
        private.module(x).backward(gradient)
        write(gradient)
        assert length_of(private, row) <= 1 + TINY


def compressed(scale):
    """Saved tensors come back ``scale`` times as long, as where packing loses their digits."""
    return lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * scale, lambda t: t)


def to_eight_bits():
    def pack(t):
        return t.to(torch.float8_e4m3fn) if t.is_floating_point() else t

    def unpack(t):
        return t.float() if t.dtype == torch.float8_e4m3fn else t

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@pytest.mark.parametrize("within", [to_eight_bits, compressed(3.0)], ids=["8 bits", "longer"])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])  # torch.func takes no such hooks
@pytest.mark.parametrize("name", [name for name in NETS if name != "bare parameter"])
def test_tensors_that_are_saved_compressed_are_clipped_as_they_come_back(name, within, mode):
    for row in range(ROWS):
        private, _ = passed(name, mode, within=within)
        assert length_of(private, row) <= 1 + TINY


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 1e-12, 1e-20, 1e-25, 1e-29])
@pytest.mark.parametrize("name", [*NETS, *BOOKKEPT])
def test_a_tiny_loss_scale_does_not_hide_a_gradient(name, scale, mode):
    """The release is that of the loss as it is: nothing longer than R, and nothing lost."""
    if name in BOOKKEPT and mode != "bookkeeping":
        pytest.skip("Opacus has a layer of its own for it")
    if name == "bare parameter" and mode == "hooks":
        pytest.skip("Opacus leaves it out")
    private, _ = passed(name, mode)
    plain = [length_of(private, 0, 0.5)]
    private, _ = passed(name, mode, scale=scale)
    scaled = length_of(private, 0, 0.5, loss_scale=scale)
    assert scaled <= 0.5 * (1 + TINY)
    assert scaled == pytest.approx(plain[0], rel=1e-3)


@pytest.mark.parametrize("bound", [1e-12, 1e-16])
def test_a_tiny_bound_is_kept(bound, mode):
    """Gradients of 10¹⁵ times less than one, whose squares float32 does not have."""
    private, _ = passed("two layers", mode, scale=1e-20)
    assert length_of(private, 0, bound) <= bound * (1 + TINY)
    private, _ = passed("two layers", mode, scale=1e-20)
    assert length_of(private, 0, bound) <= bound * (1 + TINY)


def test_a_scale_that_leaves_no_digits_is_refused(mode):
    for scale, bound in ((1e-36, 1.0), (1.0, 1e-30), (1e-20, 1e-15)):
        private, _ = passed("linear", mode, scale=scale)
        with pytest.raises(RuntimeError, match="clipped accurately in float32"):
            length_of(private, 0, bound, loss_scale=scale)
