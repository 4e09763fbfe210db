"""Clipping styles: an example's gradient is shortened to R as a whole, by groups, or always."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import row_norms
from dptrain.core import JsonValue, checks, sent

# Keeps norm · factor below R after float32 rounding; the value Opacus uses, for equal runs.
STABILITY = 1e-6

LEAST_GAMMA = 1e-6


class ClippingStyle(JsonValue, ABC, family="clipping style"):
    """From the norms of an example's gradient, by groups of parameters, to factors on it.

    Whatever the norms, what is left of an example's gradient has norm R at most: the sensitivity of
    the clipped sum is R under every style, so noise and accountants do not depend on it
    (docs/theory/clipping.md#thm-clip; ``test_neighboring_batches_have_sums_within_the_bound``).

    A style of one's own is a frozen dataclass that derives from this class; a checkpoint holds
    ``to_dict``, and a run is resumed in the same style only. The guarantee rests on what its
    ``clip`` returns, so that is called for every example alone, and checked at every step
    (``clip_factors``).
    """

    @abstractmethod
    def groups(self, names: Sequence[str]) -> list[int]:
        """The number of each parameter's group, from 0; every group has a parameter.

        Args:
            names: of the trainable parameters, as in ``module.named_parameters()``.

        Raises:
            ValueError: if the style does not put each parameter in exactly one group.
        """

    @abstractmethod
    def clip(self, norms: torch.Tensor, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors on the groups' gradients, and the norm of what is then left of each example.

        Rows with a norm that is NaN or infinite may come out as anything: the caller drops them.

        Args:
            norms: ‖g_ig‖₂ of example i in group g, shape (rows, groups).
            max_grad_norm: R > 0.

        Returns:
            (factors, contributed), of shapes (rows, groups) and (rows,), where
            √Σ_g (factor_ig · norm_ig)² ≤ contributed_i ≤ R, up to rounding.
        """

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """The style that ``to_dict`` gave, or a configuration states.

        Raises:
            ValueError: if the type or an argument is unknown, or an argument is out of range.
        """
        members: dict[str, Any] = JsonValue._families[cls._family]
        if not isinstance(value, Mapping):
            raise ValueError(
                f"a {cls._family} must be read from a mapping, not from {value!r:.200}"
            )
        arguments = {name: item for name, item in value.items() if name != "type"}
        name = value.get("type")
        if not isinstance(name, str) or name not in members:
            raise ValueError(f"unknown {cls._family} type {name!r}; known: {sorted(members)}")
        try:
            return members[name](**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Flat(ClippingStyle):
    """The whole gradient times min(1, R/‖g‖), as in DP-SGD (Abadi et al. 2016)."""

    def groups(self, names: Sequence[str]) -> list[int]:
        """One group."""
        return [0] * len(names)

    @override
    def clip(self, norms: torch.Tensor, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        norms = _single(norms, self)
        factors = (max_grad_norm / (norms + STABILITY)).clamp(max=1.0)
        return factors, norms[:, 0].clamp(max=max_grad_norm)


FLAT = Flat()
"""The style that is used unless another is named."""


@dataclasses.dataclass(frozen=True)
class PerLayer(ClippingStyle):
    """Every layer's gradient is clipped by itself, to R/√G where there are G layers.

    The parameters of a layer are those of one module: ``"conv.weight"`` and ``"conv.bias"``. The
    equal split follows McMahan et al. 2018 (arXiv 1710.06963), flat over the layers.
    """

    def groups(self, names: Sequence[str]) -> list[int]:
        """A group for every module, in the order of the names."""
        layers = [name.rpartition(".")[0] for name in names]
        number = {layer: g for g, layer in enumerate(dict.fromkeys(layers))}
        return [number[layer] for layer in layers]

    @override
    def clip(self, norms: torch.Tensor, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        groups = norms.shape[1]
        return _shorten(norms, [max_grad_norm / math.sqrt(groups)] * groups)


@dataclasses.dataclass(frozen=True, init=False)
class PerGroup(ClippingStyle):
    """Groups of parameters are clipped by themselves, group g to R_g, with Σ_g R_g² = R².

    Args:
        groups: for each group the patterns (as in ``fnmatch``, with case) of its parameters'
            names. Every trainable parameter has to be in exactly one group, and every pattern has
            to match one: frozen parameters are none.
        shares: a positive number s_g for each group, and R_g = R s_g / √Σ s²; ``None``: all equal.

    Raises:
        TypeError: if they are no mappings of names to patterns and to numbers.
        ValueError: if there is no group, or one without a pattern, or the shares are not positive
            numbers, one for each group.
    """

    patterns: tuple[tuple[str, tuple[str, ...]], ...]
    shares: tuple[tuple[str, float], ...] | None

    def __init__(
        self, groups: Mapping[str, Sequence[str]], shares: Mapping[str, float] | None = None
    ) -> None:
        if not isinstance(groups, Mapping):
            raise TypeError(f"groups={groups!r}: a mapping from names of groups to their patterns")
        if not groups:
            raise ValueError(f"groups={groups!r}: name at least one group, e.g. {{'all': ('*',)}}")
        for name, patterns in groups.items():
            if isinstance(patterns, str) or not isinstance(patterns, Sequence):
                raise TypeError(
                    f"groups[{name!r}]={patterns!r}: a sequence of patterns, e.g. ('layer.*',)"
                )
            if not patterns or not all(isinstance(p, str) and p for p in patterns):
                raise ValueError(
                    f"groups[{name!r}]={patterns!r}: one pattern at least, and all of them text, "
                    "e.g. ('layer.*',)"
                )
        object.__setattr__(self, "patterns", tuple((n, tuple(p)) for n, p in groups.items()))
        object.__setattr__(self, "shares", _checked_shares(shares, list(groups)))

    def groups(self, names: Sequence[str]) -> list[int]:
        """The group whose patterns match, in the order in which the groups were given."""
        found: list[int] = []
        used: set[tuple[str, str]] = set()
        for name in names:
            hits = [
                (number, group, pattern)
                for number, (group, patterns) in enumerate(self.patterns)
                for pattern in patterns
                if fnmatch.fnmatchcase(name, pattern)
            ]
            used.update((group, pattern) for _, group, pattern in hits)
            owners = dict.fromkeys(group for _, group, _ in hits)
            if len(owners) != 1:
                where = f"in several groups, {list(owners)}" if owners else "in no group"
                raise ValueError(
                    f"clipping=PerGroup: parameter {name!r} is {where}: the patterns of exactly "
                    f"one of the groups {[group for group, _ in self.patterns]} must match it"
                )
            found.append(hits[0][0])
        for group, patterns in self.patterns:
            if idle := [pattern for pattern in patterns if (group, pattern) not in used]:
                raise ValueError(
                    f"clipping=PerGroup: pattern(s) {idle} of group {group!r} match no trainable "
                    f"parameter: remove them, or choose among {list(names)}"
                )
        return found

    @override
    def clip(self, norms: torch.Tensor, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _shorten(norms, self.bounds(max_grad_norm))

    def bounds(self, max_grad_norm: float) -> list[float]:
        """R_g of each group, in the order in which they were given."""
        shares = dict(self.shares) if self.shares else {}
        own = [shares.get(name, 1.0) for name, _ in self.patterns]
        # hypot neither over- nor underflows, and of one share it is that share: G = 1 is Flat.
        whole = math.hypot(*own)
        return [max_grad_norm * (share / whole) for share in own]

    def to_dict(self) -> dict[str, Any]:
        """``type``, ``groups`` and ``shares``, as the arguments."""
        return {
            "type": type(self).__name__,
            "groups": {name: list(patterns) for name, patterns in self.patterns},
            "shares": None if self.shares is None else dict(self.shares),
        }


@dataclasses.dataclass(frozen=True)
class Automatic(ClippingStyle):
    """Every gradient times R/(‖g‖ + γ), short ones too: AUTO-S (Bu et al. 2022, arXiv 2206.07136).

    R is then a factor on the learning rate, and need not be tuned. What an example contributes has
    norm R‖g‖/(‖g‖ + γ) < R, which is close to R for most: an individual filter has little to save.

    Args:
        gamma: γ, in units of the gradients' norm, at least 10⁻⁶: below, a gradient too short for
            the squares of its entries to be float32 numbers would be lengthened beyond R.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is smaller, or not finite.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        gamma = checks.number("gamma", self.gamma, minimum=LEAST_GAMMA, remedy="e.g. 0.01")
        object.__setattr__(self, "gamma", gamma)

    def groups(self, names: Sequence[str]) -> list[int]:
        """One group."""
        return [0] * len(names)

    @override
    def clip(self, norms: torch.Tensor, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        padded = _single(norms, self) + self.gamma
        return max_grad_norm / padded, max_grad_norm * (norms / padded)[:, 0]


PROVEN = (Flat, PerLayer, PerGroup, Automatic)
"""The styles whose bound is a theorem; of any other it is checked as it is used."""


def _shorten(norms: torch.Tensor, bounds: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Shorten each group to its bound."""
    if norms.shape[1] != len(bounds):
        raise ValueError(f"norms of {norms.shape[1]} group(s) for a style with {len(bounds)}")
    limits = sent(torch.tensor(bounds, dtype=norms.dtype), norms)
    # The order in which torch divides a number by a tensor, as Flat does: one group is the same.
    factors = ((norms + STABILITY).reciprocal() * limits).clamp(max=1.0)
    left = torch.minimum(norms, limits)
    # One group's norm is left as it is: that of a row of one may underflow.
    return factors, left[:, 0] if len(bounds) == 1 else row_norms(left)


def _single(norms: torch.Tensor, style: ClippingStyle) -> torch.Tensor:
    if norms.shape[1] != 1:
        raise ValueError(f"norms of {norms.shape[1]} groups for {style}, which has one")
    return norms


def _checked_shares(shares: Any, names: list[str]) -> tuple[tuple[str, float], ...] | None:
    if shares is None:
        return None
    if not isinstance(shares, Mapping):
        raise TypeError(
            f"shares={shares!r}: must be a mapping from names of groups to numbers, or None"
        )
    if set(shares) != set(names):
        raise ValueError(
            f"shares={shares!r}: must have one number for each of the groups {names}, and no other"
        )
    return tuple((n, checks.number(f"shares[{n!r}]", shares[n], above=0)) for n in names)


def parameter_groups(
    style: ClippingStyle, module: nn.Module, parameters: Sequence[nn.Parameter]
) -> list[int]:
    """The number of each parameter's group, from 0.

    Args:
        style: how gradients are clipped.
        module: the user's.
        parameters: its trainable ones, in the optimizer's order.

    Raises:
        TypeError: if ``style`` is no clipping style.
        ValueError: if it does not put each parameter in one group.
    """
    if not isinstance(style, ClippingStyle):
        raise TypeError(
            f"clipping={style!r}: expected a clipping style, e.g. Flat(), PerLayer() or Automatic()"
        )
    names = {p: name for name, p in module.named_parameters()}
    groups = style.groups([names[p] for p in parameters])
    count = max(groups, default=-1) + 1
    if len(groups) != len(parameters) or set(groups) != set(range(count)):
        raise ValueError(
            f"clipping={style}: its groups() returned {groups} for {len(parameters)} parameters: "
            "it must return one number per parameter, and must use all numbers from 0 up"
        )
    return groups
