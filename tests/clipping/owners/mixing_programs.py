"""Programs in which examples meet in ways that look harmless, and some in which they do not.

Each is a function of rows x of shape (ROWS, WIDTH), labels of shape (ROWS,), a mask of shape
(ROWS, WIDTH) and a weight of shape (WIDTH, WIDTH) that all share, and returns tensors.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 4, 6, 3

Rows = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _gradient(loss: Tensor, *by: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, by)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    own = x.detach().clone()
    write(own)
    return own


def _by_numpy_alias(own: Tensor) -> None:
    array = own.numpy()
    array[0] = array[1]


def _by_dlpack_alias(own: Tensor) -> None:
    torch.from_dlpack(own)[0] += own[1]


def _by_data_alias(own: Tensor) -> None:
    own.data[0].copy_(own[1])


def _scan(x: Tensor) -> Tensor:
    state, rows = torch.zeros_like(x[0]), []
    for row in x:
        state = torch.tanh(state + row)
        rows.append(state)
    return torch.stack(rows)


class _MixesBackward(torch.autograd.Function):
    """The identity, whose gradient is another row's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.roll(1, 0)


class _MixesSaved(torch.autograd.Function):
    """x², whose gradient has the mean of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.mean(0)


def _hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    x = _leaf(x)
    h = x * 2
    h.register_hook(hook)
    return _gradient((h.square()).sum(), x)


def _packed_by_hooks(x: Tensor) -> tuple[Tensor, ...]:
    x = _leaf(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
        loss = (x * 2).square().sum()
    return _gradient(loss, x)


def _cross_entropy(x: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    x = _leaf(x)
    return _gradient(F.cross_entropy(x[:, :CLASSES], labels % CLASSES, **options), x)


def _masked_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    x = _leaf(x)
    return _gradient((x.square() * mask).sum() / mask.sum(), x)


def _squared_total(x: Tensor) -> tuple[Tensor, ...]:
    x = _leaf(x)
    return _gradient(x.square().mean(1).sum() ** 2, x)


def _nt_xent(x: Tensor) -> tuple[Tensor, ...]:
    x = _leaf(x)
    views = F.normalize(torch.cat([x, x * 1.5 + 1]), dim=1)
    similar = (views @ views.t()).masked_fill(torch.eye(2 * ROWS, dtype=torch.bool), -1e9)
    return _gradient(F.cross_entropy(similar, torch.arange(2 * ROWS).roll(ROWS)), x)


def _barlow_twins(x: Tensor) -> tuple[Tensor, ...]:
    x = _leaf(x)
    a, b = ((v - v.mean(0)) / v.std(0) for v in (x, x.tanh()))
    return _gradient((a.t() @ b / ROWS - torch.eye(WIDTH)).square().sum(), x)


def _penalty(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Of a gradient that is itself of the whole batch's loss."""
    x = _leaf(x)
    (inner,) = torch.autograd.grad((x @ w).tanh().mean(0).square().sum(), x, create_graph=True)
    return _gradient(inner.square().sum(), x)


def _two_passes(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The second pass weighs rows by what the first has left in the weight."""
    w = _leaf(w)
    (x @ w).tanh().sum().backward()
    x = _leaf(x)
    (x @ w.grad).tanh().sum().backward()
    return (x.grad,)


def _reentrant(x: Tensor) -> tuple[Tensor | None]:
    x = _leaf(x)
    checkpoint(lambda v: (v - v.mean(0)).square(), x, use_reentrant=True).sum().backward()
    return (x.grad,)


def _batch_norm_later(x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(WIDTH, dtype=x.dtype)
    norm(x)
    return norm.eval()(x)


def _forward_mode(x: Tensor) -> tuple[Tensor, ...]:
    return torch.func.jvp(lambda v: v - v.mean(0), (x.detach(),), (x.detach().square(),))


def _mixed_by_vmap(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda column: column - column.mean(), 1, 1)(x)


def _gradient_by_functions(x: Tensor) -> Tensor:
    return torch.func.grad(lambda v: v.square().mean(1).sum() ** 2)(x.detach())


def _pickled(x: Tensor) -> Tensor:
    return torch.as_tensor(pickle.loads(pickle.dumps(x.detach()))).roll(1, 0)


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded.roll(1, 0)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(int(x.detach().nan_to_num().sum().clamp(-1e6, 1e6) * 1000) % 2**31)
    return x + torch.randn(ROWS, WIDTH)


def _subclass(x: Tensor) -> Tensor:
    class Marked(torch.Tensor):
        pass

    marked = x.detach().as_subclass(Marked)
    return (marked - marked.mean(0)).as_subclass(torch.Tensor)


def _experts(x: Tensor, w: Tensor) -> Tensor:
    """Rows sent to one of two experts, of which the first takes one at most."""
    first = x[:, 0] > 0
    place = first.long().cumsum(0)
    kept = first & (place <= 1)
    return torch.where(kept[:, None], x @ w, x)


def _transcribed(x: Tensor, steps: Tensor) -> Tensor:
    """Of three steps for each row, so many."""
    given = x.log_softmax(-1).expand(3, -1, -1)
    targets = torch.ones(ROWS, 1, dtype=torch.long)
    return F.ctc_loss(given, targets, steps, targets[:, 0], reduction="none")


def _transcribed_in_a_row(x: Tensor, labels: Tensor) -> Tensor:
    """The first row's label says where its targets end and those of the second begin."""
    given, first = x.log_softmax(-1).expand(4, -1, -1), labels[0] % 2
    lengths = torch.stack([1 + first, 2 - first, 2 + 0 * first, 2 + 0 * first])
    targets = torch.arange(7) % 5 + 1
    return F.ctc_loss(given, targets, torch.full_like(labels, 4), lengths, reduction="none")


def _packed_sequence(x: Tensor, labels: Tensor) -> Tensor:
    lengths = labels.clamp(1, 3).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(
        x.unflatten(1, (3, 2)), lengths, batch_first=True, enforce_sorted=False
    )
    return packed.data


# Rows meet, and every operator is seen: the elements that several move are claimed by none.
MIXING: dict[str, Rows] = {
    "random companions": lambda x, y, m, w: x + x[torch.randperm(ROWS)],
    "less the batch's mean": lambda x, y, m, w: x - x.mean(0),
    "batch norm": lambda x, y, m, w: nn.BatchNorm1d(WIDTH, dtype=x.dtype)(x),
    "statistics of a batch norm, later": lambda x, y, m, w: _batch_norm_later(x),
    "nothing times another": lambda x, y, m, w: x + 0 * x.flip(0),
    "masked product": lambda x, y, m, w: torch.eye(ROWS).to(x) @ x,
    "through data": lambda x, y, m, w: _written(x, _by_data_alias),
    "scan over the batch": lambda x, y, m, w: x.cumsum(0),
    "order of the batch": lambda x, y, m, w: x[x[:, 0].argsort()],
    "recurrence over rows": lambda x, y, m, w: _scan(x),
    "backward of a function": lambda x, y, m, w: (
        _hooked(_MixesBackward.apply(x), lambda g: g)
        + _gradient(_MixesBackward.apply(v := _leaf(x)).square().sum(), v)
    ),
    "what a function saved": lambda x, y, m, w: _gradient(
        _MixesSaved.apply(v := _leaf(x)).sum(), v
    ),
    "hook of a tensor": lambda x, y, m, w: _hooked(x, lambda g: g - g.mean(0)),
    "hook that writes": lambda x, y, m, w: _hooked(x, lambda g: g.copy_(g.flip(0).clone())),
    "hooks of what is saved": lambda x, y, m, w: _packed_by_hooks(x),
    "gradient by torch.func": lambda x, y, m, w: _gradient_by_functions(x),
    "forward mode": lambda x, y, m, w: _forward_mode(x),
    "two passes": lambda x, y, m, w: _two_passes(x, w),
    "gradient penalty": lambda x, y, m, w: _penalty(x, w),
    "squared loss of the batch": lambda x, y, m, w: _squared_total(x),
    "ignored labels": lambda x, y, m, w: _cross_entropy(x, y, ignore_index=1),
    "weights of classes": lambda x, y, m, w: _cross_entropy(
        x, y, weight=torch.tensor([1.0, 2.0, 5.0], dtype=x.dtype)
    ),
    "mean over a mask": lambda x, y, m, w: _masked_mean(x, m),
    "NT-Xent": lambda x, y, m, w: _nt_xent(x),
    "Barlow twins": lambda x, y, m, w: _barlow_twins(x),
    "a sample's rows, reshaped": lambda x, y, m, w: x.reshape(WIDTH, ROWS).softmax(1),
    "capacity of experts": lambda x, y, m, w: _experts(x, w),
    "subclass": lambda x, y, m, w: _subclass(x),
    "deep copy": lambda x, y, m, w: copy.deepcopy(x.detach()).roll(1, 0),
    "bits": lambda x, y, m, w: x.detach().view(torch.int64) ^ x.detach().flip(0).view(torch.int64),
    "checkpointed": lambda x, y, m, w: _gradient(
        checkpoint(lambda v: (v - v.mean(0)).square(), v := _leaf(x), use_reentrant=False).sum(), v
    ),
    "checkpointed, reentrant": lambda x, y, m, w: _reentrant(x),
    "largest of the batch": lambda x, y, m, w: x.clamp(max=x.max() / 2),
    "padding by the batch": lambda x, y, m, w: torch.where(m, x, x.min()),
    "capped norm of all": lambda x, y, m, w: x * (1 / x.norm()).clamp(max=1.0),
    "quantized by the batch": lambda x, y, m, w: torch.fake_quantize_per_tensor_affine(
        x.float(), x.abs().max().float() / 127, torch.zeros(1, dtype=torch.int32)[0], -128, 127
    ),
    "attention over the batch": lambda x, y, m, w: F.scaled_dot_product_attention(x, x, x),
    "convolution over the batch": lambda x, y, m, w: F.conv1d(
        x[None], torch.ones(ROWS, ROWS, 1, dtype=x.dtype)
    ),
    "order of an unstable sort": lambda x, y, m, w: y.sort().indices,
    "pairs": lambda x, y, m, w: torch.pdist(x),
    "covariance": lambda x, y, m, w: torch.cov(x.t()),
    "resampled": lambda x, y, m, w: x[torch.multinomial(torch.ones(ROWS), ROWS, replacement=True)],
    "a stack of the batch": lambda x, y, m, w: torch.stack([x[0], x[1]]).sum(0),
    "lengths of a transcript": lambda x, y, m, w: _transcribed(x, y.flip(0) + 1),
    "transcripts in a row": lambda x, y, m, w: _transcribed_in_a_row(x, y),
    "one value for each row, put along columns": lambda x, y, m, w: (
        torch.zeros(ROWS, CLASSES, ROWS).to(x).index_put((torch.arange(ROWS), y % CLASSES), x[:, 0])
    ),
    "lists of rows": lambda x, y, m, w: torch._foreach_add(list(x), list(x.flip(0))),
}

# Numbers leave torch, and may come back as anything.
ESCAPING: dict[str, Rows] = {
    "largest as a number": lambda x, y, m, w: x * x.detach().abs().max().item(),
    "largest as a float": lambda x, y, m, w: x * float(x.detach().abs().max()),
    "number of labels": lambda x, y, m, w: x * int((y == 1).sum()),
    "a branch": lambda x, y, m, w: x * 2 if (x[0] > 0).any() else x,
    "a branch on equality": lambda x, y, m, w: x * 2 if torch.equal(y[:1], y[1:2]) else x,
    "a branch on closeness": lambda x, y, m, w: x * 2 if torch.allclose(y[0], y[1]) else x,
    "membership": lambda x, y, m, w: x * 2 if 2 in y else x,
    "truth": lambda x, y, m, w: x * (not m[0, 0]),
    "NumPy and back": lambda x, y, m, w: torch.from_numpy(x.detach().numpy()[::-1].copy()),
    "asarray and back": lambda x, y, m, w: torch.tensor(np.asarray(x.detach())).flip(0),
    "array and back": lambda x, y, m, w: torch.as_tensor(np.array(x.detach())).flip(0),
    "a NumPy function": lambda x, y, m, w: torch.as_tensor(np.cumsum(x.detach(), 0)),
    "list and back": lambda x, y, m, w: torch.tensor(x.tolist()[::-1]),
    "a written NumPy alias": lambda x, y, m, w: _written(x, _by_numpy_alias),
    "a pickle": lambda x, y, m, w: _pickled(x),
    "a file": lambda x, y, m, w: _saved(x),
    "text": lambda x, y, m, w: x * sum(map(ord, repr(x.detach()))),
    "formatted": lambda x, y, m, w: x * float(f"{x.detach()[0, 0]:.3f}"),
    "seed": lambda x, y, m, w: _seeded(x),
    "index": lambda x, y, m, w: x[: max(1, y[0] % ROWS)],
    "bytes": lambda x, y, m, w: torch.frombuffer(
        bytearray(bytes(x.detach().untyped_storage())), dtype=x.dtype
    ).flip(0),
    "python's maximum": lambda x, y, m, w: x - max(x, key=lambda row: float(row.detach().sum())),
    "python's order": lambda x, y, m, w: torch.stack(sorted(x, key=lambda r: r[0].item())),
    "sizes from a list": lambda x, y, m, w: torch.cat(
        [part.cumsum(0) for part in x.split([int(y[0]) % ROWS, ROWS - int(y[0]) % ROWS])]
    ),
}

# As many rows as are found: the size, which is none of the numbers, depends on all rows.
SIZES: dict[str, Rows] = {
    "found rows": lambda x, y, m, w: x[m[:, 0].nonzero()[:, 0]],
    "masked rows": lambda x, y, m, w: x.masked_select(m),
    "found numbers": lambda x, y, m, w: y.unique(return_counts=True),
    "number of a number": lambda x, y, m, w: y.unique(return_inverse=True)[1],
    "number found": lambda x, y, m, w: x * len(m[:, 0].nonzero()),
    "number of counts": lambda x, y, m, w: x / len(torch.bincount(y)),
    "number repeated": lambda x, y, m, w: x / len(torch.repeat_interleave(y)),
    "number that is not 0": lambda x, y, m, w: x / (1 + m.long().to_sparse()._nnz()),
    "number packed": lambda x, y, m, w: x / len(_packed_sequence(x, y)),
    "number of kinds": lambda x, y, m, w: x / y.unique().numel(),
    "number masked": lambda x, y, m, w: x * x[m].shape[0],
    "packed": lambda x, y, m, w: _packed_sequence(x, y),
}

# What no operator of the main thread shows, or what torch itself reads in other ways.
HIDDEN: dict[str, Rows] = {
    "a written dlpack alias": lambda x, y, m, w: _written(x, _by_dlpack_alias),
    "vmap over columns": lambda x, y, m, w: _mixed_by_vmap(x),
}
