"""Several optimizers in the place of one: Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dptrain.core import checks


class JoinedOptimizer(torch.optim.Optimizer):
    """Optimizers of disjoint parameters, as the one optimizer that a private run has.

    A step of a private run releases the gradients of all parameters at once, so it has one
    optimizer, and ``torch.optim.Muon`` takes nothing but matrices. ``step`` lets each optimizer
    step on its own parameters, in the order given. Their groups are this one's groups (the very
    same objects), so that schedulers built on the joined optimizer, or on one of its parts, set
    their learning rates.

    Args:
        optimizers: at least one; each steps by ``p.grad`` alone.

    Attributes:
        parts: the optimizers.

    Raises:
        TypeError: if one is no torch optimizer.
        ValueError: if there is none, if a parameter is in two of them, or if one has scales of its
            own for gradients (``ScaledAdam``), which apply to a whole run.

    Example:
        >>> optimizer = JoinedOptimizer(
        ...     torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        ...     torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3))
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        owner = type(self).__name__
        if not optimizers:
            raise ValueError(f"{owner}(): name at least one optimizer")
        held: set[torch.Tensor] = set()
        for position, optimizer in enumerate(optimizers):
            checks.instance(f"optimizer {position}", optimizer, torch.optim.Optimizer, owner=owner)
            if hasattr(optimizer, "scales"):
                raise ValueError(
                    f"{owner}: optimizer {position} is a {type(optimizer).__name__}, which "
                    "rescales the gradients of the whole run before they are clipped: use it "
                    f"alone, without {owner}"
                )
            own = {p for group in optimizer.param_groups for p in group["params"]}
            if twice := [tuple(p.shape) for p in own & held]:
                raise ValueError(
                    f"{owner}: optimizer {position} holds parameter(s) of shape {twice} that an "
                    "earlier one holds too, so both would update them: give each parameter to one "
                    "optimizer"
                )
            held |= own
        self.parts = optimizers
        self._built = False
        super().__init__([g for o in optimizers for g in o.param_groups], {})
        self._built = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts, "_built": True}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part once.

        Args:
            closure: evaluates the loss again, once, before the first of them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it is one of the parts that has to step on them.

        Raises:
            ValueError: always.
        """
        if self._built:
            raise ValueError(
                f"{type(self).__name__}: add the group to one of the optimizers before joining them"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: if it is not of as many optimizers.
        """
        states = state_dict.get("parts", [])
        if len(states) != len(self.parts):
            raise ValueError(
                f"state_dict comes from {len(states) or 'no'} joined optimizers, and there are "
                f"{len(self.parts)} here: join the same optimizers in the same order"
            )
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        # Loading gives an optimizer new groups.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def single_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that step, joined ones taken apart."""
    if isinstance(optimizer, JoinedOptimizer):
        for part in optimizer.parts:
            yield from single_optimizers(part)
    else:
        yield optimizer
