"""Clipped sums from materialized per-example gradients (Opacus modes hooks and functorch)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers.dp_rnn import RNNLinear
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.precision import in_full_float32
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.base.rows import check_dense, check_rows, summing_dtype
from dptrain.clipping.base.styles import FLAT, ClippingStyle
from dptrain.clipping.bookkeeping import BookkeepingClipper
from dptrain.clipping.bookkeeping.clipper import check_same_batch, tell_of_no_gradient
from dptrain.clipping.bookkeeping.uses.use import Materialized
from dptrain.clipping.mixing_layers import refuse_training_mode
from dptrain.clipping.opacus.layers import OpacusLayers, recomputation, refuse_reordered_rows
from dptrain.clipping.owners import OwnerWatch
from dptrain.clipping.probe import AtHand, RowProbe, Witness
from dptrain.sampling import MicroBatch


class HookedModule(OpacusLayers, GradSampleModule):
    """Opacus's module; refuses a layer's call on anything but one row per example.

    Opacus adds up the calls of a layer row by row: a second call on a single shared row would put
    the gradient of all examples together into row 0, which the clipper takes for one example's.

    Args:
        m: the user's module.
        at_hand: returns the batch at hand, ``None`` if there is none.
        between: returns whether all batches so far have been used.
        views: rows an example has.
        fed: what the module is fed at the moment; ``None``: there is no probe.
        when: one of ``PROBES``.
        owners: follows some of the steps; likewise.
        kwargs: those of Opacus's module.

    Attributes:
        probe: looks at what the module is called with, where there is one.
        own_attributes: what Opacus keeps in the layers.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset(
        ("activations", "max_batch_len", "ft_compute_sample_grad", "autograd_grad_sample_hooks")
    )

    _since: MicroBatch | None = None  # what was at hand in the forward pass

    def __init__(
        self,
        m: nn.Module,
        *,
        at_hand: Callable[[], MicroBatch | None],
        between: Callable[[], bool] = lambda: False,
        views: int = 1,
        fed: Callable[[], AtHand | None] | None = None,
        when: str = "shapes",
        owners: OwnerWatch | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(m, **kwargs)
        self.at_hand = at_hand
        self._between, self._told = between, False
        self.views = views
        self.probe: RowProbe | None = None
        if fed is not None and owners is not None:
            self.probe = RowProbe(m, self.reporting_to, fed, when=when, hooked=True, owners=owners)
        self._doubts: dict[nn.Module, list[str | None]] = {}  # of the calls that inputs are kept of
        self._witness: Witness | None = None
        self.autograd_grad_sample_hooks.extend(
            [*refuse_reordered_rows(m), *refuse_training_mode(m)]
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward; before it the probe, where there is one, of what it may do."""
        if self.probe is None:
            return super().forward(*args, **kwargs)
        self.probe.begin(args, kwargs)
        output: Any = None
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.probe.end(output)
        return output

    @contextlib.contextmanager
    def reporting_to(self, witness: Witness) -> Iterator[None]:
        """Make layers report what they see to a witness, in a pass that leaves no trace.

        Where it does not keep calls itself gradients are formed, which it is told of in the end.
        """
        self._witness = witness
        self._forget_calls()
        own = [p for p in self._module.parameters() if hasattr(p, "grad_sample")]
        for p in own:
            p.grad_sample = None
        try:
            yield
            for p in own:
                # The second is held back where not all calls were reached.
                for g in (p.grad_sample, getattr(p, "_current_grad_sample", None)):
                    if g is not None:
                        witness.record({p: Materialized(g.to(summing_dtype(g)))}, None)
        finally:
            self._witness = None

    def detach(self) -> nn.Module:
        """Leave the user's module as it was, of which Opacus leaves something behind."""
        module = self.to_standard_module()
        for layer in module.modules():
            for name in self.own_attributes & vars(layer).keys():
                del vars(layer)[name]
            if not layer._backward_hooks:
                layer._is_full_backward_hook = None
        return module

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Any, forward_output: Any
    ) -> None:
        """Keep the layer's input, and which batch it is of.

        What non-reentrant checkpointing runs anew is not kept: it was, when it ran first, and
        Opacus would wait for gradients of both.
        """
        if recomputation() == "non-reentrant" or self._between():
            return
        if self._witness is None and self.at_hand() is not self._since:
            self._forget_calls()
            self._since = self.at_hand()
        if self.hooks_enabled and module.training and torch.is_grad_enabled():
            self._check_call(module, forward_input)
        super().capture_activations_hook(module, forward_input, forward_output)
        if self.probe is not None and self._witness is None:
            doubts = self._doubts.setdefault(module, [])
            calls: Any = getattr(module, "activations", ())
            doubts[:] = [*doubts[: len(calls) - 1], self.probe.doubt(module)] if calls else []

    def capture_backprops_hook(
        self, module: nn.Module, _forward_input: Any, forward_output: Any, *args: Any, **kw: Any
    ) -> None:
        """Per-example gradients of one call of a layer."""
        owners = None if self.probe is None else self.probe.owners
        with contextlib.nullcontext() if owners is None else owners.unseen():
            self._capture(module, _forward_input, forward_output, *args, **kw)

    def _capture(
        self, module: nn.Module, _forward_input: Any, forward_output: Any, *args: Any, **kw: Any
    ) -> None:
        if self._witness is not None:
            calls: Any = getattr(module, "activations", None)
            if not (self.hooks_enabled and calls):
                return
            if self._witness.saw(module, calls[-1], forward_output[0]):
                calls.pop()
            else:  # of a loss that is a sum
                kw["loss_reduction"] = "sum"
                self._form(module, _forward_input, forward_output, *args, **kw)
            return
        if self.hooks_enabled and self._between():
            self._forget_calls()
            if not self._told:
                self._told = True
                tell_of_no_gradient()
            return
        batch = self.at_hand()
        rows = None if batch is None else batch.rows
        if self.hooks_enabled and batch is not None:
            check_same_batch(self._since, batch)
        # The steps of a packed sequence have fewer rows, in the order of the examples.
        if self.hooks_enabled and rows is not None and not isinstance(module, RNNLinear):
            check_rows(len(forward_output[0]), rows, self.views)
        if self.hooks_enabled and not getattr(module, "activations", None):
            raise RuntimeError(
                f"backward pass through a {type(module).__name__} in eval mode: per-example "
                "gradients need module.train(). Put evaluation under torch.no_grad()"
            )
        if self.hooks_enabled and rows is not None:
            self.refuse_shared_ids(module, rows * self.views)
        if self.probe is not None and self.hooks_enabled and rows is not None:
            calls = getattr(module, "activations", None)
            self.probe.owners.check(module, calls[-1] if calls else (), forward_output[0])
        doubts = self._doubts.get(module)
        if self.hooks_enabled and doubts and self.probe is not None:
            self.probe.resolve(doubts.pop())
        self._form(module, _forward_input, forward_output, *args, **kw)

    def _form(self, module: nn.Module, *args: Any, **kw: Any) -> None:
        super().capture_backprops_hook(module, *args, **kw)
        if recomputation() == "reentrant":  # its passes are parts of one
            for p in module.parameters():
                if isinstance(several := getattr(p, "grad_sample", None), list):
                    p.grad_sample = sum(several)  # type: ignore[attr-defined]

    def _check_call(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs that Opacus cannot use or would omit, and parameters unfrozen since."""
        own = dict(module.named_parameters(recurse=False))
        if new := [n for n, p in own.items() if p.requires_grad and not hasattr(p, "grad_sample")]:
            raise RuntimeError(
                f"parameter(s) {new} of layer {self._name(module)!r} were unfrozen after "
                "make_private, so they get neither per-example gradients nor noise: call "
                "requires_grad_(False) on them again, or start a new run that trains them"
            )
        check_dense(f"layer {self._name(module)!r}, a {type(module).__name__}", *inputs)
        others = sorted({type(x).__name__ for x in inputs if not isinstance(x, torch.Tensor)})
        plain = self.force_functorch or type(module) not in self.GRAD_SAMPLERS
        if not others and not (plain and len(inputs) > 1):
            return
        what = f"argument(s) of type {others}" if others else f"{len(inputs)} tensors"
        raise RuntimeError(
            f"layer {self._name(module)!r}, a {type(module).__name__}, is called with {what}, "
            "and Opacus supports only layers called with one tensor. Freeze its parameters with "
            "requires_grad_(False), or use Gradients(mode='bookkeeping'), with a rule "
            "registered by dptrain.register_layer() if the layer has none"
        )

    def _name(self, layer: nn.Module) -> str:
        return next(name for name, other in self._module.named_modules() if other is layer)

    def _forget_calls(self) -> None:
        """Drop what an abandoned batch left, whose gradients would be waited for."""
        for layer in self._module.modules():
            if "activations" in vars(layer):
                vars(layer)["activations"].clear()
        for p in self._module.parameters():
            if p.requires_grad:
                p._forward_counter = 0
            if hasattr(p, "_current_grad_sample"):
                del p._current_grad_sample


class PerExampleClipper(BookkeepingClipper):
    """The same from ``p.grad_sample``, the microbatch's per-row gradients.

    g_i is the mean over the ``views`` rows of example i, which follow one another. Opacus has a row
    for the gradient of that row's own loss, undone of a division by the number of rows where the
    user's loss is a mean over them, so this mean is the same under both reductions: that of one
    view if all are equal. Where the batch has records of several rows (``MicroBatch.sizes``), g_i
    is the mean over those of record i.

    Args:
        parameters: the trainable parameters, each with Opacus's ``grad_sample`` attribute.
        views: K, rows an example has.
        style: how a gradient is clipped.
        groups: the number of each parameter's group in that style; ``None``: one for all.
        names: of the parameters, for messages.
        current: returns the batch that the user holds, ``None`` if there is none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        views: int = 1,
        style: ClippingStyle = FLAT,
        groups: Sequence[int] | None = None,
        names: Mapping[nn.Parameter, str] | None = None,
        current: Callable[[], MicroBatch | None] = lambda: None,
    ) -> None:
        def at_hand() -> MicroBatch | None:
            self.batch = current()  # for which gradients are about to be formed
            return self.batch

        super().__init__(
            parameters,
            at_hand=at_hand,
            loss_reduction="sum",
            views=views,
            style=style,
            groups=groups,
        )
        self._names = {} if names is None else names

    @override
    @in_full_float32
    def clipped_sum(self, **options: Any) -> list[torch.Tensor | None]:
        """One clipped sum per parameter, as ``BookkeepingClipper`` has it, consumed.

        Raises:
            RuntimeError: if there was no backward pass, more than one, one whose per-example
                gradients are not one per row (each would break the sensitivity R), or one that
                did not reach all calls of a layer that it reached.
        """
        self._check_complete()
        for p in self.parameters:
            if (g := self._grad_sample(p, len(options["weights"]))) is not None:
                self._hold(p).uses = [Materialized(g.to(summing_dtype(p)))]
        if not self._held:
            raise RuntimeError(
                "no per-example gradients: before optimizer.step(), call loss.backward() once "
                "on the private module's output, with the module in training mode. Run forward "
                "passes that are not followed by backward() under torch.no_grad()"
            )
        return super().clipped_sum(**options)

    @override
    def _unit(self, examples: int) -> float:
        return 1.0

    @override
    def discard(self) -> None:
        super().discard()
        for p in self.parameters:
            p.grad_sample = None  # type: ignore[attr-defined]

    def _check_complete(self) -> None:
        """Refuse gradients that Opacus holds back because it waits for those of other calls.

        The parameter would be trained on noise alone.
        """
        waiting = [p for p in self.parameters if hasattr(p, "_current_grad_sample")]
        if waiting:
            names = ", ".join(repr(self._names.get(p, tuple(p.shape))) for p in waiting)
            raise RuntimeError(
                f"some of the forward calls that use parameter(s) {names} have no backward pass: "
                "run forward passes that the loss does not depend on under torch.no_grad(), or "
                "use Gradients(mode='bookkeeping')"
            )

    def _grad_sample(self, p: nn.Parameter, examples: int) -> torch.Tensor | None:
        """Gradients of the examples, shape (examples, *p.shape)."""
        g = getattr(p, "grad_sample", None)
        if g is None:
            return None
        if isinstance(g, list):
            raise RuntimeError(
                f"{len(g)} backward passes were made for one batch. Each would be clipped "
                "separately, so an example would count several times: add the losses and call "
                "backward once"
            )
        sizes = None if self.batch is None else self.batch.sizes
        check_rows(len(g), examples if sizes is None else int(sizes.sum()), self.views)
        # A row that is not finite makes the mean so, and takes its record out.
        if self.views > 1:
            g = g.unflatten(0, (-1, self.views)).mean(1, dtype=summing_dtype(g))
        if sizes is None:
            return g
        records = RowGroups(torch.from_numpy(sizes))
        counts = records.sizes.to(g.device).view(-1, *[1] * (g.dim() - 1))
        return records.summed(g.to(summing_dtype(g))) / counts
