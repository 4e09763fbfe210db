"""The parts that a run attaches to the user's module, and takes off again."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.stand_in import StandIn, stand_in
from dptrain.clipping.bookkeeping.clipper import BookkeepingClipper
from dptrain.clipping.bookkeeping.layer_tap import LayerTap
from dptrain.clipping.bookkeeping.operations import OperationsRule
from dptrain.clipping.bookkeeping.readers import Readers
from dptrain.clipping.bookkeeping.rules.layers import register_imported
from dptrain.clipping.bookkeeping.rules.rule import LayerRule
from dptrain.clipping.bookkeeping.rules.table import layers_with_rules, refusals
from dptrain.clipping.mixing_layers import refuse_training_mode
from dptrain.clipping.owners import OwnerWatch
from dptrain.clipping.probe import AtHand, RowProbe, Witness


def check_layers(module: nn.Module) -> str | None:
    """The first layer that keeps a module from bookkeeping, the reason and the remedy."""
    register_imported()
    found = {**refusals(module, OperationsRule), **_computed_before_calls(module)}
    if not found:
        return None
    name, why = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"layer {name!r}{more}: {why}. Register a rule for it with dptrain.register_layer(), or "
        "freeze its parameters with requires_grad_(False)"
    )


_LEAK = (
    "parameter {name!r} is used outside the layer that owns it{by} (for instance through "
    "torch.nn.functional, or in a penalty on the weights), where its per-example gradients cannot "
    "be computed. Call the layer instead, or use the optimizer's weight_decay. If the use is in "
    "the training loop and not in the module, Gradients(mode='hooks') ignores its gradients"
)


_CHECKPOINTED = (
    "{names}: the forward of this layer uses activation checkpointing internally, and "
    "per-example gradients of parameters used inside the checkpoint cannot be computed. "
    "Checkpoint the whole layer (checkpoint(layer, x)), or move these parameters into a module "
    "that the checkpoint calls. Otherwise freeze them with requires_grad_(False)"
)


class Taps:
    """The parts attached to the user's own module, by which its layers report to the book.

    One forward and one backward pass with any loss (Bu et al. 2022, arXiv 2210.00038;
    docs/theory/clipping.md#thm-bookkeeping; ``test_every_layer``): autograd propagates the output
    gradients, and no parameter is part of its graph. A gradient that reaches a parameter
    nevertheless comes from a use that no rule knows, and is refused.

    The module stays what it was: of its class, with its methods and the names of its state.
    Methods are stood in for (``StandIn``), and copies of the module have none of it.

    Args:
        module: the user's; compiled ones run compiled between the layers that have a rule.
        book: what layers report to.
        fed: what the module is fed at the moment.
        when: one of ``PROBES``.
        together: of the probe, where other processes have parts of the module.
        owners: follows some of the steps.

    Attributes:
        module: as given.
        bare: the same, or what ``torch.compile`` was given: the names are its own.
        book: as given.
        probe: looks at what the module is called with.
    """

    def __init__(
        self,
        module: nn.Module,
        book: BookkeepingClipper,
        *,
        fed: Callable[[], AtHand | None],
        when: str = "shapes",
        together: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None,
        owners: OwnerWatch,
    ) -> None:
        self.module = module
        self.bare = bare = uncompiled(module)
        self.probe = book.probe = RowProbe(
            bare,
            self.reporting_to,
            fed,
            when=when,
            settle=self.settling,
            follow=self.follow_escaped,
            together=together,
            around=self._innermost,
            owners=owners,
        )
        self.book = book
        self._reports_to: Book = book
        self._taps: list[LayerTap] = []
        self._escaped: set[str] = set()  # parameters that a gradient reached past the taps
        self._readers = Readers(self.bare)
        self._unread: list[nn.Module] = []  # layers of which the next passes show who reads them
        self._called = False  # whether a call that the probe knows of is under way
        with contextlib.ExitStack() as self._undo:
            self._attach()
            self._undo = self._undo.pop_all()

    def _attach(self) -> None:
        """Attach everything, and note how it comes off again, from the last to the first."""
        undo = self._undo
        _forget_traces(self.module)
        undo.callback(_forget_traces, self.module)
        trained = {name: p for name, p in self.bare.named_parameters() if p.requires_grad}
        # Not a parameter, so that no state dict and no optimizer sees it.
        device = next(iter(trained.values())).device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        for name, (layer, rule) in layers_with_rules(self.bare, OperationsRule).items():
            self._tap(layer, rule, name)
        for name, p in trained.items():
            refuse = functools.partial(self._refuse, name)
            undo.callback(_without_leak, p, p.register_post_accumulate_grad_hook(refuse))
        for one in refuse_training_mode(self.bare):
            undo.callback(one.remove)
        for module in {self.module, self.bare}:
            undo.callback(_ZeroGrad(module, self).remove)
        self._root = RootTap(self.module, self)  # the last: the module may itself be a layer
        undo.callback(self._root.remove)

    def _tap(self, layer: nn.Module, rule: LayerRule, name: str) -> LayerTap:
        found = LayerTap(layer, rule, self._reports_to, self._anchor, name)
        self._undo.callback(found.remove)
        self._taps.append(found)
        return found

    @property
    def watching(self) -> bool:
        """True if a call of the module is one of the run's, of which the probe has to know."""
        return self._reports_to is self.book and not self._called  # a module may call itself

    @torch.compiler.disable
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Probe the module, if need be: its forward is about to be called."""
        try:
            self.probe.begin(args, kwargs)
        except CheckpointError as error:
            raise RuntimeError(self._checkpointed(args, kwargs)) from error
        self._called = True

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The message for a checkpoint that does not recompute the same, with its layers' names."""
        rules = [(tap.layer, tap.observe.rule) for tap in self._taps]
        followed = (rule.holders(layer) for layer, rule in rules if rule.follows)
        owners = {m: None for some in followed for _, m in some}
        with self._readers.noting(list(owners)), contextlib.suppress(CheckpointError):
            self.probe.begin(args, kwargs)
        names = {m: name for name, m in self.bare.named_modules()}
        found = [names[m] or "(the module itself)" for m in self._readers.again]
        return _CHECKPOINTED.format(names=" and ".join(f"layer {name!r}" for name in found))

    @torch.compiler.disable
    def end(self, output: Any) -> None:
        """Note that the call has ended."""
        self._called = False
        self.probe.end(output)

    @contextlib.contextmanager
    def _innermost(self) -> Iterator[None]:
        """Context that removes what is around the module's forward.

        The arguments are what hooks, and what accelerate put over the forward, have made of them:
        neither is to run twice, one within the other.
        """
        attributes = vars(self.module)
        before = {name: attributes[name] for name in ("_forward_pre_hooks", "forward")}
        try:
            attributes.update(_forward_pre_hooks=OrderedDict(), forward=self._root)
            yield
        finally:
            attributes.update(before)

    @contextlib.contextmanager
    def reporting_to(self, book: Book) -> Iterator[None]:
        """Make the layers report to another book in this context: its rows are not the run's."""
        before = self._reports_to
        try:
            self._report_to(book)
            yield
        finally:
            self._report_to(before)

    def _report_to(self, book: Book) -> None:
        self._reports_to = book
        for tap in self._taps:
            tap.observe.book = book

    @contextlib.contextmanager
    def settling(self, anew: bool) -> Iterator[list[bool]]:
        """Make layers note what all examples share, in passes over few rows within this context.

        Yields:
            A list, to which whether anything new was found is added in the end.
        """
        before, changed = self._known(), list[bool]()
        for plan in itertools.chain(*(tap.plans() for tap in self._taps)):
            plan.watch(anew=anew)
        try:
            with self._readers.noting(self._unread):
                yield changed
        finally:
            for plan in itertools.chain(*(tap.plans() for tap in self._taps)):
                plan.settle()
            changed.append(before != self._known())

    def _known(self) -> list[Any]:
        """The rules of all layers, and what is known of the sizes that these meet."""
        states = ([plan.state() for plan in tap.plans()] for tap in self._taps)
        return [
            (type(tap.observe.rule), each) for tap, each in zip(self._taps, states, strict=True)
        ]

    def follow_escaped(self) -> bool:
        """See to parameters that a gradient reached past the taps; True if anything changed.

        A pass over few rows shows them. A layer whose operations were followed in vain is run again
        for each example from now on. Where a module uses its layers' parameters itself, past their
        own forward (a tied weight, say), its operations are followed: the next passes show which
        module that is, and it is the one around all of them where they do not.
        """
        escaped, self._escaped = self._escaped, set()
        parameters = dict(self.bare.named_parameters())
        followed = {
            p: tap
            for tap in self._taps
            if tap.observe.rule.follows
            for p in tap.observe.parameters().values()
        }
        vain = {tap for name in escaped if (tap := followed.get(parameters[name])) is not None}
        for tap in vain:
            tap.observe.use(tap.observe.rule.again())
        others = [parameters[name] for name in sorted(escaped) if parameters[name] not in followed]
        holders = [self._holders(p) for p in others]
        every = list(dict.fromkeys(m for some in holders for m in some))
        self._unread = [m for m in every if not self._readers.known(m)]
        known = [some for some in holders if not any(m in self._unread for m in some)]
        # Tied parameters are read by the name of one of their holders, which need not be the first.
        owners = [[m for m in some if self._readers.of(m)] or some[:1] for some in known]
        found = [self._follow(m) for m in dict.fromkeys(itertools.chain(*owners))]
        return bool(vain or self._unread) or any(found)

    def _holders(self, p: nn.Parameter) -> list[nn.Module]:
        """All modules that a parameter is one of; several, where it is tied."""
        return [m for m in self.bare.modules() if any(q is p for q in m._parameters.values())]

    def _follow(self, owner: nn.Module) -> bool:
        """Find all uses of a layer's parameters outside its own forward; True if that is new."""
        tap = self._tap_around(owner, self._readers.of(owner) or [self.bare])
        within = next(name for name, m in tap.layer.named_modules() if m is owner)
        others = tap.observe.rule.others
        if others is None or within in others:
            return False
        inner = next((t.observe for t in self._taps if t.layer is owner), None)
        tap.observe.follow(within, owner, inner)
        return True

    def _tap_around(self, owner: nn.Module, readers: list[nn.Module]) -> LayerTap:
        """The tap of the one reader, or of what is around all of them and the owner.

        Of two that lie within one another, a replay of the outer one would have the uses of both.
        """
        name = next(name for name, m in self.bare.named_modules() if m is readers[0])
        while name and not {owner, *readers} <= set(self.bare.get_submodule(name).modules()):
            name = name.rpartition(".")[0]
        layer = self.bare.get_submodule(name)
        tap = next((tap for tap in self._taps if tap.layer is layer), None)
        if tap is not None:
            return tap
        before = vars(layer).get("forward")
        found = self._tap(layer, OperationsRule(name), name)
        if layer is self.module:  # below the root's
            found.own, self._root.own = self._root.own, found
            vars(layer)["forward"] = before
        elif layer is self.bare:
            _forget_traces(self.module)
        return found

    def discard(self) -> None:
        """Drop what the layers reported of the batch at hand."""
        self._reports_to.discard()

    def _refuse(self, name: str, p: nn.Parameter) -> None:
        p.grad = None  # not clipped
        self._escaped.add(name)
        if self._reports_to.idle():
            self._reports_to.saw(self.bare, (), p)
        elif not isinstance(self._reports_to, Witness):  # the real pass will raise it
            holders = self._holders(p)
            readers = list(dict.fromkeys(m for own in holders for m in self._readers.of(own)))
            names = {m: each for each, m in self.bare.named_modules()}
            called = [
                f"{names.get(m) or '(the module itself)'!r}, a {type(m).__name__}" for m in readers
            ]
            by = f", by layer {' and layer '.join(called)}" if called else ""
            raise RuntimeError(_LEAK.format(name=name, by=by))

    def detach(self) -> None:
        """Leave the module as it was; a second call does nothing."""
        self._undo.close()
        self._taps = []


class RootTap(StandIn):
    """The forward of the user's module; before it the probe, if any, looks at what it may do."""

    def __init__(self, module: nn.Module, taps: Taps) -> None:
        self.taps = taps
        super().__init__(module, "forward")

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.taps.watching and torch.is_grad_enabled()):
            return self.own(*args, **kwargs)
        output: Any = None
        try:
            self.taps.begin(args, kwargs)
            output = self.own(*args, **kwargs)
        finally:
            self.taps.end(output)
        return output


class _ZeroGrad(StandIn):
    """Clears gradients, and drops what the layers reported of the batch at hand."""

    def __init__(self, module: nn.Module, taps: Taps) -> None:
        self._taps = taps
        super().__init__(module, "zero_grad")

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.own(*args, **kwargs)
        self._taps.discard()


def _without_leak(p: nn.Parameter, leak: RemovableHandle) -> None:
    leak.remove()
    if not p._post_accumulate_grad_hooks:
        p._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module, or what ``torch.compile`` was given to make it."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


def taps_of(module: nn.Module) -> Taps | None:
    """The parts that a run attached to its module; ``None`` if the module is of no run."""
    root = stand_in(module, "forward")
    return root.taps if isinstance(root, RootTap) else None


def part_of_a_run(module: nn.Module) -> str | None:
    """The name of a layer that reports to some run, or ``None``."""
    layers = module.named_modules()
    return next((name for name, layer in layers if stand_in(layer, "forward") is not None), None)


def _computed_before_calls(module: nn.Module) -> dict[str, str]:
    """Layers with weights that torch.nn.utils computes from others in a forward pre-hook."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        for own, p in layer.named_parameters(recurse=False):
            weight = own.removesuffix("_g").removesuffix("_orig")  # weight_norm; the others
            if p.requires_grad and weight != own and weight in vars(layer):
                found[name] = (
                    f"{weight!r} is recomputed from {own!r} before every call (weight_norm, "
                    "spectral_norm or pruning of torch.nn.utils), which the layer's rule for "
                    "per-example gradients does not cover; dptrain.fix(model) replaces the two "
                    "norms by those of torch.nn.utils.parametrizations"
                )
    return found


def _forget_traces(module: nn.Module) -> None:
    """Make compiled modules trace anew: a trace from before the taps would bypass them."""
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in module.modules()):
        torch.compiler.reset()
