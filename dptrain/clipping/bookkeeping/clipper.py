"""Clipped sums from what layers report."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.linear_norms import several_rank_one_norms
from dptrain.clipping.base.precision import in_full_float32
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.base.rows import check_rows, summing_dtype
from dptrain.clipping.base.styles import FLAT, ClippingStyle
from dptrain.clipping.base.weights import (
    by_row,
    clip_factors,
    enlargement,
    group_norms,
    per_reported,
    total_norms,
)
from dptrain.clipping.bookkeeping.bundle import Bundle, can_wait, is_rank_one, is_small
from dptrain.clipping.bookkeeping.combine import folded, merge, norms_of_sum
from dptrain.clipping.bookkeeping.copies import Copies
from dptrain.clipping.bookkeeping.replay_costs import ReplayCosts, Replays
from dptrain.clipping.bookkeeping.uses.formed import Formed
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use, chunked_norms
from dptrain.clipping.owners import OwnerWatch
from dptrain.clipping.probe import RowProbe
from dptrain.core import on_processor, sent
from dptrain.sampling import MicroBatch

_UNCOUNTED = 64  # microbatches of which a device has not been asked what it left out

_log = logging.getLogger(__name__)

Admit = Callable[[torch.Tensor], torch.Tensor]
"""Function from norms to factors in [0, 1], one for each example."""


class _Reports:
    """What was reported of a parameter in the backward pass of a batch.

    Attributes:
        uses: not yet added up.
        norms: of its only use, shape (examples,).
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter  # held, so that no other is at its place in memory
        self.uses: list[Use] = []
        self.norms: torch.Tensor | None = None


class BookkeepingClipper(Book):
    """Σ_i w_i · clip(s ⊙ g_i, R) from the uses of all parameters in one backward pass.

    g_i is the gradient of the part of the loss that example i has, as in
    ``PerExampleClipper``. Several backward passes for one batch add up. Where the batch has
    records of several rows (``MicroBatch.sizes``), g_i is the mean over those of record i.

    Args:
        parameters: the trainable parameters.
        loss_reduction: ``"mean"`` or ``"sum"``.
        views: K, rows an example has.
        style: how a gradient is clipped.
        groups: the number of each parameter's group in that style; ``None``: one for all.
        at_hand: returns the batch that the user holds, ``None`` if there is none.
        between: returns whether all batches so far have been used.
        owners: follows some of the steps, where that is wanted.

    Attributes:
        batch: the one that gradients were computed for last.
        norms: ‖s ⊙ g_i‖₂ of the last microbatch, before clipping, shape (examples,), padding
            included; ``None`` before the first. Private data, for the trainer's eyes.
    """

    batch: MicroBatch | None = None
    norms: torch.Tensor | None = None

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        at_hand: Callable[[], MicroBatch | None],
        between: Callable[[], bool] = lambda: False,
        loss_reduction: str,
        views: int = 1,
        style: ClippingStyle = FLAT,
        groups: Sequence[int] | None = None,
        owners: OwnerWatch | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.style = style
        self.groups = [0] * len(self.parameters) if groups is None else list(groups)
        self._left_out: int | torch.Tensor = 0
        self._uncounted: list[tuple[torch.Tensor, torch.Tensor]] = []  # finite, and weights
        self._any_finite: torch.Tensor | None = None  # of a device, whether any example is
        self.owners = owners
        self.at_hand = at_hand  # type: ignore[method-assign]
        self._between, self._told = between, False
        self.probe: RowProbe | None = None  # of the module, where there is one
        self.loss_reduction = loss_reduction
        self.views = views
        self._held: dict[int, _Reports] = {}  # by the parameters' identities
        self._several: set[int] = set()  # parameters whose norms can wait for the other uses
        self._copies = Copies()
        self._bundle_of: dict[int, Bundle] = {}  # by the parameters' identities
        self._costs = ReplayCosts()
        self._records: int | RowGroups | None = None  # rows of the records of the batch

    def rows(self) -> int | None:
        """Rows that the model sees of the batch at hand."""
        batch = self.at_hand()
        return None if batch is None else batch.rows * self.views

    def doubt(self, layer: nn.Module) -> str | None:
        """The reason against gradients of a call of the layer that is being made."""
        self._costs.begin()
        return None if self.probe is None else self.probe.doubt(layer)

    def idle(self) -> bool:
        """True if no row at hand is an example: on padding, and between batches, no probe ran."""
        batch = self.at_hand()
        return self._between() if batch is None else not len(batch.indices)

    @override
    def unseen(self) -> contextlib.AbstractContextManager[Any] | None:
        """Context without the trace that follows the step, where one does."""
        owners = self.owners
        return None if owners is None or not owners.traces else owners.unseen()

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Check whose the rows are; uses are made of every call, but of those where it is idle."""
        if not self.idle():
            if self.owners is not None:
                self.owners.check(layer, inputs, gradient)
            return False
        if self.at_hand() is None and not self._told:
            self._told = True
            tell_of_no_gradient()
        self.discard()
        self.batch = self.at_hand()
        return True

    @override
    def replays(self, costs: Replays) -> None:
        self._costs.add(costs)

    @in_full_float32
    def record(
        self, uses: Mapping[nn.Parameter, Use], since: MicroBatch | None, doubt: str | None = None
    ) -> None:
        """Take in what a layer reports in the backward pass.

        Args:
            uses: by the parameters.
            since: the batch that was at hand in the forward pass.
            doubt: why they must not be taken in (``doubt``), if there is a reason.

        Raises:
            RuntimeError: if there is no batch, or another than in the forward pass, or the uses
                are not one a row of it.
        """
        batch = self.at_hand()
        if batch is None:
            raise RuntimeError(
                "backward pass without a batch: take a batch from the private loader before the "
                "backward pass, and give a trainer private.loader instead of the loader it was "
                "made from. For gradients of parameters outside the run, call "
                "loss.backward(inputs=...)"
            )
        check_same_batch(since, batch)
        if batch is not self.batch:
            self.discard()
            self.batch = batch
            self._records = self._grouping(batch)
        for p, use in uses.items():
            check_rows(use.rows, batch.rows, self.views)
            if doubt is not None and self.probe is not None:
                self.probe.resolve(doubt)
            use = (use if self._records is None else folded(use, self._records)).compact()
            use.keep(self._copies)
            held = self._hold(p)
            held.norms = None  # first, that none is left of a part should this be cut short
            if held.uses:
                self._several.add(id(p))
            if held.uses and isinstance(use, Materialized | Formed):
                held.uses = merge([*held.uses, use])  # there is no need to hold two of these
            else:
                held.uses.append(use)
            # At once, while what it is made of is in the processor's cache.
            if id(p) not in self._several and not can_wait(use):
                held.norms = use.norms()

    def _hold(self, p: nn.Parameter) -> _Reports:
        """What is held of a parameter, which may be nothing as yet."""
        held = self._held.get(id(p))
        if held is None:
            self._held[id(p)] = held = _Reports(p)
        return held

    @in_full_float32
    def clipped_sum(self, **options: Any) -> list[torch.Tensor | None]:
        """One clipped sum per parameter (``None`` where a parameter took no part), consumed.

        Args:
            options: R, weights and what else there is, as of ``_in_turn``.

        Raises:
            RuntimeError: if there was no backward pass for this batch.
        """
        sums: dict[int, torch.Tensor] = {}
        by_parameter = self._in_turn(**options)
        # What the backward pass came to last is still in the processor's cache, and a bias leaves
        # there what its weight needs.
        for p in [p for p in reversed(self._held) if p in by_parameter]:
            sums[p] = by_parameter[p]()
        self._without_broken(list(sums.values()))
        self._done()
        return [sums.get(id(p)) for p in self.parameters]

    @in_full_float32
    def take_clipped_sums(
        self, take: Callable[[int, torch.Tensor | None], None], **options: Any
    ) -> None:
        """Give away the sums of ``clipped_sum`` one by one, in an order that all processes have.

        Args:
            take: given the place of a parameter, from the last to the first, and its sum, which is
                kept by nobody else; none is formed before the one before it was taken.
            options: as in ``clipped_sum``.

        Raises:
            RuntimeError: as there.
        """
        by_parameter = self._in_turn(**options)
        for index in reversed(range(len(self.parameters))):
            form = by_parameter.pop(id(self.parameters[index]), None)
            total = None if form is None else form()
            self._without_broken([] if total is None else [total])
            take(index, total)
        self._done()

    def _in_turn(
        self,
        *,
        max_grad_norm: float,
        weights: torch.Tensor,
        scales: Sequence[torch.Tensor | None] | None = None,
        admit: Admit | None = None,
        loss_scale: float = 1.0,
    ) -> dict[int, Callable[[], torch.Tensor]]:
        """Functions that form the clipped sum of each parameter that took part, by identities.

        Args:
            max_grad_norm: R > 0.
            weights: shape (examples,), one weight per example of the microbatch; 0 for padding.
            scales: s, positive, a tensor of its shape for each parameter (``None``: 1); what they
                depend on must be public.
            admit: from the norms of what examples contribute, shape (examples,), to factors in
                [0, 1] on the clipped gradients; ``None``: all 1.
            loss_scale: S > 0, what the loss was multiplied by; undone before anything else.
        """
        if not self._held and self.idle() and self.batch is self.at_hand():
            nothing = torch.zeros(len(weights), max(self.groups) + 1)
            self._factors(nothing, max_grad_norm, weights, admit)
            return {}
        if not self._held:
            raise RuntimeError(
                "no per-example gradients: before optimizer.step(), call loss.backward() on the "
                "private module's output"
            )
        self._copies.clear()  # each goes with the sum that it is for
        sums: dict[int, torch.Tensor] = {}  # of bundles
        scaling = [None] * len(self.parameters) if scales is None else scales
        unit = self._unit(len(weights)) / loss_scale
        norms = self._group_norms(scaling, unit, enlargement(unit, max_grad_norm, loss_scale))
        factors, index = self._factors(norms, max_grad_norm, weights, admit)
        by_group = per_reported(factors, unit).unbind(1)

        def formed(p: nn.Parameter, own: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
            bundle = self._bundle_of.get(id(p))
            if bundle is None:
                total = self._sum(p, own, index)
                return total if scale is None else total * scale
            if id(p) not in sums:
                sums.update(bundle.sums(self._taken(own, index), index))
            return sums.pop(id(p)).view_as(p)

        return {
            id(p): functools.partial(formed, p, by_group[group], s)
            for p, group, s in zip(self.parameters, self.groups, scaling, strict=True)
            if id(p) in self._held
        }

    def _factors(
        self, norms: torch.Tensor, max_grad_norm: float, weights: torch.Tensor, admit: Admit | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Factors, shape (examples, groups), and the examples that are finite, by their places.

        The second is ``None`` where all are: then no row has to be taken out of a sum. A device
        would be waited for to know. There it has as many places as there are examples, and for one
        that is broken, with the factor 0, that of one that is not.

        Args:
            norms: of the groups' gradients, shape (examples, groups).
            max_grad_norm: R > 0.
            weights: shape (examples,); 0 for padding, which counts nowhere.
        """
        self.norms = total_norms(norms)
        weights = sent(weights, norms)
        factors, finite = clip_factors(norms, max_grad_norm, weights, admit, self.style)
        if on_processor(norms) or isinstance(self._records, RowGroups):
            self._any_finite = None
            if bool(finite.all()):
                return factors, None
            self._left_out += int((~finite & (weights != 0)).sum())
            return factors, finite.nonzero()[:, 0]
        self._uncounted.append((finite, weights))
        if len(self._uncounted) >= _UNCOUNTED:
            self._count()
        self._any_finite, first = finite.view(torch.int8).max(0)
        return factors, torch.where(finite, _places(len(finite), finite.device), first)

    @property
    def nonfinite_examples(self) -> int:
        """How many examples were left out so far because their norm was not finite."""
        self._count()
        self._left_out = int(self._left_out)  # a device is waited for here, and in no step
        return self._left_out

    @nonfinite_examples.setter
    def nonfinite_examples(self, count: int) -> None:
        self._left_out = count
        self._uncounted.clear()

    def _count(self) -> None:
        """Count the examples that a device has found since."""
        if self._uncounted:
            finite, weights = map(torch.cat, zip(*self._uncounted, strict=True))
            self._left_out = self._left_out + (~finite & (weights != 0)).sum()
            self._uncounted.clear()

    def _done(self) -> None:
        """Drop what was reported: all of it is in a sum, or takes no part in the run."""
        self.discard()
        self._costs.end(self.parameters[0].device)

    def unclipped_norms(self, examples: int) -> torch.Tensor:
        """‖g_i‖₂ of what was reported, shape (examples,), which stays."""
        return total_norms(self._group_norms([None] * len(self.parameters), self._unit(examples)))

    def discard(self) -> None:
        """Forget gradients of a batch that will not be used."""
        self._held.clear()
        self._bundle_of.clear()
        self._copies.clear()

    def _grouping(self, batch: MicroBatch) -> int | RowGroups | None:
        """Rows that the model sees of each record; ``None``: one."""
        if batch.sizes is not None:
            return RowGroups(torch.from_numpy(batch.sizes * self.views))
        return None if self.views == 1 else self.views

    def _unit(self, examples: int) -> float | torch.Tensor:
        """Factor that undoes a mean over the rows; of the rows of a record the mean is taken."""
        sizes = None if self.batch is None else self.batch.sizes
        if sizes is None:
            return float(examples) if self.loss_reduction == "mean" else 1.0 / self.views
        each = 1.0 / torch.from_numpy(sizes)
        return each * float(sizes.sum()) if self.loss_reduction == "mean" else each / self.views

    def _group_norms(
        self, scales: Sequence[torch.Tensor | None], unit: float | torch.Tensor, times: float = 1.0
    ) -> torch.Tensor:
        """‖s ⊙ g_ig‖₂, shape (examples, groups); ``times`` as ``enlargement`` has it."""
        pairs = zip(self.parameters, scales, strict=True)
        plain = times == 1.0 and all([scale is None for scale in scales])
        bundles = self._bundled() if plain else []
        self._bundle_of = {key: bundle for _, bundle in bundles for key in bundle.sizes}
        if plain:
            self._take_rank_one_norms()
        parts = [self._norms_of(p, s, times) for p, s in pairs]
        parts += [bundle.norms for _, bundle in bundles]
        norms = group_norms(parts, [*self.groups, *[group for group, _ in bundles]])
        return norms * by_row(unit / times, norms)

    def _take_rank_one_norms(self) -> None:
        """The norms of all uses that waited for those of the others."""
        held = [h for h in self._held.values() if h.norms is None and len(h.uses) == 1]
        kinds: dict[Any, list[tuple[_Reports, OuterProducts]]] = {}
        for each in held:
            use = each.uses[0]
            if is_rank_one(use):
                kinds.setdefault((use.left.dtype, use.left.device), []).append((each, use))
        for some in kinds.values():
            norms = several_rank_one_norms([use.sides_of_one for _, use in some])
            for (each, _), found in zip(some, norms, strict=True):
                each.norms = found

    def _bundled(self) -> list[tuple[int, Bundle]]:
        """The small gradients of each group on a device."""
        found: dict[tuple[Any, ...], dict[int, Materialized]] = {}
        for p, group in zip(self.parameters, self.groups, strict=True):
            held = self._held.get(id(p))
            if held is None or len(held.uses) != 1:
                continue
            use = held.uses[0]
            if is_small(use):
                key = group, use.gradients.dtype, use.gradients.device
                found.setdefault(key, {})[id(p)] = use
        return [(group, Bundle(uses)) for (group, *_), uses in found.items()]

    def _norms_of(
        self, p: nn.Parameter, scale: torch.Tensor | None, times: float
    ) -> torch.Tensor | None:
        """Norms of one parameter's gradients of the reduced loss, enlarged, shape (examples,)."""
        held = self._held.get(id(p))
        if held is None or id(p) in self._bundle_of:
            return None
        if times != 1.0:
            scale = torch.full((), times, device=p.device) if scale is None else scale * times
        if scale is not None:
            return chunked_norms(held.uses, scale)
        if held.norms is not None:
            return held.norms
        held.uses = merge(held.uses)
        return norms_of_sum(held.uses)

    def _sum(
        self, p: nn.Parameter, factors: torch.Tensor, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Σ_i f_i g_i of one parameter, whose uses are dropped; rows not in ``index`` are none."""
        uses = self._held.pop(id(p)).uses
        if index is not None:
            # 0 · NaN is NaN: a broken row has to be taken out, not multiplied away.
            uses = [use.select(index) for use in uses]
        factors = self._taken(factors, index).to(device=p.device, dtype=summing_dtype(p))
        total = uses[0].weighted_sum(factors).view_as(p)
        for use in uses[1:]:
            total.add_(use.weighted_sum(factors).view_as(p))
        return total

    def _taken(self, factors: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """Factors of the rows of ``index``, where those that stand for others have factors of 0."""
        return factors if index is None or self._any_finite is not None else factors[index]

    def _without_broken(self, sums: Sequence[torch.Tensor]) -> None:
        """Make them 0 where no example is finite: 0 · NaN is NaN, but not of the number's bits."""
        if self._any_finite is not None and sums:
            bits = {torch.float32: torch.int32, torch.float64: torch.int64}
            torch._foreach_mul_([total.view(bits[total.dtype]) for total in sums], self._any_finite)


@functools.lru_cache(maxsize=64)
def _places(rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(rows, device=device)


def tell_of_no_gradient() -> None:
    """Log that a backward pass between two batches is none of the run's."""
    _log.warning(
        "a backward pass went through the private module between optimizer.step() and the next "
        "batch of the private loader. The run ignores its gradients of the module's parameters; "
        "gradients of the inputs and of other modules are computed as usual. To train the "
        "module on other data as well, end the run with private.detach()"
    )


def check_same_batch(since: MicroBatch | None, batch: MicroBatch | None) -> None:
    """Refuse a backward pass of which the forward pass saw another batch."""
    if since is not batch:
        raise RuntimeError(
            "this backward pass belongs to a forward pass made before the current batch was "
            "taken from the private loader, so its gradients would be released as those of "
            "another batch. For every batch, run the forward pass, the backward pass and "
            "optimizer.step() in this order"
        )
