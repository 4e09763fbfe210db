"""Random programs over a few tensors of shape (ROWS, WIDTH), of which some mix the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.dependence import SHARED, Owned

ROWS, WIDTH = 4, 6


@dataclasses.dataclass
class State:
    """What a program has at hand.

    Attributes:
        pool: tensors of shape (ROWS, WIDTH), of which steps read and into copies of which they
            write.
        ids: whole numbers from 0 to ROWS - 1 that belong to rows, shape (ROWS,).
        mask: truth values, shape (ROWS, WIDTH).
        weight: what all examples share, shape (WIDTH, WIDTH).
        rng: decides, by a program's seed alone.
    """

    pool: list[Tensor]
    ids: Tensor
    mask: Tensor
    weight: Tensor
    rng: np.random.Generator

    @property
    def h(self) -> Tensor:
        """One of the pool, often the last."""
        last = self.rng.random() < 0.6
        return self.pool[-1 if last else int(self.rng.integers(len(self.pool)))]

    @property
    def g(self) -> Tensor:
        """Any of the pool."""
        return self.pool[int(self.rng.integers(len(self.pool)))]

    def number(self, end: int) -> int:
        """Below ``end``."""
        return int(self.rng.integers(end))

    def own_ids(self) -> Tensor:
        """Whole numbers below ROWS: the given ones, or some that follow from the numbers."""
        if self.rng.random() < 0.5:
            return self.ids
        return (self.h.detach() > 0).sum(1).clamp(max=ROWS - 1)

    def own_mask(self) -> Tensor:
        """The given mask, or one that follows from the numbers."""
        return self.mask if self.rng.random() < 0.5 else self.h.detach() > self.g.detach()


Step = Callable[[State], Tensor]


def _order() -> Tensor:
    return torch.tensor([2, 0, 3, 1])


def _steps(s: State) -> tuple[Tensor, Tensor]:
    """Of tensors with the rows second: a place in each row."""
    return s.own_ids(), torch.arange(ROWS)


def _windows(s: State) -> Tensor:
    return s.h.clone().contiguous().as_strided((ROWS, WIDTH), (s.number(4) + 1, s.number(2) + 1))


def _solved(s: State) -> Tensor:
    h = torch.tanh(s.h)
    return torch.linalg.solve(h[:, :, None] * h[:, None] + 9 * torch.eye(WIDTH).to(h), s.g)


def _convolved(s: State) -> Tensor:
    return F.conv1d(s.h[:, None], s.weight[:1, None, :3], padding=1)[:, 0]


def _recurred(s: State) -> Tensor:
    state, rows = s.h[:, 0], []
    for column in s.g.unbind(1):
        state = torch.tanh(state + column)
        rows.append(state)
    return torch.stack(rows, 1)


def _bag(s: State) -> Tensor:
    return F.embedding_bag(s.own_ids(), s.weight, torch.arange(ROWS))


def _looked_up(s: State) -> Tensor:
    return F.embedding(s.own_ids(), s.weight)


def _attended(s: State) -> Tensor:
    q, k = s.h.unflatten(1, (3, 2)), s.g.unflatten(1, (3, 2))
    return F.scaled_dot_product_attention(q, k, k).flatten(1)


def _bits(s: State) -> Tensor:
    return (s.h.detach().clone().view(torch.int64) ^ 3).view(torch.float64)


def _one_hot(s: State) -> Tensor:
    return torch.eye(WIDTH).to(s.h)[s.h.argmax(1)]


def _split(s: State) -> Tensor:
    a, b = s.h.chunk(2, 1)
    return torch.cat([b, a], 1)


# Row i of the result follows from rows i alone, where those of the pool do.
APART: dict[str, Step] = {
    "tanh": lambda s: torch.tanh(s.h),
    "sum": lambda s: s.h + s.g,
    "product": lambda s: s.h * s.g,
    "chosen": lambda s: torch.where(s.own_mask(), s.h, s.g),
    "clamped": lambda s: s.h.clamp(-0.5, 1.0),
    "relu": lambda s: F.relu(s.h),
    "linear": lambda s: s.h @ s.weight,
    "affine": lambda s: torch.addmm(s.weight[0], s.h, s.weight),
    "einsum": lambda s: torch.einsum("nt,tk->nk", s.h, s.weight),
    "softmax": lambda s: s.h.softmax(1),
    "log softmax": lambda s: F.log_softmax(s.h, -1),
    "scan": lambda s: s.h.cumsum(1),
    "largest so far": lambda s: s.h.cummax(1).values,
    "sorted": lambda s: s.h.sort(1).values,
    "sorted as another": lambda s: s.h.gather(1, s.g.argsort(1)),
    "picked": lambda s: s.h.gather(1, s.own_ids()[:, None].expand(-1, WIDTH)),
    "normalized": lambda s: F.layer_norm(s.h, (WIDTH,), s.weight[0], s.weight[1]),
    "less its mean": lambda s: s.h - s.h.mean(1, keepdim=True),
    "over its norm": lambda s: s.h / (1 + s.h.norm(dim=1, keepdim=True)),
    "its largest": lambda s: s.h * s.h.max(1, keepdim=True).values,
    "its median": lambda s: s.h - s.h.median(1, keepdim=True).values,
    "one hot": _one_hot,
    "convolved": _convolved,
    "pooled": lambda s: F.avg_pool1d(F.pad(s.h, (1, 1))[:, None], 3, 1)[:, 0],
    "solved": _solved,
    "batched product": lambda s: torch.bmm(s.h[:, None], s.weight.expand(ROWS, -1, -1))[:, 0],
    "recurred": _recurred,
    "looked up": _looked_up,
    "bag": _bag,
    "attended": _attended,
    "bits": _bits,
    "halves": _split,
    "rolled": lambda s: s.h.roll(2, 1),
    "transposed twice": lambda s: s.h.t().contiguous().t().tril(),
    "in half precision": lambda s: s.h.float().double(),
    "dropout": lambda s: F.dropout(s.h, 0.5),
    "noise": lambda s: s.h + torch.randn_like(s.g),
    "coins": lambda s: s.h * torch.bernoulli(torch.sigmoid(s.g.detach()).nan_to_num()),
    "detached": lambda s: s.h.detach() * s.g,
    "masked": lambda s: s.h.masked_fill(s.own_mask(), 0.5),
    "first repeated": lambda s: s.h[:, :1].expand(-1, WIDTH),
    "step of a number": lambda s: s.h + s.g.t()[_steps(s)][:, None],
    "put at a step": lambda s: s.h.t().index_put(_steps(s), s.g[:, 0], s.number(2) == 0).t(),
    "a list of rows": lambda s: torch.stack([row * 2 for row in s.h]),
}

# Row i of the result may follow from several rows. None has a size that hangs on numbers: those are
# noted as escapes, after which a map claims nothing.
MIXING: dict[str, Step] = {
    "other row": lambda s: s.h + s.h[_order()],
    "random order": lambda s: s.h + s.h[torch.randperm(ROWS)],
    "reversed": lambda s: s.h.flip(0),
    "less the batch's mean": lambda s: s.h - s.h.mean(0),
    "scan of the batch": lambda s: s.h.cumsum(0),
    "sorted batch": lambda s: s.h.sort(0).values,
    "softmax of the batch": lambda s: s.h.softmax(0),
    "by the batch's order": lambda s: s.h[s.g[:, 0].argsort()],
    "row of a number": lambda s: s.h[s.own_ids()],
    "gathered": lambda s: s.h.gather(0, s.own_ids()[:, None].expand(-1, WIDTH)),
    "selected": lambda s: s.h.index_select(0, s.own_ids()),
    "scattered": lambda s: s.h.scatter(0, s.own_ids()[:, None].expand(-1, WIDTH), s.g),
    "scattered and added": lambda s: s.h.scatter_add(1, s.own_ids()[:, None], s.g[:, :1]),
    "reduced": lambda s: s.h.scatter_reduce(1, s.own_ids()[:, None], s.g[:, :1], "amax"),
    "added at numbers": lambda s: s.h.index_add(0, s.own_ids(), s.g),
    "copied to numbers": lambda s: s.h.index_copy(0, _order(), s.g),
    "put": lambda s: s.h.index_put((s.own_ids(),), s.g),
    "put and added": lambda s: s.h.index_put((s.own_ids(), s.own_ids()), s.g[:, 0], True),
    "put at another's step": lambda s: s.h.t().index_put((s.own_ids(), _order()), s.g[:, 0]).t(),
    "windows": _windows,
    "wrong rows": lambda s: s.h.reshape(WIDTH, ROWS).flip(1).reshape(ROWS, WIDTH),
    "softmax of wrong rows": lambda s: s.h.reshape(3, 8).softmax(1).view(ROWS, WIDTH),
    "kernel": lambda s: torch.cdist(s.h, s.g) @ s.g,
    "similarity": lambda s: (s.h @ s.g.t()).softmax(-1) @ s.h,
    "of columns": lambda s: s.h @ (s.g.t() @ s.h),
    "first row": lambda s: s.h[:1].expand(ROWS, -1) * s.g,
    "joined": lambda s: torch.cat([s.h[: (k := s.number(3) + 1)], s.g[: ROWS - k]]),
    "convolved batch": lambda s: F.conv1d(s.h.t()[:, None], s.weight[:1, None, :3], padding=1)[
        :, 0
    ].t(),
    "filled as masked": lambda s: s.h.masked_scatter(s.own_mask(), s.g),
    "largest of all": lambda s: s.h / (1 + s.h.abs().max()),
    "nothing of all": lambda s: s.h + 0 * s.g.sum(),
    "counted": lambda s: (
        s.h
        + torch.zeros(ROWS)
        .to(s.h)
        .index_add(0, s.own_ids(), torch.ones(len(s.own_ids())).to(s.h))[:, None]
    ),
    "rolled batch": lambda s: s.h.roll(s.number(3) + 1, 0),
    "batch norm": lambda s: F.batch_norm(s.h, None, None, training=True),
    "mixed in pairs": lambda s: torch.lerp(s.h, s.h.flip(0), 0.3),
    "difference": lambda s: F.pad(s.h.diff(dim=0), (0, 0, 1, 0)),
}


def _into(write: Callable[[State, Tensor, Tensor], object]) -> Step:
    """A step that writes into a copy; what it had of the copy before sees what was written."""

    def step(s: State) -> Tensor:
        target, source = s.h.clone(memory_format=torch.contiguous_format), s.g
        write(s, target, source)
        return target

    return step


def _alias(write: Callable[[Tensor, Tensor], object]) -> Step:
    """A step that writes where autograd does not see it."""

    def step(s: State) -> Tensor:
        target = s.h.detach().clone(memory_format=torch.contiguous_format)
        source = s.g.detach()
        with torch.no_grad():
            write(target, source)
        return target + 0 * s.h.detach()

    return step


def _out(s: State, target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        torch.mul(source.detach(), s.h.detach(), out=target.detach())


def _as_parameter(target: Tensor, source: Tensor) -> None:
    held = torch.nn.Parameter(target)
    held.data[0] = source[1]


def _exchanged(target: Tensor, source: Tensor) -> None:
    other = target.view(-1)
    target.data = source.clone(memory_format=torch.contiguous_format)
    other[:2] = 7.0
    target[:, 0] += other.view(ROWS, WIDTH)[:, 3]


def _lists(target: Tensor, source: Tensor) -> None:
    torch._foreach_add_([target[0], target[1]], [source[2], source[1]])


def _set(target: Tensor, source: Tensor) -> None:
    target.set_(source.clone())
    target[3].zero_()


WRITING: dict[str, Step] = {
    "into rows": _into(lambda s, t, g: t[1:3].add_(g[:2])),
    "into a column": _into(lambda s, t, g: t[:, s.number(WIDTH)].copy_(g[:, 1])),
    "into the transposed": _into(lambda s, t, g: t.t()[s.number(WIDTH)].mul_(g[:, 0])),
    "into a flat view": _into(lambda s, t, g: t.view(-1)[:: s.number(3) + 1].add_(1.0)),
    "into strides": _into(lambda s, t, g: t.as_strided((5,), (s.number(4) + 1,), 2).add_(g[0, :5])),
    "into the diagonal": _into(lambda s, t, g: t.diagonal().copy_(g[:, 0])),
    "into a part": _into(lambda s, t, g: t.narrow(1, 1, 3).mul_(g.narrow(1, s.number(3), 3))),
    "where masked": _into(lambda s, t, g: t.masked_fill_(s.own_mask(), 1.0)),
    "at the mask": _into(lambda s, t, g: t.__setitem__(s.own_mask(), 2.0)),
    "at numbers": _into(lambda s, t, g: t.__setitem__(s.own_ids(), g)),
    "at numbers of columns": _into(
        lambda s, t, g: t.__setitem__((torch.arange(ROWS), s.own_ids()), g[:, 0])
    ),
    "filled": _into(lambda s, t, g: t.index_fill_(0, _order()[:2], 3.0)),
    "whole": _into(lambda s, t, g: t.copy_(g)),
    "one row for all": _into(lambda s, t, g: t.copy_(g[s.number(ROWS)])),
    "out": _into(_out),
    "through data": _into(lambda s, t, g: t.data[0].copy_(g.detach()[s.number(ROWS)])),
    "through detached": _into(lambda s, t, g: t.detach()[:, 2].add_(g.detach()[:, 0])),
    "out of a product": _alias(
        lambda t, g: torch.mm(g, torch.ones(WIDTH, WIDTH, dtype=g.dtype), out=t)
    ),
    "out of a list": _alias(lambda t, g: torch.cat([g[2:], g[:2]], out=t)),
    "out of a stack": _alias(lambda t, g: torch.stack([g[0], g[1]], out=t[2:])),
    "into one of many": _alias(lambda t, g: t.unbind(0)[2].add_(g[1])),
    "parameter": _alias(_as_parameter),
    "other memory": _alias(_exchanged),
    "lists": _alias(_lists),
    "set": _alias(_set),
    "random": _alias(lambda t, g: t[:2].normal_()),
    "zero": _alias(lambda t, g: t[-1].zero_()),
    "bits": _alias(lambda t, g: t.view(torch.int64)[0].bitwise_xor_(g.view(torch.int64)[1])),
    "resized": _alias(lambda t, g: t.resize_(2, 3).resize_(ROWS, WIDTH)),
    "imaginary": _alias(lambda t, g: torch.view_as_complex(t.view(ROWS, 3, 2)).mul_(1 + 2j)),
}


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """Steps one after the other.

    Attributes:
        steps: their kinds and names.
        seed: of what the steps decide.
    """

    steps: tuple[tuple[str, str], ...]
    seed: int

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """What the last steps made."""
        x, y, ids, mask, weight = values
        state = State([x, y], ids, mask, weight, np.random.default_rng([20_271_147, self.seed]))
        for kind, name in self.steps:
            made = _KINDS[kind][name](state)
            state.pool.append(made)
        return state.pool[-2:]

    def __str__(self) -> str:
        return " | ".join(f"{name} ({kind})" for kind, name in self.steps)


_KINDS = {"apart": APART, "mixing": MIXING, "writing": WRITING}


def program(seed: int) -> RandomProgram:
    """The program of a seed: 3 to 12 steps, of which a few mix."""
    rng = np.random.default_rng([20_271_146, seed])
    share = float(rng.choice([0.0, 0.1, 0.25]))
    weights = [0.7 - 0.5 * share, share, 0.3 - 0.5 * share]
    steps = []
    for _ in range(int(rng.integers(3, 13))):
        kind = str(rng.choice(list(_KINDS), p=weights))
        steps.append((kind, str(rng.choice(list(_KINDS[kind])))))
    return RandomProgram(tuple(steps), seed)


def arguments(seed: int) -> list[Owned]:
    """By rows for most seeds; for every fourth, numbers of a row belong to several examples."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(ROWS, (ROWS,), generator=generator)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.4
    weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2
    if seed % 4 != 3:
        return [*(Owned.rows(each) for each in (x, y, ids, mask)), Owned.shared(weight)]
    drawn = [
        Owned(each, torch.randint(SHARED, 3, each.shape, generator=generator))
        for each in (x, y, ids, mask)
    ]
    return [*drawn, Owned.shared(weight)]
