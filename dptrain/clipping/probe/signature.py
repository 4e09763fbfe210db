"""Inference of a loss made outside of a module, from the gradient by the module's output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from dptrain.clipping.base.rows import HALF, summing_dtype
from dptrain.core import on_processor

_BATCHES = 16  # that are looked at until one can tell
_SINGLE = 3  # batches in a row that have to look so, where examples have one label each
_ROUNDED = 6  # the same for gradients that come in half precision, however many labels there are
# Batches of different sizes that have to tell the same of a reduction, and how far apart the
# largest and the smallest have to be: a sum and a mean then differ by much more than _EVEN.
_SIZES, _APART = 3, 1.05
_TOLERANCE = 1e-5
_EVEN = 1e-3  # relative difference of shares that are alike, and at least an eps of the gradient
_RESIDUAL = 1e-3  # of what a cross entropy does not explain, and at least an eps as well
_AT_ONCE = 2**19  # numbers that stay in a processor's cache
_LARGE = 2**22  # numbers of logits that are not kept until their gradient comes
_LOOKED_AT = 8  # of many classes, about so many besides the likeliest
_DTYPES = (torch.float32, torch.float64, *HALF)


@dataclasses.dataclass(frozen=True)
class Outlines:
    """Outline of logits, kept until their gradient comes: all of them would take the most memory.

    Attributes:
        likeliest: of each half of the classes, its log-probability, shape (targets, 2).
        which: these classes.
        some: log-probabilities of a few classes, shape (targets, few).
        few: these classes, the same for all targets.
    """

    likeliest: torch.Tensor
    which: torch.Tensor
    some: torch.Tensor
    few: torch.Tensor

    @classmethod
    def of(cls, y: torch.Tensor, classes: int) -> Outlines:
        """Outlines of logits with the classes in this dimension."""
        count = y.shape[classes]
        half, step = count // 2, max(count // _LOOKED_AT, 1)
        few = torch.arange(step // 2, count, step, device=y.device)
        found = []
        for lines in _lines(y, classes):
            whole = lines.logsumexp(1, keepdim=True)
            first, second = lines[:, :half].max(1), lines[:, half:].max(1)
            likeliest = torch.stack([first.values, second.values], 1) - whole
            which = torch.stack([first.indices, second.indices + half], 1)
            found.append((likeliest, which, lines[:, few] - whole))
        likeliest, which, some = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cls(likeliest, which, some, few)


class LossSignature:
    """Recognizes a cross entropy that was divided by a number that the batch decides.

    Also one that does not reduce over the rows as it was declared to. A mean divides a row's share
    by the number of rows and a sum does not: three batches of different sizes tell, whatever
    constant the loss was multiplied by. One example would otherwise change the scale of all others'
    gradients before they are clipped.

    The gradient of Σ_t c_t·CE(y_t) by the logits is c_t (softmax(y_t) - e_t), which gives away the
    targets and every c_t. With targets that are ignored, or with class weights, a mean over what
    counts in the *batch* has Σ c_t = 1 while the examples' shares of it differ. Reduced example by
    example, the shares are equal, or do not add up to 1 but by chance. That chance is small for
    tokens, of which the first such batch is refused, and not for class weights (those of a balanced
    batch may well average to 1), where three batches in a row have to look so.

    A gradient in half precision, as autocast has it, gives the shares to half an eps of its dtype
    (2⁻⁸ in bfloat16), so that chance is larger: there six batches in a row have to look so, where
    rounding explains what is left of Σ c_t - 1.

    Not recognized: other losses, label smoothing, losses that are scaled.

    Args:
        unseen: a context for what is done in the backward pass and is no part of it.
    """

    def __init__(
        self, unseen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        self._unseen = unseen
        self._looked = 0
        self._alike = 0  # batches in a row of single labels that looked normalized by the batch
        self._told = False
        self._even: dict[int, float] = {}  # by the number of rows, the share of each

    def look_at(
        self, outputs: Iterable[tuple[torch.Tensor, int]], rows: int, reduction: str
    ) -> None:
        """Look at the gradients by these outputs when they come, while none has told anything.

        Args:
            outputs: of the module, and which dimension of each is the rows.
            rows: in the batch, padding included.
            reduction: ``"mean"`` or ``"sum"``, as the loss was declared to reduce over them.
        """
        if self._told or self._looked >= _BATCHES or rows < 2:
            return
        for y, d in outputs:
            if y.dim() > max(1, d) and y.shape[d] == rows and y.dtype in _DTYPES:
                first = y.detach().movedim(d, 0)
                dims = [k for k in {1, y.dim() - 1} if first.shape[k] > 1]
                kept = {k: _kept(first, k) for k in dims}
                y.register_hook(functools.partial(self._look, kept, reduction, d))

    def _look(
        self,
        kept: Mapping[int, Callable[[], Outlines]],
        reduction: str,
        dimension: int,
        gradient: torch.Tensor,
    ) -> None:
        gradient = gradient.movedim(dimension, 0)
        with self._unseen():
            self._looked += 1
            for classes, outlines in kept.items():
                shares = _shares(outlines(), gradient, classes)
                if shares is not None:
                    self._judge(shares, reduction, gradient.dtype, single=gradient.dim() == 2)
                    return

    def _judge(
        self, shares: torch.Tensor, reduction: str, dtype: torch.dtype, *, single: bool
    ) -> None:
        largest = float(shares.abs().amax())
        alike = _limit(_EVEN, dtype)
        even = float(shares.amax() - shares.amin()) <= alike * largest
        if even and largest > 0:
            self._compare(len(shares), float(shares.mean()), reduction, alike)
        if even or int((shares != 0).sum()) < 2:
            return
        tolerance, wanted = min(_TOLERANCE, 0.1 / len(shares)), _SINGLE if single else 1
        if dtype in HALF:
            # Each is off by half an eps of itself at most, half of that if its digits are large,
            # and those that are equal by the same: three to six of their sum's standard deviations.
            off = torch.finfo(dtype).eps / (4 * 3**0.5)
            values, counts = shares.unique(return_counts=True)
            tolerance, wanted = 6 * off * float((values * counts).norm()), _ROUNDED
        normalized = abs(float(shares.sum()) - 1) <= tolerance
        self._alike = self._alike + 1 if normalized else 0
        self._told = not normalized
        if self._alike >= wanted:
            raise RuntimeError(
                "the loss divides by a number that depends on the whole batch, since the "
                "examples' shares of it differ and add up to 1, as in a cross entropy with "
                "reduction='mean' and ignored targets or class weights. One example then "
                "changes the gradients of all others before they are clipped. Use a loss from "
                "dptrain.losses, which reduces each example by itself"
            )

    def _compare(self, rows: int, share: float, reduction: str, alike: float) -> None:
        """Refuse what batches of different sizes show to be reduced in the other way."""
        self._even[rows] = share
        if len(self._even) < _SIZES or max(self._even) < _APART * min(self._even):
            return
        other = "sum" if reduction == "mean" else "mean"
        # A number that would be the same in all batches if the loss were the other one.
        constants = [c * r if other == "mean" else c for r, c in self._even.items()]
        if max(constants) - min(constants) > alike * max(constants):
            return
        sizes = ", ".join(map(str, sorted(self._even)))
        raise RuntimeError(
            f"Gradients(loss={reduction!r}): the loss is a {other} over the rows of the batch, "
            f"as batches of {sizes} rows show. Its gradients would be scaled by the number of "
            "rows, so one example would change those of all others before they are clipped. Set "
            f"Gradients(loss={other!r}), or reduce the loss by a {reduction}"
        )


def _limit(least: float, dtype: torch.dtype) -> float:
    """A relative difference that is taken for none; in half precision an eps at least."""
    return max(least, torch.finfo(dtype).eps) if dtype in HALF else least


def _kept(y: torch.Tensor, classes: int) -> Callable[[], Outlines]:
    """Outlines when they are asked for; of large logits they are made at once."""
    if y.numel() <= _LARGE:
        return functools.partial(Outlines.of, y, classes)
    found = Outlines.of(y, classes)
    return lambda: found


def _lines(x: torch.Tensor, classes: int) -> Iterator[torch.Tensor]:
    """Logits of one target after the other, shape (targets, classes), a part at a time.

    Logits of a decoder may be what takes the most memory of all, and as many numbers again as each
    step below makes of them would be the peak.
    """
    most = _AT_ONCE if on_processor(x) else 2**7 * _AT_ONCE
    x = x.movedim(classes, -1)
    rows = max(1, most // max(1, x[:1].numel()))
    for some in x.split(rows):
        lines = some.reshape(-1, x.shape[-1])
        lines = lines.to(summing_dtype(lines))
        yield from lines.split(max(1, most // max(1, x.shape[-1])))


def _shares(kept: Outlines, gradient: torch.Tensor, classes: int) -> torch.Tensor | None:
    """Σ_t c_t of every row, shape (rows,), if the gradient is a cross entropy's by its logits.

    By the classes whose probabilities are kept, signs and sums.
    """
    found, at, residual = [], 0, _limit(_RESIDUAL, gradient.dtype)
    off = squares = 0.0
    for lines in _lines(gradient, classes):
        now = slice(at, at + len(lines))
        at = now.stop
        target = lines.argmin(1, keepdim=True)
        # Of two classes one at least is not the target.
        likeliest, which = kept.likeliest[now], kept.which[now]
        best = likeliest.masked_fill(which == target, -torch.inf).argmax(1, keepdim=True)
        c = lines.gather(1, which.gather(1, best)) / likeliest.gather(1, best).exp()
        lengths = lines.square().sum(1, keepdim=True)
        told = lengths > 0  # what is ignored has no gradient at all
        c = torch.where(told, c, 0.0)
        certain = told & ~(lengths >= 1e-8 * c.square())
        if bool(certain.any()) or bool((c < -_TOLERANCE).any()):
            return None
        beside = kept.few != target
        seen, expected = lines[:, kept.few] * beside, c * kept.some[now].exp() * beside
        if not float((seen - expected).norm()) <= residual * float(seen.norm()):
            return None
        # Together the other classes have what the target lacks, and none has its sign.
        others = lines.scatter(1, target, 0.0).clamp_(max=0)
        off += float(lines.sum(1).square().sum() + others.square().sum())
        squares += float(lengths.sum())
        found.append(c[:, 0])
    if not off <= residual**2 * squares:
        return None
    return torch.cat(found).view(len(gradient), -1).sum(1)
