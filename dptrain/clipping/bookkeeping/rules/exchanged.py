"""A layer's own parameters, and what stands for them while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def never_called(module: nn.Module) -> bool:
    """True if a module has no forward of its own: lists of layers or parameters, and the like.

    Whoever holds it uses its parameters.
    """
    found = getattr(type(module), "forward", None)  # TorchScript has none there
    return found is nn.Module.forward and "forward" not in vars(module)


def not_called(prefix: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer, and what holds parameters for it without being called by itself."""
    yield prefix, layer
    for name, child in layer.named_children():
        if name == "parametrizations":  # torch.nn.utils.parametrize: called to have the weights
            yield from child.named_modules(prefix=joined(prefix, name))
        elif never_called(child):
            yield from not_called(joined(prefix, name), child)


class Exchanged:
    """Modules with other tensors in the place of their own parameters, within the context.

    Recurrent layers list theirs a second time, and list what they find in such a context: that
    is put back as well.

    Args:
        holders: modules, by their names.
        change: what stands for a parameter, by its full name and itself; ``None``: itself,
            detached.
    """

    def __init__(
        self,
        holders: Iterable[tuple[str, nn.Module]],
        change: Callable[[str, nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        # The attributes themselves: nn.Module looks at each that is set, for longer than all of
        # this takes. A call may come within one of another layer that has changed them too.
        self._kept: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for prefix, m in holders:
            own, before = vars(m), {}
            for name in _LISTED:
                if name in own:
                    before[name] = own[name]
            self._kept.append((prefix, own, before))
        self._change = change

    def __enter__(self) -> None:
        for prefix, own, before in self._kept:
            own["_parameters"] = changed = dict(before["_parameters"])
            for name, p in changed.items():
                if p is not None:
                    changed[name] = self._changed(prefix, name, p) if self._change else p.detach()

    def _changed(self, prefix: str, name: str, p: nn.Parameter) -> torch.Tensor:
        assert self._change is not None
        return self._change(joined(prefix, name), p)

    def __exit__(self, *_: object) -> None:
        for _prefix, own, before in self._kept:
            own.update(before)


_LISTED = ("_parameters", "_flat_weights", "_flat_weight_refs")


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Context past ``parametrize.cached()``: weights computed before a call are not followed."""
    module: Any = parametrize
    kept = module._cache_enabled, module._cache
    try:
        module._cache_enabled, module._cache = 0, {}
        yield
    finally:
        module._cache_enabled, module._cache = kept


def joined(prefix: str, name: str) -> str:
    """Full name of a part within a whole, whose own name may be empty."""
    return ".".join(part for part in (prefix, name) if part)
