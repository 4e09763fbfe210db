"""Examinations: what moves in passes over a few rows of which one example is changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import nn

from dptrain.clipping.base.precision import exact_products
from dptrain.clipping.probe.confirmation import Confirmation, rounded_otherwise
from dptrain.clipping.probe.inputs import (
    Change,
    Rows,
    blank,
    broken,
    contents,
    contents_of_floats,
    contents_of_sequences,
    ends_early,
    huge,
    padding_id,
)
from dptrain.clipping.probe.passes import AtHand, Pass, Passes
from dptrain.clipping.probe.witness import Sighting, Witness, moved, moved_without, same_calls

_PASSES = 6  # over few rows, until nothing new is found in them
_MOST = 8  # examples that a probe is made of
_SHARED_NOISE = 1e-3  # of the largest number: two runs that differ so much are not the same

# Only where nothing was seen that would make the guarantee a false one.
SWITCH = (
    "If you know that the module treats the examples separately, use Gradients(probe='off'): "
    "the guarantee then states this as an assumption"
)
_UNCONFIRMED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: its per-example gradients do not add up "
    "to the gradient that autograd computes on the same few rows: they {found}. Either the "
    "parameter is also used outside the layer that owns it, for instance through "
    "torch.nn.functional, or the layer's rule is wrong (dptrain.testing.check_layer_rule tests "
    "it). Call the layer instead, freeze the parameter with requires_grad_(False), or, if the "
    "rule is wrong, use Gradients(mode='hooks')"
)
_UNHOOKED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: its per-example gradients do not add up "
    "to the gradient that autograd computes on the same few rows: they {found}. Either the "
    "parameter is also used outside the calls of its layer (through torch.nn.functional, as a "
    "tied weight of another layer, in a product, or in a penalty), which Opacus's hooks do not "
    "see, or Opacus's rule for the layer is wrong. Use Gradients(mode='bookkeeping'), call the "
    "layer itself, or freeze the parameter with requires_grad_(False)"
)
_MIXED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: the gradient of one example changed when "
    "another example of the batch was changed, although the layer's inputs and the gradient "
    "with respect to its output stayed the same. The layer uses something else that depends on "
    "the whole batch (a number such as x.max().item(), or an attribute or global that is set "
    "before the call). Compute it from each example alone, as a tensor with one row per example"
)
_COUNTED = (
    "the gradient of one example at layer {layer!r} changed when another example was left out "
    "of the batch, so the module mixes the examples: its result for a row depends on the number "
    "of rows or on the row's place among them (len(x), x.shape[0], a mean over the first "
    "dimension, positions counted along it).{ties} Compute every row as if it were alone, and "
    "let only the loss take a mean over the batch"
)
_TIES = (
    " The module returns a loss, and a loss that divides by the number of targets, the weights "
    "or the lengths of the batch has this effect, as in Hugging Face's models. Call the module "
    "without labels and use a loss from dptrain.losses, or reduce each example by itself in the "
    "module with dptrain.losses.reduce_examples."
)


class Examination(Passes):
    """Passes over a few rows, which refuse a module that does not keep the examples apart.

    Args:
        module, witnessed, views, hooked: as of ``Passes``.
        trained: the parameters that the run trains, by name.
        shown: layers that a gradient of some pass reached, to which more are added.

    Attributes:
        check: of the gradients that the mode forms, in the last of these passes.
    """

    def __init__(
        self,
        module: nn.Module,
        witnessed: Callable[[Witness], contextlib.AbstractContextManager[Any]],
        trained: Mapping[str, nn.Parameter],
        shown: set[nn.Module],
        *,
        views: int = 1,
        hooked: bool = False,
    ) -> None:
        super().__init__(module, witnessed, views=views, hooked=hooked)
        self._trained, self._shown = trained, shown
        self.names = {layer: name for name, layer in module.named_modules()}
        self.check: Confirmation | None = None
        self._varied: list[tuple[Rows, range]] = []  # with one example changed, and its rows

    def settled(
        self,
        smaller: Rows,
        larger: Rows,
        within: Callable[[bool], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Make the layers see what follows the number of rows."""
        for number in range(_PASSES):  # what one round tells may lead to other operations
            with within(number == 0) as changed:
                self.settle(smaller)
                self.settle(larger)
            if number and not any(changed or ()):
                return

    def attempts(self, whole: Rows, batch: AtHand) -> Iterator[tuple[Rows, int, int]]:
        """Sets of leaves that may follow the batch, each with two numbers of examples to run.

        Numbers that are a size of the arguments are the last to be used: positions must not look
        like examples. A leaf that has as many rows as the batch by chance (a mask of positions)
        shows in that the module cannot run with fewer of them.
        """
        sizes = whole.sizes()
        near = {size + 1 for size in sizes}
        free = [k for k in range(2, _MOST) if k * batch.views not in sizes | near]
        sets = [whole.following]
        for size in range(1, min(3, len(whole.following))):
            sets += [
                whole.following - set(c)
                for c in itertools.combinations(sorted(whole.following), size)
            ]
        # Of more, the first, the last and one beside it are left out: an odd number.
        counts = [(few, few + 3) for few in free if few + 3 in free][:1]
        counts += [(2, 5)]
        for following in sets:
            for few, more in counts:
                yield whole.supposing(following), few, more

    def taken(self, rows: Rows, batch: AtHand, examples: int) -> Rows:
        """Examples of the batch, spread over it; some of them several times where there are few.

        None that is broken or far off, unless all are: where nothing is finite nothing shows, and
        one such example would have a module that mixes examples go unseen.
        """
        fine = rows.ordinary()[: batch.examples * batch.views].view(-1, batch.views).all(1)
        usable = (fine if fine.any() else torch.ones_like(fine)).nonzero().flatten()
        picked = usable[torch.arange(examples) * len(usable) // examples]
        within = torch.arange(batch.views)
        return rows.taken((picked[:, None] * batch.views + within).flatten())

    def check_rows(self, seen: Sequence[Sighting], rows: int) -> None:
        """Refuse a call of which the first dimension does not follow the examples."""
        self._shown.update(s.layer for s in seen)
        # The steps of a packed sequence have fewer rows, in the order of the examples.
        wrong = [s for s in seen if len(s.gradient) != rows and not isinstance(s.layer, RNNLinear)]
        if not wrong:
            return
        s = next((s for s in wrong if _takes_positions_first(s.layer)), wrong[0])
        hint = self._batch_first(s.layer)
        raise RuntimeError(
            f"layer {self._name(s)!r} was called with {len(s.gradient)} rows in a batch of "
            f"{rows} rows (dptrain ran the model on a few examples to check this). {hint}Keep "
            "one row per example in the first dimension of every layer's input, repeat an input "
            "that all examples share for each row (ids.expand(rows, -1)), and train on the "
            "loader's batch as a whole; or freeze the layer with requires_grad_(False)"
        )

    def _batch_first(self, layer: nn.Module) -> str:
        """The remedy where a layer takes examples for positions, by who is told batch_first."""
        if not _takes_positions_first(layer):
            return ""
        around = (nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        every = self.module.named_modules()
        name, owner = next(
            ((n, m) for n, m in every if isinstance(m, around) and layer in m.modules()),
            (self.names.get(layer, ""), layer),
        )
        return (
            f"{type(owner).__name__} {name or '(the module itself)'!r} is made with "
            "batch_first=False, so it takes the first dimension for positions and the examples "
            "for one sequence: use batch_first=True if its input has the examples first. "
        )

    def vary(self, base: Rows, run: Pass, *, briefly: bool = False) -> bool | None:
        """Change one example after the other, and return whether that showed something.

        Args:
            base: a few rows, without a change.
            run: on these.
            briefly: whether only the first is changed: whatever it is, that two runs differ shows.
        """
        views = self.views
        examples = base.rows // views
        early = functools.partial(ends_early, padding=padding_id(self.module), labels=run.reduced)
        shown = run.finite and bool(run.seen)
        self._varied = []
        self.answers.add(run.told)
        for example in [0] if briefly else sorted({0, examples // 2, examples - 1}):
            own = range(example * views, (example + 1) * views)
            following = (example + 1) % examples
            other = range(following * views, (following + 1) * views)
            changes: list[Change] = [contents, contents_of_sequences, contents_of_floats]
            found = self._first_that_runs(base, run, own, other, changes)
            if found is None:
                shown = False
            else:
                self._compare(base, run, found, own)
                self._varied.append((found.rows, own))
            others = (huge, blank, broken) if example == examples // 2 else ()
            for change in () if briefly else (early, *others):
                found = self._first_that_runs(base, run, own, other, [change])
                if found is not None:
                    self._compare(base, run, found, own)
        return True if shown else None

    def _first_that_runs(
        self, base: Rows, run: Pass, own: range, other: range, changes: Sequence[Change]
    ) -> Pass | None:
        """The run with the first change that the module puts up with, calling the same layers."""
        for change in changes:
            rows = base.changed(own, other, change)
            if rows is None:
                continue
            try:
                found = self.run(rows)
            except Exception:  # lengths out of order, say: the next change leaves them alone
                continue
            if same_calls(run.seen, found.seen):
                return found
            self._check_calls(run.seen, found.seen, base.rows)
        return None

    def _check_calls(self, ours: Sequence[Sighting], theirs: Sequence[Sighting], rows: int) -> None:
        """Refuse other layers, and layers on other numbers of rows, where one example changed."""
        called = [{s.layer: s for s in seen} for seen in (ours, theirs)]
        for s in [*called[0].values(), *called[1].values()]:
            if s.layer not in called[0] or s.layer not in called[1]:
                raise RuntimeError(
                    f"whether layer {self._name(s)!r} is called depends on the content of one "
                    "example of the batch, so that example decides which gradients all the "
                    "others have. Call the layer for every example, and choose between results "
                    "row by row (torch.where)"
                )
        for s in theirs:
            if not isinstance(s.layer, RNNLinear) and len(s.gradient) != rows:
                raise RuntimeError(
                    f"the number of rows on which layer {self._name(s)!r} is called depends on the "
                    f"content of the batch ({len(s.gradient)} rows for {rows} examples, after one "
                    "of them was changed), so its rows cannot be assigned to examples. Call it on "
                    "all positions of every example, and mask the unwanted results afterwards"
                )

    def _compare(self, base: Rows, run: Pass, found: Pass, own: range) -> None:
        """Refuse what moved with another example."""
        self.answers.add(found.told)
        if next(moved(run.seen, found.seen, base.rows, own), None) is None:
            return
        # Is it rounding? On some devices sums come out in another order every time.
        before = [p.detach().clone() for p in self.module.parameters()]
        again = self.run(base)
        if any(
            not torch.equal(p, q) for p, q in zip(self.module.parameters(), before, strict=True)
        ):
            return  # a pass that writes into parameters: no step is made after it (StateWatch)
        if not same_calls(run.seen, again.seen) or _noisy(run.seen, again.seen):
            raise RuntimeError(
                "two runs of the module on the same inputs, with all random generators in the same "
                "state, gave different results, so it cannot be checked that the module treats the "
                "examples separately. Draw its random numbers from the global generators of torch, "
                f"numpy or Python, or from a generator in an attribute of a layer. {SWITCH}"
            )
        calls = list(moved(run.seen, found.seen, base.rows, own, again.seen))
        if not calls:
            return
        by_input = [s for s, of_input in calls if of_input]
        if by_input:
            raise RuntimeError(
                f"the input of layer {self._name(by_input[-1])!r} for one example changed when "
                "another example of the batch was changed, so no example's contribution can be "
                "bounded. The module mixes the examples before this layer (by statistics, by "
                "attention, or because the examples are in another dimension). Keep the "
                "examples apart, one in each row of the first dimension"
            )
        ties = _TIES if run.reduced else ""
        raise RuntimeError(
            f"the gradient of one example at layer {self._name(calls[0][0])!r} changed when "
            "another example of the batch was changed or shortened, so no example's "
            f"contribution can be bounded: the module mixes the examples after this layer.{ties} "
            "Keep the examples apart"
        )

    def _name(self, s: Sighting) -> str:
        return self.names.get(s.layer, type(s.layer).__name__) or "(the module itself)"

    def leave_out(self, a: Pass) -> None:
        """Refuse a module of which rows move where some examples are left out of the batch.

        The first and the last are, so that all others have another place, from the front and from
        the end, and one beside it, so that the number is odd. In eval mode, if random numbers are
        drawn otherwise: batches of other sizes have others.
        """
        rows, views = a.rows, self.views
        kept = list(range(views, rows.rows - 2 * views))
        rest = rows.taken(torch.tensor(kept))
        steadily = self.evaluating() if a.random else contextlib.nullcontext()
        try:
            with steadily, exact_products():
                a = self.run(rows) if a.random else a
                if a.random:
                    return
                self.answers.add(a.told)
                # A loss that the module returns may be a mean over its rows.
                shares = (1.0, len(kept) / rows.rows) if a.reduced else (1.0,)
                orders = (False, True) if rows.following & rows.second else (False,)
                several = [
                    self.run(rest, of=(rows.rows, kept), loss=s, steps_first=order)
                    for s, order in itertools.product(shares, orders)
                ]
                if any(moved_without(a.seen, b.seen, kept, rows.rows) is None for b in several):
                    return
                # Is it rounding?
                with rounded_otherwise(self.module, rows) as moved:
                    c = self.run(moved)
        except Exception:  # which the run itself is left to raise
            return
        found = [moved_without(a.seen, b.seen, kept, rows.rows, shaken=c.seen) for b in several]
        if all(s is not None for s in found):
            name = self._name(cast("Sighting", found[0]))
            ties = _TIES if a.reduced else ""
            raise RuntimeError(_COUNTED.format(layer=name, ties=ties))

    def unconfirmed(self, base: Rows, *, random: bool) -> str | None:
        """The parameter whose gradients are not autograd's, with the remedy, or ``None``."""
        trained = self._trained
        if self._hooked:  # which refuse a call in eval mode themselves
            training = {p for m in self.layers if m.training for p in m._parameters.values()}
            trained = {n: p for n, p in trained.items() if p in training}
        self.check = check = Confirmation(self, trained)
        try:
            off = check.disagreement(base)
            if (why := self.moved_too(base)) is not None:
                return why
            if off is not None and self._hooked:
                # Opacus keeps inputs by itself, whatever packs the tensors that autograd saves.
                check.plainly = True
                with contextlib.suppress(Exception):  # torch.func takes no hooks on these
                    off = check.disagreement(base)
            elif off is not None and random:
                # A rule may draw other random numbers than the layer, of the same distribution.
                with self.evaluating():
                    off = check.disagreement(base)
        except Exception:  # which the run itself is left to raise
            return None
        if off is None:
            return None
        name, unseen = off
        found = "are missing" if unseen else "differ by more than rounding"
        if self._hooked:
            raise RuntimeError(self._say_of(name, _UNHOOKED, found=found))
        return self._say_of(name, _UNCONFIRMED, found=found)

    def moved_too(self, base: Rows) -> str | None:
        """The replayed layer's parameter whose gradient moved when another example was changed.

        What other layers' gradients are made of was compared itself.
        """
        check, varied, self._varied = self.check, self._varied, []
        if check is None or not check.replayed:
            return None
        found = [check.moved_others(base, rows, own) for rows, own in varied]
        return next((self._say_of(name, _MIXED) for name in found if name is not None), None)

    def _say_of(self, parameter: str, text: str, **more: str) -> str:
        layer, _, own = parameter.rpartition(".")
        kind = type(self.module.get_submodule(layer)).__name__
        return text.format(name=own, layer=layer or "(the module itself)", kind=kind, **more)


def _takes_positions_first(layer: nn.Module) -> bool:
    return getattr(layer, "batch_first", None) is False


def _noisy(ours: Sequence[Sighting], theirs: Sequence[Sighting]) -> bool:
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip((*a.inputs, a.gradient), (*b.inputs, b.gradient), strict=True):
            if torch.equal(x, y):
                continue
            if not x.is_floating_point():
                return True
            off = (x - y).nan_to_num(0.0, 0.0, 0.0).abs().amax()
            if off > _SHARED_NOISE * x.nan_to_num(0.0, 0.0, 0.0).abs().amax():
                return True
    return False
