"""Check that a loss function keeps the examples of a batch apart, on a few made-up rows."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.core import seeded_globals

_ROWS = 4
_POSITIONS = 2
_MORE = 2  # made-up targets besides the first, of which some may be alike by chance
_SEED = 0x6C6F7373


def ties_rows(criterion: Callable[..., Any], reduction: str) -> bool | None:
    """True if a loss of several rows is another than the mean, or sum, of the rows' own losses.

    It is tried on predictions and targets of the kinds that torch's criteria take; ``None`` if it
    takes none of these, draws numbers, or ties the rows of some kinds and not those of others, so
    that nothing is known of those that it is meant for.
    """
    several: dict[int, bool] = {}
    single: dict[int, bool] = {}
    for kind, arguments in _candidates(criterion):
        if (answer := _ties(criterion, reduction, arguments)) is not None:
            answers = several if arguments[0].dim() > 1 else single
            answers[kind] = answers.get(kind, False) or answer
    # To some, numbers without a second dimension are one example.
    found = set((several or single).values())
    return found.pop() if len(found) == 1 else None


def _ties(
    criterion: Callable[..., Any], reduction: str, arguments: Sequence[torch.Tensor]
) -> bool | None:
    with torch.no_grad(), seeded_globals(_SEED), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that are not the user's
        try:
            own: Any = copy.deepcopy(criterion)
            together = _number(own(*arguments))
            again = _number(own(*arguments))
            alone = torch.stack(
                [_number(own(*[a[k : k + 1] for a in arguments])) for k in range(len(arguments[0]))]
            )
        except Exception:  # of the user's code, on what it is not for
            return None
        if not (torch.isfinite(alone).all() and torch.isfinite(together) and together == again):
            return None
    expected = alone.mean() if reduction == "mean" else alone.sum()
    size = alone.abs().sum()  # terms may cancel
    return bool((together - expected).abs() > 1e-4 * size + 1e-6)


def _number(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError("no loss")
    return loss.detach().reshape(()).cpu().double()


def _candidates(criterion: Callable[..., Any]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Made-up arguments, and their kind: as many classes as the criterion has weights, if any."""
    held = [t for t in _tensors(criterion) if t.dim()]
    classes = held[0].shape[-1] if held else _ROWS + 1
    rows = _ROWS if classes != _ROWS else _ROWS - 1  # that neither is taken for the other
    generator = torch.Generator().manual_seed(_SEED)
    device = held[0].device if held else torch.device("cpu")

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for _ in range(1 + _MORE):
        labels = torch.randint(classes, (rows,), generator=generator).to(device)
        tokens = torch.randint(classes, (rows, _POSITIONS), generator=generator).to(device)
        x, y = drawn(rows, classes), drawn(rows, classes)
        shares, signs = x.sigmoid(), y.sign()
        kinds: tuple[tuple[torch.Tensor, ...], ...] = (
            (x, labels),
            (x.log_softmax(1), labels),
            (drawn(rows, _POSITIONS, classes), tokens),
            (x, y),
            (x, y.softmax(1)),
            (shares, (y > 0).float()),
            (x, (y > 0).float()),
            (x, signs),
            (x, (y > 0).long()),
            (x[:, 0], y[:, 0], signs[:, 0]),
            (x, y, signs[:, 0]),
            (x, y, drawn(rows, classes)),
            (x, y, drawn(rows, classes).exp()),
            (x, y, labels),
        )
        yield from enumerate(kinds)


def _tensors(criterion: Callable[..., Any]) -> list[torch.Tensor]:
    if isinstance(criterion, nn.Module):
        return list(itertools.chain(criterion.buffers(), criterion.parameters()))
    return [v for v in getattr(criterion, "__dict__", {}).values() if isinstance(v, torch.Tensor)]
