"""Random modules in bookkeeping mode: what is clipped is the loop's over the examples, or refused.

A module is a few random pieces, one after the other: layers, bare parameters and functions of them,
each as it is or in another layout, called twice, checkpointed, written into. Parts may be frozen or
tied. Some pieces mix the examples, which no run may go on with. Norms and clipped sums of a few
batches of different sizes are compared, in float64, with one example at a time by plain autograd.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from scripts.attack.harness import Finding, Part
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

LENGTH, WIDTH = 4, 6  # of h, which has the shape (rows, LENGTH, WIDTH) between pieces
EXAMPLES = 9
_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)

Run = Callable[[Any, Tensor], Tensor]


class Piece(nn.Module):
    """Parameters, layers and buffers by name, and what they do to h."""

    def __init__(self, run: Run, **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, h: Tensor) -> Tensor:
        """As the piece was told."""
        return self.run(self, h)


def _p(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


class _Scaled(torch.autograd.Function):
    """x · w, in ways that operations are not followed through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).reshape(-1, *w.shape).sum(0)


def _ids(h: Tensor) -> Tensor:
    """Numbers below 5 that follow from h, shape (rows, LENGTH)."""
    return (3 * h[..., 0].detach().abs()).long() % 5


def _conv(h: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    return run(h.transpose(1, 2)).transpose(1, 2)


def _with_token(m: Any, h: Tensor) -> Tensor:
    return torch.cat([m.a.expand(len(h), -1, -1), h], 1)[:, :LENGTH] + m.b


def _written(m: Any, h: Tensor) -> Tensor:
    out = h.clone()
    out[:, 0] = m.a
    out[:, 1:] *= m.b
    return out


def _overwritten(m: Any, h: Tensor) -> Tensor:
    w = m.a.clone()
    w[0] = m.b
    w[1:].mul_(0.5)
    return h @ w


def _scattered(m: Any, h: Tensor) -> Tensor:
    index = torch.tensor([0, 2, 3]).to(h.device)
    return h + torch.zeros_like(m.b).index_add(0, index, m.a)


def _blocks(m: Any, h: Tensor) -> Tensor:
    q, k, v = (h @ part.T for part in m.a.chunk(3))
    return F.scaled_dot_product_attention(q, k, v)


def _stacked(m: Any, h: Tensor) -> Tensor:
    return torch.einsum("ntw,kwv->nktv", h, torch.stack([m.a, m.b])).sum(1)


def _recurrent(h: Tensor, layer: nn.Module) -> Tensor:
    return layer(h)[0]


def _biased(m: Any, h: Tensor) -> Tensor:
    """Attention with a bias that a layer makes of what all examples share."""
    places = torch.arange(LENGTH, dtype=h.dtype, device=h.device)
    bias = m.f((places[:, None] - places)[..., None]).squeeze(-1)
    return F.scaled_dot_product_attention(h, h, h, bias)


def _shared_positions(m: Any, h: Tensor) -> Tensor:
    return h + m.f(torch.arange(h.shape[1], device=h.device))


def _table(m: Any, h: Tensor) -> Tensor:
    places = torch.arange(LENGTH, device=h.device)
    return F.scaled_dot_product_attention(h, h, h, m.a[places[:, None] - places + LENGTH - 1])


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


# What keeps the examples apart, or looks as if it did; of each, how it is made.
PIECES: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "mlp": lambda: nn.Sequential(_linear(), nn.ReLU(inplace=True), _linear()),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: Piece(lambda m, h: _conv(h, m.f), f=nn.GroupNorm(2, WIDTH)),
    "norm of positions": lambda: nn.GroupNorm(2, LENGTH),
    "convolution": lambda: Piece(lambda m, h: _conv(h, m.f), f=nn.Conv1d(WIDTH, WIDTH, 3, 1, 1)),
    "grouped convolution": lambda: Piece(
        lambda m, h: _conv(h, m.f), f=nn.Conv1d(WIDTH, WIDTH, 3, 1, "same", groups=2)
    ),
    "prelu": lambda: nn.PReLU(LENGTH),
    "attention": lambda: Piece(
        lambda m, h: m.f(h, h, h)[0], f=nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "attention, positions first": lambda: Piece(
        lambda m, h: m.f(*[h.transpose(0, 1)] * 3)[0].transpose(0, 1),
        f=nn.MultiheadAttention(WIDTH, 2),
    ),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
    "encoder layer, positions first": lambda: Piece(
        lambda m, h: m.f(h.transpose(0, 1)).transpose(0, 1),
        f=nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0),
    ),
    "gru": lambda: Piece(lambda m, h: _recurrent(h, m.f), f=nn.GRU(WIDTH, 6, batch_first=True)),
    "lstm, positions first": lambda: Piece(
        lambda m, h: _recurrent(h.transpose(0, 1), m.f).transpose(0, 1), f=nn.LSTM(WIDTH, WIDTH)
    ),
    "embedding": lambda: Piece(lambda m, h: h + m.f(_ids(h)), f=nn.Embedding(5, WIDTH)),
    "bag": lambda: Piece(lambda m, h: h + m.f(_ids(h))[:, None], f=nn.EmbeddingBag(5, WIDTH)),
    "positions": lambda: Piece(_shared_positions, f=nn.Embedding(LENGTH, WIDTH)),
    "positions of shape (1, T)": lambda: Piece(
        lambda m, h: h + m.f(torch.arange(h.shape[1])[None]), f=nn.Embedding(LENGTH, WIDTH)
    ),
    "a bias by a layer": lambda: Piece(_biased, f=nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))),
    "a table of biases": lambda: Piece(_table, a=_p(2 * LENGTH - 1)),
    "bilinear": lambda: Piece(lambda m, h: m.f(h, h), f=nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(_linear()),
    "scale and shift": lambda: Piece(lambda m, h: h * m.a + m.b, a=_p(WIDTH), b=_p()),
    "bare positions": lambda: Piece(lambda m, h: h + m.a, a=_p(1, LENGTH, WIDTH)),
    "bare positions, two dimensions": lambda: Piece(lambda m, h: h + m.a, a=_p(LENGTH, WIDTH)),
    "token": lambda: Piece(_with_token, a=_p(1, 1, WIDTH), b=_p(LENGTH, 1)),
    "token, repeated": lambda: Piece(
        lambda m, h: torch.cat([m.a.repeat(len(h), 1, 1), h], 1)[:, :-1], a=_p(1, 1, WIDTH)
    ),
    "matrix": lambda: Piece(lambda m, h: h @ m.a, a=_p(WIDTH, WIDTH)),
    "matrix on the left": lambda: Piece(lambda m, h: m.a @ h, a=_p(LENGTH, LENGTH)),
    "low rank": lambda: Piece(lambda m, h: h + h @ (m.a @ m.b), a=_p(WIDTH, 2), b=_p(2, WIDTH)),
    "transposed": lambda: Piece(lambda m, h: F.linear(h, m.a.T, m.b), a=_p(6, 6), b=_p(6)),
    "blocks of one parameter": lambda: Piece(_blocks, a=_p(3 * WIDTH, WIDTH)),
    "a view": lambda: Piece(lambda m, h: F.linear(h, m.a.view(6, 6)) * m.a[:6], a=_p(36)),
    "stacked": lambda: Piece(_stacked, a=_p(WIDTH, WIDTH), b=_p(WIDTH, WIDTH)),
    "normalized weight": lambda: Piece(lambda m, h: h @ (m.a / m.a.norm()), a=_p(WIDTH, WIDTH)),
    "softmax of a parameter": lambda: Piece(lambda m, h: m.a.softmax(-1) @ h, a=_p(LENGTH, LENGTH)),
    "written into the input": lambda: Piece(_written, a=_p(WIDTH), b=_p(WIDTH)),
    "written into a copy": lambda: Piece(_overwritten, a=_p(WIDTH, WIDTH), b=_p(WIDTH)),
    "scattered": lambda: Piece(_scattered, a=_p(3, WIDTH), b=_p(LENGTH, WIDTH)),
    "functional convolution": lambda: Piece(
        lambda m, h: _conv(h, lambda x: F.conv1d(x, m.a, m.b, padding=1)), a=_p(6, 6, 3), b=_p(6)
    ),
    "functional norm": lambda: Piece(
        lambda m, h: F.layer_norm(h, (WIDTH,), m.a, m.b), a=_p(WIDTH), b=_p(WIDTH)
    ),
    "functional look-up": lambda: Piece(lambda m, h: h + F.embedding(_ids(h), m.a), a=_p(5, 6)),
    "addcmul": lambda: Piece(lambda m, h: torch.addcmul(m.a, h, m.b), a=_p(6), b=_p(4, 6)),
    "a kernel of products": lambda: Piece(
        lambda m, h: torch.cdist(h, m.a.expand(len(h), -1, -1)) @ m.a, a=_p(LENGTH, WIDTH)
    ),
    "autograd function": lambda: Piece(lambda m, h: _Scaled.apply(h, m.a), a=_p(WIDTH)),
    "vmap": lambda: Piece(lambda m, h: torch.vmap(lambda x: x @ m.a)(h), a=_p(WIDTH, WIDTH)),
    "listed parameters": lambda: Piece(
        lambda m, h: sum((h * p for p in m.a), h), a=nn.ParameterList([_p(WIDTH), _p(LENGTH, 1)])
    ),
    "a layer's weight by hand": lambda: Piece(
        lambda m, h: m.f(h) @ m.f.weight + F.linear(h, m.f.weight, m.f.bias), f=_linear()
    ),
    "a frozen layer and a scale": lambda: Piece(
        lambda m, h: m.f(h) * m.a, f=_linear().requires_grad_(False), a=_p(WIDTH)
    ),
    "a buffer": lambda: Piece(lambda m, h: h * m.c * m.a, c=torch.rand(WIDTH), a=_p(WIDTH)),
    "a penalty on nothing": lambda: Piece(lambda m, h: h * (1 + 0 * m.a.sum()) + m.a, a=_p(WIDTH)),
    "chosen by the numbers": lambda: Piece(
        lambda m, h: torch.where(h > 0, m.a * h, m.b), a=_p(WIDTH), b=_p(LENGTH, 1)
    ),
    "sorted": lambda: Piece(lambda m, h: h.sort(1).values * m.a, a=_p(WIDTH)),
    "picked rows": lambda: Piece(
        lambda m, h: h.index_put((torch.arange(len(h)),), m.f(h)), f=_linear()
    ),
    "tokens by a mask": lambda: Piece(
        lambda m, h: h.masked_scatter((h[..., :1] > 0).expand_as(h), m.f(h[h[..., 0] > 0])),
        f=_linear(),
    ),
}

# What one example does to another's; none may be trained.
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "mean of the batch": lambda: Piece(lambda m, h: m.f(h) - h.mean(0), f=_linear()),
    "detached mean of the batch": lambda: Piece(
        lambda m, h: h * m.a + h.detach().mean(0) * m.b, a=_p(WIDTH), b=_p(WIDTH)
    ),
    "largest number as a number": lambda: Piece(
        lambda m, h: h * m.a * (1 + h.detach().abs().max().item()), a=_p(WIDTH)
    ),
    "the first example": lambda: Piece(lambda m, h: m.f(h) + h[:1], f=_linear()),
    "the next example": lambda: Piece(lambda m, h: m.f(h.roll(1, 0)), f=_linear()),
    "attention over the batch": lambda: Piece(
        lambda m, h: m.f(h, h, h)[0], f=nn.MultiheadAttention(WIDTH, 2)
    ),
    "convolution over the batch": lambda: Piece(
        lambda m, h: m.f(h.permute(1, 2, 0)).permute(2, 0, 1), f=nn.Conv1d(WIDTH, WIDTH, 3, 1, 1)
    ),
    "normalized by the batch": lambda: Piece(
        lambda m, h: (h / (1 + h.norm())) @ m.a, a=_p(WIDTH, WIDTH)
    ),
    "a number of the batch in a product": lambda: Piece(
        lambda m, h: h * (m.a * h.detach().square().mean((0, 1))), a=_p(WIDTH)
    ),
    "the number of rows": lambda: Piece(lambda m, h: m.f(h) / len(h), f=_linear()),
    "the row's number": lambda: Piece(
        lambda m, h: m.f(h) + torch.arange(len(h))[:, None, None] * m.a, f=_linear(), a=_p(WIDTH)
    ),
    "every second row": lambda: Piece(
        lambda m, h: m.f(h) * (1 - torch.arange(len(h)) % 2)[:, None, None], f=_linear()
    ),
    "autograd function with the batch": lambda: Piece(
        lambda m, h: _Scaled.apply(h, m.a) + h.detach().mean(), a=_p(WIDTH)
    ),
}


def _on_windows(f: nn.Module, h: Tensor) -> Tensor:
    return f(h.reshape(-1, LENGTH // 2, WIDTH)).view_as(h)


def _beside_no_grad(f: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(f(h))
    return f(h) * gate


# How a piece is called.
WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "": lambda f, h: f(h),
    "positions first": lambda f, h: f(h.transpose(0, 1)).transpose(0, 1),
    "flat": lambda f, h: f(h.flatten(0, 1)).view_as(h),
    "on windows": _on_windows,
    "twice": lambda f, h: f(f(h)),
    "residual": lambda f, h: h + f(h),
    "written over": lambda f, h: f(h).clone().mul_(0.5).add_(h).relu_(),
    "activated in place": lambda f, h: torch.tanh_(f(h)),
    "beside no_grad": _beside_no_grad,
    "checkpointed": lambda f, h: checkpoint(f, h, use_reentrant=False),
    "checkpointed, reentrant": lambda f, h: checkpoint(f, h, use_reentrant=True),
    "on two halves": lambda f, h: torch.cat([f(h), f(2 * h)], 1)[:, ::2],
    "example by example": lambda f, h: torch.cat([f(row[None]) for row in h]),
}


# Refused in words of torch alone, as shapes do not fit: what an embedding makes of ids of one
# dimension is given to every example, before it shows that the rows lie otherwise.
UNNAMED = {
    ("positions", "on windows"),
    ("positions", "example by example"),
    ("positions of shape (1, T)", "on windows"),
    ("embedding", "flat"),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A piece and how it is called.

    Attributes:
        piece: its name.
        way: one of ``WAYS``.
        mixes: whether it is one of ``MIXERS``.
    """

    piece: str
    way: str
    mixes: bool

    def __str__(self) -> str:
        return f"{self.piece} {self.way}".rstrip()


class Model(nn.Module):
    """Steps one after the other, and the mean over the positions."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        made = [(MIXERS if step.mixes else PIECES)[step.piece]() for step in steps]
        self.pieces = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, WIDTH)."""
        h = x
        for step, piece in zip(self.steps, self.pieces, strict=True):
            h = WAYS[step.way](piece, h)
        return h.mean(1)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random module and what is done with it.

    Attributes:
        steps: of the module.
        seed: of its numbers and of what is frozen and tied.
        calls: forward and backward passes for each batch.
        mean: whether the loss is a mean.
    """

    steps: tuple[Step, ...]
    seed: int
    calls: int
    mean: bool

    def model(self) -> nn.Module:
        """Anew at every call."""
        torch.manual_seed(self.seed)
        rng = np.random.default_rng([20_271_103, self.seed])
        model = Model(self.steps).double().train()
        if rng.random() < 0.2:
            _tie(model, rng)
        parameters = list(model.parameters())
        for p in parameters[1:]:
            if rng.random() < 0.05:
                p.requires_grad_(False)
        return model

    def __str__(self) -> str:
        shown = " | ".join(str(step) for step in self.steps)
        return f"{shown} ({self.calls} calls, {'mean' if self.mean else 'sum'})"


def _tie(model: nn.Module, rng: np.random.Generator) -> None:
    """One parameter takes the place of another of its shape, if there is one."""
    places = [
        (m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]
    first = places[int(rng.integers(len(places)))]
    own = first[0]._parameters[first[1]]
    assert own is not None
    for m, name in places:
        other = m._parameters[name]
        if other is not None and other is not own and other.shape == own.shape:
            setattr(m, name, own)
            return


def program(seed: int) -> Program:
    """The program of a case."""
    rng = np.random.default_rng([20_271_102, seed])

    def step() -> Step:
        mixes = bool(rng.random() < 0.06)
        names, ways = list(MIXERS if mixes else PIECES), list(WAYS)
        # Pieces in turn, so that a few hundred cases have had all of them.
        piece = names[(seed + int(rng.integers(len(names)))) % len(names)]
        way = ways[int(rng.integers(len(ways)))] if rng.random() < 0.6 else ""
        return Step(piece, "" if (piece, way) in UNNAMED else way, mixes)

    steps = tuple(step() for _ in range(int(rng.integers(1, 5))))
    calls = 2 if rng.random() < 0.15 else 1
    return Program(steps, seed, calls, bool(rng.random() < 0.5))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Examples and targets, some of which are far off."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    x[1] *= 0.01
    x[2, LENGTH // 2 :] = 0.0
    return x, 3 * torch.randn(EXAMPLES, generator=generator, dtype=torch.float64)


def _loop(model: nn.Module, x: Tensor, targets: Tensor, calls: int) -> Reference:
    found = [reference(model, (x,), targets + call) for call in range(calls)]
    parts = [sum(some[1:], some[0]) for some in zip(*(f.parts for f in found), strict=True)]
    return Reference(parts, sum((f.rounding for f in found[1:]), found[0].rounding))


def examine(given: Program) -> bool:
    """True if the module trained correctly; ``False`` if it was refused or cannot be run.

    Raises:
        Finding: for what is wrong, and for an error that is no refusal.
    """
    x, targets = data(given.seed)
    alone = given.model()
    if not any(p.requires_grad for p in alone.parameters()):
        return False
    try:
        _loop(alone, x[:2], targets[:2], given.calls)
        copy.deepcopy(alone)(x).sum().backward()
    except Exception:  # no program: a piece that cannot be called so, or what autograd refuses
        return False
    model = given.model()
    try:
        _compare(given, model, alone, x, targets)
    except AssertionError as error:
        raise Finding(f"another gradient than the loop's: {given}\n  {error}") from error
    except _ERRORS as error:
        if not refuses(str(error), model):
            said = f"{type(error).__name__}: {error}"
            raise Finding(f"no refusal: {given}\n  {said}") from error
        return False
    return True


def _compare(
    given: Program, model: nn.Module, alone: nn.Module, x: Tensor, targets: Tensor
) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    module, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data=TensorDataset(x, targets),
        scheme=Poisson(probability=0.5, dataset_size=EXAMPLES, steps=3),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        seed=given.seed,
        gradients=Gradients(mode="bookkeeping", loss="mean" if given.mean else "sum"),
    )
    for rows, own in loader:
        optimizer.zero_grad()
        for call in range(given.calls):
            _reduced(given, row_losses(module(rows), own + call)).backward()
        if loader.current is not None and len(loader.current.indices):
            wanted = _loop(alone, rows, own, given.calls)
            bound = float(wanted.norms.median())
            weights = torch.ones(len(own), dtype=torch.float64)
            sums = optimizer.clipper.clipped_sum(max_grad_norm=bound, weights=weights)
            assert_norms(optimizer.clipper.norms, wanted, TOLERANCE[torch.float64])
            factors = flat_factors(wanted.norms, bound, weights)
            assert_sums(sums, wanted, factors, TOLERANCE[torch.float64])
            _reduced(given, row_losses(module(rows), own)).backward()
        optimizer.step()


def _reduced(given: Program, losses: Tensor) -> Tensor:
    return losses.mean() if given.mean else losses.sum()


def shrunk(given: Program) -> Program:
    """A program with fewer steps, or simpler ones, in which something is wrong too."""
    candidates = [
        given.steps[:k] + given.steps[k + 1 :] for k in range(len(given.steps)) if given.steps[1:]
    ]
    candidates += [
        (*given.steps[:k], dataclasses.replace(step, way=""), *given.steps[k + 1 :])
        for k, step in enumerate(given.steps)
        if step.way
    ]
    for steps in candidates:
        simpler = dataclasses.replace(given, steps=steps)
        with contextlib.suppress(Exception):
            try:
                examine(simpler)
            except Finding:
                return shrunk(simpler)
    return given


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Without warnings of layers that are run again, or that learn nothing."""
    log = logging.getLogger("dptrain")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def case(seed: int) -> int:
    """One random module; whether it was trained."""
    given = program(seed)
    with warnings.catch_warnings(), _silently():
        warnings.simplefilter("ignore")
        try:
            return int(examine(given))
        except Finding as found:
            simpler = shrunk(given)
            raise Finding(f"{found}\n  as in: {simpler}") from found


PART = Part("modules", "random modules trained", case, share=2.0)
