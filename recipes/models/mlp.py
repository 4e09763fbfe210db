"""A multi-layer perceptron with group normalization, which keeps examples apart, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(
    *,
    inputs: int,
    outputs: int,
    widths: Sequence[int] | None = None,
    activation: str = "relu",
    groups: int = 0,
) -> nn.Sequential:
    """Dense layers with an activation between them; (batch, inputs) to logits, (batch, outputs).

    Args:
        inputs: features of an example.
        outputs: labels.
        widths: of the hidden layers; ``None`` is one of (inputs + outputs) / 2, rounded down, the
            model of the code of Koskela et al. 2023, section 6. An empty list is a linear model.
        activation: ``"relu"`` or ``"tanh"``.
        groups: of a GroupNorm before each activation; 1 is layer normalization, 0 none.

    Raises:
        ValueError: if a value is out of range, or ``groups`` does not divide every width.
    """
    if inputs < 1 or outputs < 1:
        raise ValueError(f"inputs={inputs} and outputs={outputs}: at least 1 of each")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")
    if widths is None:
        widths = [(inputs + outputs) // 2]
    if bad := [width for width in widths if width < 1]:
        raise ValueError(f"widths={list(widths)}: every layer has at least one unit, not {bad}")
    if groups < 0:
        raise ValueError(f"groups={groups}: give the groups of each GroupNorm, or 0 for none")
    if groups and (bad := [width for width in widths if width % groups]):
        raise ValueError(f"groups={groups} must divide every width, not so for {bad}")
    layers: list[nn.Module] = []
    before = inputs
    for width in widths:
        layers.append(nn.Linear(before, width))
        if groups:
            layers.append(nn.GroupNorm(groups, width))
        layers.append(ACTIVATIONS[activation]())
        before = width
    layers.append(nn.Linear(before, outputs))
    return nn.Sequential(*layers)
