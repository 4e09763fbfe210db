"""Random layers and adversarial inputs in every mode: what one example releases, against R.

Without noise, and with a data set of one example, a step releases that example's clipped gradient.
Its norm is taken in float64 and must not be above R, whatever the layer, the input, the loss and
the mode. A layer or an input may be refused, in words of ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Identity, MatrixMechanism, Poisson, PrivacyEngine
from scripts.attack.harness import Finding, Part

MODES = ("bookkeeping", "hooks", "functorch")
# R, the norm, the factor, a product and what is stored: each off by 2^-24 of itself in float32.
TOLERANCE = 8 * 2.0**-24
_REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)

Made = tuple[nn.Module, tuple[int, ...], int]  # layer, shape of a row's input, size of its ids


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _linear(rng: np.random.Generator) -> Made:
    width, bias = int(rng.integers(1, 9)), bool(rng.random() < 0.7)
    between = tuple(int(rng.integers(1, 5)) for _ in range(int(rng.integers(0, 3))))
    return nn.Linear(width, int(rng.integers(1, 7)), bias=bias), (*between, width), 0


def _convolution(rng: np.random.Generator) -> Made:
    dims = int(rng.integers(1, 4))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    groups = int(_pick(rng, 1, 1, 2))
    kernel = int(rng.integers(1, 4))
    layer = kind(
        2 * groups,
        int(rng.integers(1, 4)) * groups,
        kernel,
        stride=int(rng.integers(1, 3)),
        padding=int(rng.integers(0, 3)),
        dilation=int(rng.integers(1, 3)),
        groups=groups,
        bias=bool(rng.random() < 0.7),
        padding_mode=str(_pick(rng, "zeros", "zeros", "reflect", "circular", "replicate")),
    )
    return layer, (2 * groups, *[int(rng.integers(5, 9)) for _ in range(dims)]), 0


def _group_norm(rng: np.random.Generator) -> Made:
    groups = int(_pick(rng, 1, 2, 4))
    channels = groups * int(rng.integers(1, 4))
    side = tuple(int(rng.integers(1, 6)) for _ in range(int(rng.integers(0, 3))))
    if channels == groups and math.prod(side) == 1:  # torch wants two numbers in a group
        side = (2,)
    return nn.GroupNorm(groups, channels), (channels, *side), 0


def _layer_norm(rng: np.random.Generator) -> Made:
    shape = tuple(int(rng.integers(2, 6)) for _ in range(int(rng.integers(1, 4))))
    inner = int(rng.integers(1, len(shape) + 1))
    return nn.LayerNorm(shape[-inner:], eps=float(_pick(rng, 1e-5, 1e-12))), shape, 0


def _instance_norm(rng: np.random.Generator) -> Made:
    channels = int(rng.integers(1, 5))
    side = int(rng.integers(2, 6))
    return nn.InstanceNorm2d(channels, affine=True), (channels, side, side), 0


def _rms_norm(rng: np.random.Generator) -> Made:
    width = int(rng.integers(2, 8))
    return nn.RMSNorm(width), (int(rng.integers(1, 5)), width), 0


def _embedding(rng: np.random.Generator) -> Made:
    ids = int(rng.integers(2, 9))
    padding = int(rng.integers(0, ids)) if rng.random() < 0.5 else None
    layer = nn.Embedding(
        ids, int(rng.integers(1, 6)), padding_idx=padding, scale_grad_by_freq=rng.random() < 0.2
    )
    return layer, (int(rng.integers(1, 9)),), ids


def _embedding_bag(rng: np.random.Generator) -> Made:
    ids = int(rng.integers(2, 9))
    layer = nn.EmbeddingBag(ids, int(rng.integers(1, 6)), mode=str(_pick(rng, "sum", "mean")))
    return layer, (int(rng.integers(1, 9)),), ids


class _Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs without the state."""
        return self.layer(x)[0]


def _recurrent(rng: np.random.Generator) -> Made:
    kind = _pick(rng, nn.RNN, nn.GRU, nn.LSTM, DPRNN, DPGRU, DPLSTM)
    width, bidirectional = int(rng.integers(1, 5)), bool(rng.random() < 0.3)
    layer = kind(width, int(rng.integers(1, 5)), batch_first=True, bidirectional=bidirectional)
    return _Recurrent(layer), (int(rng.integers(1, 7)), width), 0


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence to itself."""
        return self.layer(x, x, x, need_weights=False)[0]


def _attention(rng: np.random.Generator) -> Made:
    heads = int(rng.integers(1, 3))
    width = heads * int(rng.integers(1, 4))
    return _SelfAttention(width, heads), (int(rng.integers(1, 6)), width), 0


class _Products(nn.Module):
    def __init__(self, width: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Bilinear(width, width, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Products of a row's numbers with each other."""
        return self.layer(x, x)


def _bilinear(rng: np.random.Generator) -> Made:
    width, outputs = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    shape = (width,) if rng.random() < 0.5 else (int(rng.integers(1, 6)), width)
    return _Products(width, outputs, bias=bool(rng.random() < 0.7)), shape, 0


class _Tied(nn.Module):
    """The same layer twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applied to its own output."""
        return self.layer(torch.tanh(self.layer(x)))


def _tied(rng: np.random.Generator) -> Made:
    width = int(rng.integers(1, 6))
    return _Tied(width), (width,), 0


LAYERS: tuple[Callable[[np.random.Generator], Made], ...] = (
    _linear,
    _convolution,
    _group_norm,
    _layer_norm,
    _instance_norm,
    _rms_norm,
    _embedding,
    _embedding_bag,
    _recurrent,
    _attention,
    _tied,
    _bilinear,
)


class Model(nn.Module):
    """One layer or several, and a loss of each row that pulls as hard as it is told."""

    def __init__(self, layer: nn.Module, pull: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("pull", pull)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of every row, shape (rows,)."""
        out = self.layer(x).flatten(1)
        return (out * self.pull.to(out.dtype)).sum(1)


def _inputs(rng: np.random.Generator, shape: tuple[int, ...], ids: int) -> torch.Tensor:
    """One row that makes it hard: blank, constant, far off, padded, tiny or huge."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    if ids:
        x = torch.randint(0, ids, shape, generator=generator)
        return torch.full_like(x, int(rng.integers(ids))) if rng.random() < 0.4 else x
    x = torch.randn(shape, generator=generator)
    kind = _pick(
        rng, "random", "blank", "constant", "offset", "padded", "tiny", "huge", "equal rows"
    )
    if kind == "padded":
        x.view(-1)[x.numel() // 2 :] = 0.0
    elif kind == "equal rows":
        x = x[:1].expand(shape).clone()
    changes = {"blank": 0.0 * x, "constant": torch.full_like(x, 0.7234567), "offset": x + 1e4}
    return changes.get(kind, x * {"tiny": 1e-20, "huge": 1e8}.get(kind, 1.0))


def _pull(rng: np.random.Generator, size: int) -> torch.Tensor:
    """Gradients of the layer's output: random, of sum zero, alternating, and of many sizes."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    pull = torch.randn(size, generator=generator)
    kind = _pick(rng, "random", "sum zero", "alternating", "one")
    if kind == "sum zero":
        pull = pull - pull.mean()
    elif kind == "alternating":
        pull = 0.7234567 * (1.0 - 2.0 * (torch.arange(size) % 2))
    elif kind == "one":
        pull = torch.zeros(size).index_fill_(0, torch.tensor([int(rng.integers(size))]), 1.0)
    return pull * float(10.0 ** rng.uniform(-4, 6))


def released(model: nn.Module, x: torch.Tensor, mode: str, bound: float) -> float:
    """Norm of what a step without noise releases of a data set of this one row, in float64."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    mechanism = MatrixMechanism(
        scheme=Poisson(probability=1.0, dataset_size=1, steps=1),
        strategy=Identity(),
        noise_multiplier=0.0,
    )
    module, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data=TensorDataset(x[None]),
        mechanism=mechanism,
        max_grad_norm=bound,
        seed=1,
        gradients=Gradients(loss="sum", mode=mode),
    )
    for (row,) in loader:
        optimizer.zero_grad()
        module(row).sum().backward()
        optimizer.step()
    found = torch.cat([p.grad.detach().double().flatten() for p in trained if p.grad is not None])
    return float(found.norm())


def make(seed: int) -> tuple[Callable[[], nn.Module], torch.Tensor, float, str]:
    """A model, anew at every call; its input, R, and what to call it."""
    rng = np.random.default_rng([20_271_002, seed])
    torch.manual_seed(seed)
    layer, shape, ids = LAYERS[seed % len(LAYERS)](rng)
    x = _inputs(rng, shape, ids)
    if rng.random() < 0.3 and not isinstance(layer, _Recurrent | _SelfAttention):
        layer = nn.Sequential(layer, nn.Tanh())
    with torch.no_grad():
        size = layer(x[None]).numel()
        for p in layer.parameters():
            p.mul_(float(10.0 ** rng.uniform(-2, 2)))
    pull, state = _pull(rng, size), layer.state_dict()

    def build() -> nn.Module:
        layer.load_state_dict(state)
        return Model(layer, pull)

    bound = float(10.0 ** rng.uniform(-3, 2))
    shown = f"{' '.join(str(layer).split())}, input {tuple(x.shape)}, R={bound:.6g}"
    return build, x, bound, shown


def case(seed: int) -> int:
    """One model in every mode; how many of them trained it, the others having refused."""
    trained = 0
    for mode in MODES:
        # Each mode has a module of its own: what one leaves behind is not the next one's.
        build, x, bound, shown = make(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                norm = released(build(), x, mode, bound)
            except _REFUSALS as error:
                if not str(error):
                    raise Finding(f"{mode}: refused without a word: {shown}") from error
                continue
        if not norm <= bound * (1 + TOLERANCE):
            raise Finding(f"{mode}: releases {norm:.9g} at R={bound:.9g}: {shown}")
        trained += 1
    return trained


PART = Part("layers", "layer cases", case, share=2.0)
