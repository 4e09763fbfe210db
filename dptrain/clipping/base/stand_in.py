"""Stand-ins for a method of one module, until they are removed; runs of a module past them."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_NO_EXPORT = (
    "this module is being trained by a private run, which has replaced the forward methods of "
    "its layers: export, trace or script copy.deepcopy(module), which belongs to no run, or end "
    "the run with private.detach() first"
)


class StandIn:
    """Object that is called in place of a method of one module, and knows the method.

    It lies in the module's own ``__dict__``, where Python looks first, and looks like the method to
    ``inspect.signature``. Copies of the module (by ``copy`` or ``pickle``) have their class's
    method again: a copy of this one would run the module that was copied, with its parameters.

    Attributes:
        own: the method, the module's or what some library put there before.
        attached: whether it does more than to call that one.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        # What nn.Module and torch.compile's make of an assignment is another thing each.
        attributes = vars(module)
        self._before = {name: attributes[name]} if name in attributes else {}
        self.own: Any = getattr(module, name)
        self.attached = True
        functools.update_wrapper(self, self.own, updated=())
        attributes[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the method."""
        if self.attached and _exporting():
            raise RuntimeError(_NO_EXPORT)
        if args and args[0] is self._module:  # accelerate makes a method of whatever is there
            args = args[1:]
        return self.run(*args, **kwargs) if self.attached else self.own(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do this in place of the method."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__globals__"):  # which torch.export and torch.jit.script read
            raise AttributeError(_NO_EXPORT)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def remove(self) -> None:
        """Give the module its method back; what was put over this one meanwhile stays."""
        attributes = vars(self._module)
        if self.attached and attributes.get(self._name) is self:
            del attributes[self._name]
            attributes.update(self._before)
        self.attached = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> Any:
        # The class's: there is no other when it is loaded.
        return getattr, (self._module, self._name)


def stand_in(module: nn.Module, name: str) -> StandIn | None:
    """The stand-in for a method of the module, below whatever was put over it."""
    found: Any = vars(module).get(name)
    while found is not None:
        inner = getattr(found, "__func__", None)
        for each in (found, inner):
            if isinstance(each, StandIn) and each.attached:
                return each
        found = getattr(found, "__wrapped__", None)
    return None


def _exporting() -> bool:
    """True if torch.jit.trace or torch.export is at work, with what a run does for gradients."""
    if not torch.is_grad_enabled():
        return False
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


_depths: Counter[int] = Counter()  # by threads


@contextlib.contextmanager
def untapped() -> Iterator[None]:
    """Context in which layers run their own forward, in this thread and in those of autograd.

    Autograd runs checkpointed layers again in threads of its own, where no context variable of
    this one would be known. Other threads of the user's may have a run of their own.
    """
    thread = threading.get_ident()
    _depths[thread] += 1
    try:
        yield
    finally:
        _depths[thread] -= 1
        if not _depths[thread]:
            del _depths[thread]


def is_untapped() -> bool:
    """True if layers run their own forward."""
    if not _depths:
        return False
    return threading.get_ident() in _depths or _is_autograds()


def _is_autograds() -> bool:
    """True if this thread was begun by torch, and not by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)
