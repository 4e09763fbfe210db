"""Programs that keep rows apart: the map names the owner of every element, and no fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.clipping.owners import random_programs
from tests.clipping.owners.claims import Claim, check
from tests.helpers.dependence import SHARED, Owned

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, LENGTH, WIDTH, IDS = 4, 3, 6, 5

# Each of rows x of shape (ROWS, LENGTH, WIDTH), ids (ROWS, LENGTH) and labels (ROWS,).
Program = Callable[[Tensor, Tensor, Tensor], Any]


def _layer(layer: nn.Module) -> nn.Module:
    """In float64, and without gradients of its own, which belong to all examples."""
    torch.manual_seed(3)
    for p in layer.double().parameters():
        nn.init.normal_(p, std=0.3)
    return layer.requires_grad_(False)


def _image(x: Tensor) -> Tensor:
    return x[:, None]


def _attended(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(x, x, x, mask)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(1, LENGTH),
    "convolution": lambda: nn.Conv1d(LENGTH, 2, 3, padding=1),
    "strided convolution": lambda: nn.Conv1d(LENGTH, LENGTH, 3, 2, groups=3),
    "transposed convolution": lambda: nn.ConvTranspose1d(LENGTH, 2, 3),
    "average pooling": lambda: nn.AvgPool1d(2),
    "maximal pooling": lambda: nn.MaxPool1d(2),
    "adaptive pooling": lambda: nn.AdaptiveAvgPool1d(2),
    "adaptive maximal pooling": lambda: nn.AdaptiveMaxPool1d(2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True),
    "softplus": lambda: nn.Softplus(),
    "prelu": lambda: nn.PReLU(LENGTH),
    "flat": lambda: nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, 2)),
    "padding": lambda: nn.ReflectionPad1d(2),
    "upsampled": lambda: nn.Upsample(scale_factor=2),
    "frozen batch norm": lambda: nn.BatchNorm1d(LENGTH).eval(),
}

PROGRAMS: dict[str, Program] = {
    "two dimensions": lambda x, ids, y: F.conv2d(_image(x), torch.ones(2, 1, 2, 2).to(x)),
    "pooled twice": lambda x, ids, y: F.max_pool2d(_image(x), 2),
    "attention": lambda x, ids, y: _attended(x),
    "embedding": lambda x, ids, y: F.embedding(ids, torch.ones(IDS, 2).to(x)) + x[..., :2],
    "positions": lambda x, ids, y: x + torch.arange(LENGTH)[:, None],
    "token": lambda x, ids, y: torch.cat([torch.ones(ROWS, 1, WIDTH).to(x), x], 1),
    "last token": lambda x, ids, y: x[torch.arange(ROWS), y % LENGTH],
    "last token, positions first": lambda x, ids, y: x.transpose(0, 1)[
        y % LENGTH, torch.arange(ROWS)
    ],
    "three tokens": lambda x, ids, y: x[torch.arange(ROWS)[:, None], ids % LENGTH, :2],
    "rows flattened with positions": lambda x, ids, y: (x.flatten(0, 1).relu() * 2).view_as(x),
    "positions first": lambda x, ids, y: x.transpose(0, 1).softmax(-1).transpose(0, 1),
    "masked mean": lambda x, ids, y: (
        (x * (ids > 1)[..., None]).sum(1) / (ids > 1).sum(1, keepdim=True).clamp(min=1)
    ),
    "soft maximum": lambda x, ids, y: x.logsumexp((1, 2)),
    "largest": lambda x, ids, y: x.topk(2, -1).values,
    "sorted": lambda x, ids, y: x.sort(-1).values,
    "scan": lambda x, ids, y: x.cumsum(1),
    "cross-entropy of rows": lambda x, ids, y: F.cross_entropy(x[:, 0], y, reduction="none"),
    "cross-entropy of tokens": lambda x, ids, y: F.cross_entropy(
        x.transpose(1, 2), ids, reduction="none", ignore_index=0
    ),
    "squares": lambda x, ids, y: F.mse_loss(x, x.detach().tanh(), reduction="none").mean((1, 2)),
    "binary cross-entropy": lambda x, ids, y: F.binary_cross_entropy_with_logits(
        x, (x.detach() > 0).to(x), reduction="none"
    ),
    "Huber": lambda x, ids, y: F.smooth_l1_loss(x, ids[..., None].expand_as(x), reduction="none"),
    "divergence": lambda x, ids, y: F.kl_div(
        x.log_softmax(-1), x.detach().softmax(-1), reduction="none"
    ).sum(-1),
    "checkpointed": lambda x, ids, y: checkpoint(torch.tanh, x, use_reentrant=False),
    "einsum": lambda x, ids, y: torch.einsum("ntw,nsw->nts", x, x),
    "norm": lambda x, ids, y: F.normalize(x, dim=-1),
    "padded": lambda x, ids, y: F.pad(x, (1, 2, 0, 1), value=2.0),
    "loop over rows": lambda x, ids, y: torch.stack([row.exp() for row in x]),
    "loop over positions": lambda x, ids, y: torch.stack([p.exp() for p in x.unbind(1)], 1),
    "written": lambda x, ids, y: x.clone().masked_fill_(ids[..., None] == 0, 0.0),
    "written by rows": lambda x, ids, y: _written(x),
    "noise": lambda x, ids, y: x + torch.randn_like(x),
    "rotary": lambda x, ids, y: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous())
        * torch.polar(torch.ones(3), torch.arange(3.0)).to(torch.complex128)
    ).flatten(-2),
    "spectrum": lambda x, ids, y: torch.fft.rfft(x).abs(),
    "experts": lambda x, ids, y: x * F.softmax(x, -1).topk(2, -1).values.sum(-1, keepdim=True),
    "transcript": lambda x, ids, y: _transcribed(x, ids, y),
    "hard swish": lambda x, ids, y: F.hardswish(x),
    "searched": lambda x, ids, y: torch.searchsorted(torch.linspace(-1, 1, 5).to(x), x) * x,
    "searched by rows": lambda x, ids, y: torch.searchsorted(x[:, 0].sort(-1).values, x[:, 1]),
    "crossed": lambda x, ids, y: torch.linalg.cross(x[..., :3], x[..., 3:]),
    "pooled beside a dimension": lambda x, ids, y: F.avg_pool1d(x[:, 0][None], 2)[0],
    "padded beside a dimension": lambda x, ids, y: F.pad(x[:, 0][None], (1, 1), "reflect")[0],
    "short-time spectrum": lambda x, ids, y: torch.stft(
        x.flatten(1), 4, window=torch.ones(4).to(x), return_complex=True
    ).abs(),
    "in bins": lambda x, ids, y: torch.bucketize(x.detach(), torch.linspace(-1, 1, 5).to(x)) * x,
    "one of these": lambda x, ids, y: x * torch.isin(ids, torch.tensor([0, 3]))[..., None],
    "one hot": lambda x, ids, y: torch.eye(IDS)[ids].to(x) * x[..., :IDS],
}


def _transcribed(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Positions first, each row with lengths of its own."""
    steps, targets = torch.full_like(labels, LENGTH), labels.clamp(max=2)
    return F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), 1 + ids % 4, steps, targets, reduction="none"
    )


def _written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(ROWS):
        out[i] = x[i] * 2
    return out


def given() -> list[Owned]:
    """Rows, ids and labels."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(IDS, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(LENGTH, (ROWS,), generator=generator)
    return [Owned.rows(x), Owned.rows(ids), Owned.rows(labels)]


def assert_apart(claims: tuple[Claim, Claim]) -> None:
    """That row i of every result, and of every gradient, is of example i or of none."""
    for claim in claims:
        assert not claim.escapes
        for own in claim.owners:
            rows = torch.arange(ROWS).view(-1, *[1] * (own.dim() - 1))
            right = (own == rows) | (own == SHARED)
            assert bool(right.all()), {str(event) for event in claim.events.values()}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    layer = _layer(LAYERS[name]())
    assert_apart(check(lambda x, ids, y: layer(x), given()))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind: type[nn.Module]) -> None:
    layer = _layer(kind(WIDTH, 4, batch_first=True, bidirectional=True))
    assert_apart(check(lambda x, ids, y: layer(x)[0], given()))


def test_attention() -> None:
    layer = _layer(nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    assert_apart(check(lambda x, ids, y: layer(x, x, x, need_weights=False)[0], given()))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    assert_apart(check(PROGRAMS[name], given()))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", sorted({*random_programs.APART} - {"solved"}))
def test_steps_of_random_programs(name: str) -> None:
    program = random_programs.RandomProgram((("apart", name),), 0)
    *rows, weight = random_programs.arguments(0)
    held = weight.value

    def alone(*values: Tensor) -> Tensor:
        return program(*values, held)[-1]

    assert_apart(check(alone, rows))
