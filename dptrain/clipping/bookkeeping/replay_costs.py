"""The costs of layers that are run again for want of a rule: said once in a run."""

from __future__ import annotations

import dataclasses
import logging
import time

import torch

from dptrain.core import wait_for

_NAMED = 3  # layers of a type that are named

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Replays:
    """Times that one layer was run again.

    Attributes:
        kind: the layer's type, for people.
        seconds: that replays have taken, without finding out how to replay.
        before: what ``seconds`` was before those of the last call.
        timed: whether devices are waited for, so that this is so on them too.
    """

    name: str
    kind: str = ""
    seconds: float = 0.0
    before: float = 0.0
    timed: bool = True


class ReplayCosts:
    """Measures the replays of the first batch that has some, and warns of them."""

    def __init__(self) -> None:
        self._rules: dict[Replays, float] = {}  # what each had taken before
        self._start: float | None = None
        self._told = False

    def begin(self) -> None:
        """Note that a layer is called: the forward pass of a batch has begun, if not before."""
        if self._start is None and not self._told:
            self._start = time.perf_counter()

    def add(self, rule: Replays) -> None:
        """Note that the rule has run its layer again, for the first time in this batch or not."""
        if not self._told and rule not in self._rules:
            self._rules[rule] = rule.before
        rule.timed = not self._told

    def end(self, device: torch.device) -> None:
        """Note that the batch's clipped sum is formed."""
        if self._told or not self._rules or self._start is None:
            self._start = None
            return
        self._told = True
        wait_for(device)
        step = time.perf_counter() - self._start
        seconds = {rule: rule.seconds - before for rule, before in self._rules.items()}
        self._rules.clear()
        kinds: dict[str, list[Replays]] = {}
        for rule in reversed(seconds):  # as they came in the forward pass
            rule.timed = False
            kinds.setdefault(rule.kind, []).append(rule)
        lines = [
            f"{kind} ({_names(rules)}) {_share(sum(seconds[r] for r in rules), step)}"
            for kind, rules in kinds.items()
        ]
        _log.warning(
            "layers without a rule for per-example gradients were evaluated again for each "
            "example: %s of the time of the first batch's forward pass, backward pass and "
            "clipping. A rule for the type of layer, registered with dptrain.register_layer(), "
            "avoids this",
            "; ".join(lines),
        )


def _share(seconds: float, step: float) -> str:
    """A part of a step in tens of percent; how long it took follows from how much was drawn."""
    tens = round(10 * seconds / step)
    return f"about {10 * tens} %" if tens else "less than 5 %"


def _names(rules: list[Replays]) -> str:
    names = ", ".join(repr(rule.name) for rule in rules[:_NAMED])
    return names if len(rules) <= _NAMED else f"{names} and {len(rules) - _NAMED} more"
