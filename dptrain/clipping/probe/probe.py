"""The probe: whether what is clipped as one example's depends on that example alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import nn
from torch.utils.checkpoint import CheckpointError

from dptrain.clipping.base.precision import exact_products
from dptrain.clipping.owners import Answers, OwnerWatch, Telling, Told, look_of_call
from dptrain.clipping.probe.confirmation import (
    Confirmation,
    rounded_otherwise,
)
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
    named,
    padding_id,
    structure,
)
from dptrain.clipping.probe.left_out import moved_without
from dptrain.clipping.probe.outputs import Outputs
from dptrain.clipping.probe.restoring import attached, eagerly, replay, untouched
from dptrain.clipping.probe.signature import LossSignature
from dptrain.clipping.probe.weighing import take_back, weigh, weigh_rows
from dptrain.clipping.probe.witness import Sighting, Witness, moved, same_calls
from dptrain.core import (
    global_state,
    named_error,
    remember_globals,
    restore_global_state,
    same_global_state,
)

PROBES = ("first", "shapes", "off")
"""When the probe looks: at the first batch, at every new shape of inputs, or never."""

_ROUNDS = 5  # of looking for uses of parameters past their layers, and following these
_PASSES = 6  # over few rows, until nothing new is found in them
_MOST = 8  # examples that a probe is made of
_SHARED_NOISE = 1e-3  # of the largest number: two runs that differ so much are not the same

# Only where nothing was seen that would make the guarantee a false one.
_SWITCH = (
    "if you know that they do, Gradients(probe='off') goes on, and the guarantee says that it "
    "assumes so"
)
_OUTSIDE = "called outside the module's own forward"
_UNSEEN = (
    "a gradient reached layer {layer!r}, which the outputs of the module do not depend on as far "
    "as a probe of it can see, so that nothing shows whether the examples stay apart: have the "
    "module's forward return what the loss is made of, as tensors; " + _SWITCH
)
_UNCONFIRMED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: the gradients that bookkeeping forms of it "
    "for the examples do not add up to the gradient that autograd finds on the same few rows: they "
    "{found}. Either its layer's rule is wrong (dptrain.testing.check_layer_rule tests it), or it "
    "is used where no rule sees it, outside the call of the layer that owns it, as through "
    "torch.nn.functional: call the layer, freeze the parameter with requires_grad_(False), or, if "
    "the rule is wrong, use Gradients(mode='hooks')"
)
_UNHOOKED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: the gradients that Opacus's hooks form of it "
    "for the examples do not add up to the gradient that autograd finds on the same few rows: they "
    "{found}. The hooks see only the calls of the layer itself, and the parameter is used past "
    "these (through torch.nn.functional, as a tied weight that another layer reads, in a product, "
    "or in a penalty), or Opacus's rule for the layer is wrong: use Gradients(mode='bookkeeping'), "
    "call the layer itself, or freeze the parameter with requires_grad_(False)"
)
_MIXED = (
    "parameter {name!r} of layer {layer!r}, a {kind}: the gradient of one example moved when "
    "another example of the batch was changed, though the layer's inputs and the gradient by its "
    "output did not: the layer takes something else from the whole batch (a number such as "
    "x.max().item(), or an attribute or global that is set before the call). Compute it from each "
    "example alone, as a tensor with a row for each"
)
_COUNTED = (
    "the gradient of one example at layer {layer!r} moved when another example was left out of the "
    "batch: the module mixes the examples, as what it makes of a row depends on how many there "
    "are, or on its place among them (len(x), x.shape[0], a mean over the first dimension, "
    "positions counted along it), which one example more or less changes.{ties} Compute every row "
    "as if it were alone, and have means over the batch taken by the loss"
)
_TIES = (
    " The module returns a loss: one that divides by the batch's targets, weights or lengths does "
    "this, as that of Hugging Face's models does. Call the module without labels, and take the "
    "loss from dptrain.losses, which reduces each example by itself; or have the module's own do "
    "so, by dptrain.losses.reduce_examples."
)
_FAILED = (
    "the module cannot be run on a few rows of the batch, nor on a copy of it, so that nothing "
    "shows whether the examples stay apart ({error}); let every argument with a row for each "
    "example have it in the first dimension; " + _SWITCH
)
_NO_ROWS = (
    "the batch has {rows} rows, and no argument of the module has these in "
    "its first dimension, so that nothing shows which numbers are whose: give the module tensors "
    "with one row per example in the first dimension; " + _SWITCH
)


@dataclasses.dataclass(frozen=True)
class AtHand:
    """The batch that the user holds.

    Attributes:
        examples: those that count, without padding.
        rows: that the module is fed, all.
        views: rows of an example.
        reduction: ``"mean"`` or ``"sum"``, as the loss was declared to reduce over the rows.
    """

    examples: int
    rows: int
    views: int
    reduction: str


@dataclasses.dataclass(frozen=True)
class _Run:
    """A forward and a backward pass over a few rows.

    Attributes:
        seen: calls of layers, from the last to the first.
        finite: whether all numbers there are.
        reduced: whether the module returned a loss, a single number.
        rows: that the module was run on.
        told: numbers that it was told.
        random: whether the forward pass drew random numbers.
    """

    seen: list[Sighting]
    finite: bool
    reduced: bool
    rows: Rows
    told: Told
    random: bool


class RowProbe:
    """Runs the module on two examples of the batch, and on a few more, and changes one of them.

    What a mode clips as example i's is made of rows i of the inputs of each layer and of the
    gradients by its output. The probe looks at exactly these, in forward and backward passes of a
    loss that treats every row of the module's output by itself, with the generators in the state
    of the real pass (so that dropout hides the same):

    - their number has to follow the number of examples, for two numbers of examples;
    - when the numbers of one example change, in every argument with a row for each, no row of
      another may change; each example's turn comes. Then the same when a sequence ends early: its
      second half padding, masked, without labels;
    - when examples are left out of the batch, no row of the others may change, but for roundings
      (``test_what_counts_the_rows_is_refused``). Of a module that draws random numbers, in eval
      mode: others are drawn for another number of rows.

    Of a step that is followed (``OwnerWatch``) examples are changed at its end only, if something
    could not be followed, or at once where the program is told numbers (``Answers``).

    That holds the module's own loss, where it returns one, to the same. It is shown for these
    examples and these shapes, which is a test and not a proof
    (docs/theory/limits.md#thm-probe): what mixes the examples only for other values, or only in
    larger batches, is not seen. Of a loss outside the module only what its gradient gives away is
    (``LossSignature``).

    The module, ``p.grad`` and all random generators are left as they were
    (``untouched``).

    Args:
        module: the user's, with what reports to a witness.
        witnessed: a context in which it reports to the given one.
        at_hand: the batch, ``None`` where there is none.
        when: ``"shapes"``: whenever the arguments are of a structure (types, shapes but for the
            rows, switches, numbers that are 0) that was not probed, or the module has other layers
            or hooks, or layers other switches (training mode is one); ``"first"``: once;
            ``"off"``: never.
        settle: a context for runs on several numbers of examples, for what has to know how a layer
            is used; whether they are the first ones on such inputs. Of the list that it gives, the
            last entry is whether they showed anything new, when it is left.
        together: where other processes have parts of the module: a context for runs of it, which
            each of them enters whenever the module is called; given whether any are to be made.
        around: a context for runs past the call of the module.
        hooked: whether Opacus's hooks form the gradients. These, or bookkeeping's, have to be those
            that autograd finds for the same rows and loss (``Confirmation``).
        owners: follows some of the steps, where that is wanted.

    Attributes:
        outside: whether gradients came of layers that were called without the module's own forward,
            and so without a probe.
        vain: whether there was a batch of which no pass over a few rows showed anything.
    """

    def __init__(
        self,
        module: nn.Module,
        witnessed: Callable[[Witness], contextlib.AbstractContextManager[Any]],
        at_hand: Callable[[], AtHand | None],
        *,
        when: str = "shapes",
        settle: Callable[[bool], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        follow: Callable[[], bool] = lambda: False,
        hooked: bool = False,
        together: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        owners: OwnerWatch | None = None,
    ) -> None:
        self.together, self.around, self._owners = together, around, owners
        self.module, self.witnessed, self.at_hand, self.settle = module, witnessed, at_hand, settle
        self.follow = follow
        self.when, self.hooked = when, hooked
        self._layers = list(module.modules())
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._names = {layer: name for name, layer in module.named_modules()}
        self._known: set[Any] = set()
        self._shown: set[nn.Module] = set()  # layers that a probe's gradient reached
        self._busy = False
        self._probed = False  # for the call that is being made
        self._call: tuple[Any, ...] | None = None
        self._unseen: set[nn.Module] = set()  # layers called in it that no probe has reached
        self._in_vain: set[nn.Module] = set()  # those that a further probe did not reach either
        self._answers: dict[str, str | None] = {}  # what became of their doubts
        self._inside = False
        self._signature = LossSignature(self._aside)
        self._outputs = Outputs()
        self.outside = self.vain = False
        self._key: Any = None  # of the call that is being made
        self._looks: Any = None  # of the same, plain values and all, where it is followed
        self._passes = Answers()  # of the passes that are being made
        self._told: dict[Any, Answers] = {}  # by what was probed
        self._check: Confirmation | None = None  # of the last call that was probed
        self._varied: list[tuple[Rows, range]] = []  # with one example changed, and its rows
        self._why: str | None = None  # what a backward pass of this forward pass is refused for
        self._any = False  # whether there is but one example, so that any layer will do
        # Places and names of arguments that were seen to have the rows in their second dimension.
        self._second: set[tuple[int, str]] = set()

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._owners is None else self._owners.unseen()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to be called with these arguments: probe it, if need be.

        Raises:
            RuntimeError: naming the layer, and the remedy.
        """
        if self._busy or self.when == "off":
            return
        self._inside = False
        self._any = self._probed = False
        self._unseen.clear()
        batch, self._looks = self.at_hand(), None
        if self._owners is not None and self._owners.following and batch is not None:
            self._looks = look_of_call(self.module, args, kwargs, batch.rows)
        self._why = self._look(args, kwargs)
        if self._owners is not None:
            self._owners.answers = self._told.get((self._key, self._looks))
        self._call = args, kwargs, remember_globals()
        self._inside = True

    def end(self, output: Any = None) -> None:
        """The call has come to its end, with this output if there is one."""
        if self._busy or self.when == "off":
            return
        self._inside = False
        call, self._call = self._call, None
        if call is not None and output is not None:
            self._look_again(*call)
        batch = self.at_hand()
        if output is not None and batch is not None and batch.examples and torch.is_grad_enabled():
            found = ((y, d) for y, d in self._outputs.as_they_are(output) if y.requires_grad)
            self._signature.look_at(found, batch.rows, batch.reduction)

    def _look_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Callable[[], dict[str, Any]]
    ) -> None:
        """Probe once more where layers were called that no probe has seen, as layer drop has it.

        From the same state of the random generators, the same layers are called.
        """
        fresh = set[nn.Module]() if self._probed else self._unseen - self._in_vain
        if not fresh:
            if self.together is not None:
                with self.together(False):
                    return
            return
        now = replay()
        try:
            restore_global_state(state())
            why = self._look(args, kwargs, again=True)
        finally:
            now()
        self._in_vain |= fresh - self._shown
        for layer in fresh & self._shown:
            self._answers[self._unseen_text(layer)] = why

    def _unseen_text(self, layer: nn.Module) -> str:
        return _UNSEEN.format(layer=self._names.get(layer))

    def doubt(self, layer: nn.Module) -> str | None:
        """What ``resolve`` is to be given when a gradient of this call of a layer comes."""
        if self.when == "off":
            return None
        if not self._inside and torch._C._current_graph_task_id() == -1:
            return _OUTSIDE  # as Lightning calls parts of its modules
        # In a backward pass: a layer within a checkpoint is called again.
        if self._why is not None or self._any or layer in self._shown:
            return self._why
        self._unseen.add(layer)
        return self._unseen_text(layer)

    def resolve(self, doubt: str | None) -> None:
        """A gradient of a call came, with the doubt that there was when it was made.

        Parts of the module that were called by themselves are taken as they come, and
        ``outside`` says so from then on.

        Raises:
            RuntimeError: for another doubt.
        """
        doubt = self._answers.get(doubt, doubt) if doubt is not None else None
        if doubt == _OUTSIDE:
            self.outside = True
        elif doubt is not None:
            raise RuntimeError(doubt)

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool = False
    ) -> str | None:
        """Why these examples are not kept apart, or ``None``; looks only as often as was asked."""
        due = self._due(args, kwargs, again=again)
        if self.together is None:
            return None if due is None else self._looked(due)
        with self.together(due is not None):
            why = None if due is None else self._looked(due)
            if why is not None:  # the other processes would wait in the backward pass that says so
                raise RuntimeError(why)
        return None

    def _due(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool
    ) -> tuple[Any, AtHand, Rows] | None:
        """What is to be known after a probe, the batch and the arguments; ``None``: do nothing."""
        batch = self.at_hand()
        if batch is None or batch.examples == 0 or not torch.is_grad_enabled():
            self._any = True
            return None
        if self.when == "first" and self._known:
            self._any = True
            return None
        arguments = named(self.module, args)
        self._layers = list(self.module.modules())
        self._names = {layer: name for name, layer in self.module.named_modules()}
        whole = self._rows_of(arguments, kwargs, batch.rows)
        key = (
            structure({**arguments, **kwargs}, batch.rows),
            whole.second,
            # Layers that were exchanged, and hooks that were registered, since the last probe.
            tuple(self._layers),
            tuple(attached(self._layers)),
            # Whether they are training, and switches of the user's own.
            tuple([v for m in self._layers for v in vars(m).values() if v is True or v is False]),
        )
        self._key = key
        if not again and self._owners is not None and key in self._owners.waiting:
            return None
        if not again and (key in self._known or (key, batch.rows) in self._known):
            return None
        return key, batch, whole

    def second(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The arguments that were seen to have the rows in their second dimension."""
        batch = self.at_hand()
        if batch is None or not self._second:
            return []
        found = self._rows_of(named(self.module, args), kwargs, batch.rows)
        leaves = zip(found.names, found.leaves(), strict=True)
        return [
            leaf
            for place, (name, leaf) in enumerate(leaves)
            if place in found.second and (place, name) in self._second
        ]

    def _rows_of(self, args: dict[str, Any], kwargs: dict[str, Any], rows: int) -> Rows:
        """The arguments; of a square, what came before tells on which side the rows are."""
        found = Rows.of(args, kwargs, rows, self._second)
        if self._owners is None:
            return found
        squares = found.squares().items()
        by_columns = {k for k, leaf in squares if self._owners.by_columns(leaf)}
        return dataclasses.replace(found, second=found.second | by_columns)

    def _looked(self, due: tuple[Any, AtHand, Rows]) -> str | None:
        """Why these examples are not kept apart, or ``None``."""
        key, batch, whole = due
        self._probed = True
        self._signature = LossSignature(self._aside)  # other shapes may have another loss
        self._outputs, self._passes = Outputs(), Answers()
        if not whole.following:
            return _NO_ROWS.format(rows=batch.rows)
        self._busy = True
        try:
            found = self._probe(whole, batch)
        except RuntimeError as error:
            more = whole.say_second()
            if type(error) is not RuntimeError or not more:  # as a CheckpointError is none
                raise
            raise RuntimeError(f"{error}{more}") from error
        finally:
            self._busy = False
        if isinstance(found, str):
            return found + whole.say_second()
        waits = self._owners is not None and key in self._owners.waiting
        if found is not None and not waits:
            self._known.add(key if found else (key, batch.rows))
            self._told[key, self._looks] = self._passes
        elif not waits and not self._any:
            self.vain = True
        return None

    def _probe(self, whole: Rows, batch: AtHand) -> bool | str | None:
        """Whether it holds for all batches, or only for those of this size; ``None``: unknown.

        A text says why the module could not be run.
        """
        start = replay()
        first_error: Exception | None = None
        try:
            for rows, few, more in self._attempts(whole, batch):
                try:
                    base, most = (self._taken(rows, batch, count) for count in (few, more))
                    for _ in range(_ROUNDS):
                        self._settled(base, most, start)
                        with exact_products():
                            larger = self._run(most, start)
                        if not self.follow():
                            break
                    smaller = self._run(base, start)
                except CheckpointError:  # a real pass would raise it too, in words of torch's
                    raise
                except Exception as error:
                    first_error = first_error or error
                    continue
                self._check_rows(smaller.seen, few * batch.views)
                self._check_rows(larger.seen, more * batch.views)
                self._passes.add(larger.told)
                random, waits = smaller.random, self._may_wait(smaller)
                known = self._vary(base, smaller, batch.views, start, briefly=waits)
                del smaller
                try:
                    self._leave_out(larger, batch.views, start)
                except RuntimeError:
                    if waits:  # what is more than counting has a name of its own
                        self._vary(base, self._run(base, start), batch.views, start)
                    raise
                del larger  # a decoder's logits, say, are in every run that is kept
                self._second |= {(k, rows.names[k]) for k in rows.following & rows.second}
                why = self._unconfirmed(base, start, random=random)
                if waits and why is None:
                    assert self._owners is not None
                    of = self._key, base, batch.views, start, self._check
                    self._owners.waiting[self._key] = functools.partial(self._late, *of)
                return why or waits or known
            # Of a module that takes batches of one size only, that size is all there is to see.
            if whole.rows == batch.views:
                self._any = True
                return None
            try:
                run = self._run(whole, start)
            except Exception as error:  # which the call itself is left to raise
                return _FAILED.format(error=named_error(first_error or error))
            self._check_rows(run.seen, whole.rows)
            known = self._vary(whole, run, batch.views, start)
            if (why := self._unconfirmed(whole, start, random=run.random)) is not None:
                return why
            return None if known is None else False
        finally:
            start()

    def _settled(self, smaller: Rows, larger: Rows, start: Callable[[], None]) -> None:
        """Have it seen what follows the number of rows."""
        for number in range(_PASSES):  # what one round tells may lead to other operations
            with self.settle(number == 0) as changed:
                self._forward(smaller, start)
                self._forward(larger, start)
            if number and not any(changed or ()):
                return

    def _may_wait(self, run: _Run) -> bool:
        """Whether one example after the other is changed only if nothing is shown of this step.

        Of a program that is told numbers these passes show which of them matter, before it is; of a
        loss that the module returns, what it makes of targets that are ignored in other steps.
        """
        followed = self._owners is not None and self._owners.following
        return followed and self.together is None and not run.told and not run.reduced

    def _late(
        self,
        key: Any,
        base: Rows,
        views: int,
        start: Callable[[], None],
        check: Confirmation | None,
        *,
        shown: bool,
    ) -> None:
        """The step has come to its end: what is known of the call, or what was left to do.

        Raises:
            RuntimeError: naming the layer, and the remedy.
        """
        if not shown:
            now = replay()
            self._busy = True
            try:
                with self.around():
                    known = self._vary(base, self._run(base, start), views, start)
                    why = self._moved_too(check, base, start)
            finally:
                self._busy = False
                now()
            if why is not None:
                raise RuntimeError(why)
            if known is None:
                self.vain = True
                return
        self._known.add(key)

    def _leave_out(self, a: _Run, views: int, start: Callable[[], None]) -> None:
        """Refuse a module of which rows move where some examples are left out of the batch.

        The first and the last are, so that all others have another place, from the front and from
        the end, and one beside it, so that the number is odd. In eval mode, if random numbers are
        drawn otherwise: batches of other sizes have others.

        Args:
            a: the run on all of them.
            views: rows of an example.
            start: brings the random generators into the state that each run begins with.
        """
        rows = a.rows
        kept = list(range(views, rows.rows - 2 * views))
        rest = rows.taken(torch.tensor(kept))
        steadily = self._evaluating() if a.random else contextlib.nullcontext()
        try:
            with steadily, exact_products():
                a = self._run(rows, start) if a.random else a
                if a.random:
                    return
                self._passes.add(a.told)
                # A loss that the module returns may be a mean over its rows.
                shares = (1.0, len(kept) / rows.rows) if a.reduced else (1.0,)
                orders = (False, True) if rows.following & rows.second else (False,)
                several = [
                    self._run(rest, start, of=(rows.rows, kept), loss=s, steps_first=order)
                    for s, order in itertools.product(shares, orders)
                ]
                if any(moved_without(a.seen, b.seen, kept, rows.rows) is None for b in several):
                    return
                # Is it rounding?
                with rounded_otherwise(self.module, rows) as moved:
                    c = self._run(moved, start)
        except Exception:  # which the run itself is left to raise
            return
        found = [moved_without(a.seen, b.seen, kept, rows.rows, shaken=c.seen) for b in several]
        if all(s is not None for s in found):
            name = self._name(cast("Sighting", found[0]))
            ties = _TIES if a.reduced else ""
            raise RuntimeError(_COUNTED.format(layer=name, ties=ties))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """In eval mode; in the modes of hooks, which see nothing then, only what has no weights."""
        before = [
            (m, m.training)
            for m in self._layers
            if not self.hooked or not any(p is not None for p in m._parameters.values())
        ]
        try:
            for m, _ in before:
                m.training = False
            yield
        finally:
            for m, training in before:
                m.training = training

    def _unconfirmed(self, base: Rows, start: Callable[[], None], *, random: bool) -> str | None:
        """Which parameter's gradients are not those of autograd, and what may be done about it.

        Raises:
            RuntimeError: with that, where hooks form them: none runs of a layer that is not called.
        """
        trained = self._trained
        if self.hooked:  # which refuse a call in eval mode themselves
            training = {p for m in self._layers if m.training for p in m._parameters.values()}
            trained = {n: p for n, p in trained.items() if p in training}
        self._check = check = Confirmation(self.module, trained, self.witnessed, self._outputs.of)
        try:
            off = check.disagreement(base, start)
            if (why := self._moved_too(check, base, start)) is not None:
                return why
            if off is not None and self.hooked:
                # Opacus keeps inputs by itself, whatever packs the tensors that autograd saves.
                check.plainly = True
                with contextlib.suppress(Exception):  # torch.func takes no hooks on these
                    off = check.disagreement(base, start)
            elif off is not None and random:
                # A rule may draw other random numbers than the layer, of the same distribution.
                with self._evaluating():
                    off = check.disagreement(base, start)
        except Exception:  # which the run itself is left to raise
            return None
        if off is None:
            return None
        found = "are missing" if off.unseen else "differ by more than rounding"
        if self.hooked:
            raise RuntimeError(self._say_of(off.name, _UNHOOKED, found=found))
        return self._say_of(off.name, _UNCONFIRMED, found=found)

    def _moved_too(
        self, check: Confirmation | None, base: Rows, start: Callable[[], None]
    ) -> str | None:
        """Whose gradient moved, of a layer that is run again, when another example was changed.

        What other layers' gradients are made of was compared itself.
        """
        varied, self._varied = self._varied, []
        if check is None or not check.replayed:
            return None
        found = [check.moved_others(base, rows, own, start) for rows, own in varied]
        return next((self._say_of(name, _MIXED) for name in found if name is not None), None)

    def _say_of(self, parameter: str, text: str, **more: str) -> str:
        layer, _, own = parameter.rpartition(".")
        kind = type(self.module.get_submodule(layer)).__name__
        return text.format(name=own, layer=layer or "(the module itself)", kind=kind, **more)

    def _attempts(self, whole: Rows, batch: AtHand) -> Iterator[tuple[Rows, int, int]]:
        """Which leaves may follow the batch, and two numbers of examples to run.

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

    def _taken(self, rows: Rows, batch: AtHand, examples: int) -> Rows:
        """Examples of the batch, spread over it; some of them several times where there are few.

        None that is broken or far off, unless all are: where nothing is finite nothing shows, and
        one such example would have a module that mixes examples go unseen.
        """
        fine = rows.ordinary()[: batch.examples * batch.views].view(-1, batch.views).all(1)
        usable = (fine if fine.any() else torch.ones_like(fine)).nonzero().flatten()
        picked = usable[torch.arange(examples) * len(usable) // examples]
        within = torch.arange(batch.views)
        return rows.taken((picked[:, None] * batch.views + within).flatten())

    def _forward(self, rows: Rows, start: Callable[[], None]) -> None:
        """A pass there, and back where that may run layers again that ran without gradients."""
        start()
        witness = Witness(rows.rows)
        with untouched(self.module), eagerly(self._layers), self.witnessed(witness):
            every = self._outputs.of(rows.call(self.module), rows.rows, note=True)
            outputs = [y for y in every if y.requires_grad]
            if witness.hides:
                take_back(outputs, _gradients(outputs)[0])

    def _run(
        self,
        rows: Rows,
        start: Callable[[], None],
        *,
        of: tuple[int, Sequence[int]] | None = None,
        loss: float = 1.0,
        steps_first: bool = False,
    ) -> _Run:
        """A pass there and back.

        Args:
            rows: to run on.
            start: brings the random generators into the state that each run begins with.
            of: how many rows these are some of, and which, so that they are weighed as there.
            loss: what a loss is weighed by.
            steps_first: whether what has several entries for each row has all rows' first ones
                first, as flattened (steps, rows) are.
        """
        start()
        witness, telling = Witness(rows.rows), Telling()
        with untouched(self.module), eagerly(self._layers), self.witnessed(witness):
            before = global_state()
            with telling:
                output = rows.call(self.module)
            random = not same_global_state(before, global_state())
            every = self._outputs.of(output, rows.rows)
            outputs = [y for y in every if y.requires_grad]
            gradients, reduced = _gradients(outputs, rows.rows, of, loss, steps_first)
            if not reduced:
                weigh_rows(outputs, gradients, rows.rows)
            take_back(outputs, gradients)
        told = telling.told
        return _Run(witness.sightings, witness.finite, reduced, rows, told, random)

    def _check_rows(self, seen: Sequence[Sighting], rows: int) -> None:
        """Refuse a call of which the first dimension does not follow the examples."""
        self._shown.update(s.layer for s in seen)
        # The steps of a packed sequence have fewer rows, in the order of the examples.
        wrong = [s for s in seen if len(s.gradient) != rows and not isinstance(s.layer, RNNLinear)]
        if not wrong:
            return
        s = next((s for s in wrong if _takes_positions_first(s.layer)), wrong[0])
        hint = self._batch_first(s.layer)
        raise RuntimeError(
            f"layer {self._name(s)!r} has {len(s.gradient)} per-example gradients for a batch "
            f"of {rows} rows (fed to see): the first dimension of what it is called on does "
            f"not follow the examples. {hint}Keep one row per example in "
            "the first dimension of every layer's input (give what all examples share a row for "
            "each, as in ids.expand(rows, -1)), train on the loader's batch as a whole, or freeze "
            "the layer with requires_grad_(False)"
        )

    def _batch_first(self, layer: nn.Module) -> str:
        """The remedy where a layer takes examples for positions, by who is told batch_first."""
        if not _takes_positions_first(layer):
            return ""
        around = (nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        every = self.module.named_modules()
        name, owner = next(
            ((n, m) for n, m in every if isinstance(m, around) and layer in m.modules()),
            (self._names.get(layer, ""), layer),
        )
        return (
            f"{type(owner).__name__} {name or '(the module itself)'!r} is made with "
            "batch_first=False, which takes the first dimension for positions, and so examples "
            "that are there for one sequence: make it with batch_first=True if its input has the "
            "examples first. "
        )

    def _vary(
        self,
        base: Rows,
        run: _Run,
        views: int,
        start: Callable[[], None],
        *,
        briefly: bool = False,
    ) -> bool | None:
        """Change one example after the other; whether that showed something.

        Args:
            base: a few rows, without a change.
            run: on these.
            views: rows of an example.
            start: brings the random generators into the state that each run begins with.
            briefly: whether only the first is changed: whatever it is, that two runs differ shows.
        """
        examples = base.rows // views
        early = functools.partial(ends_early, padding=padding_id(self.module), labels=run.reduced)
        shown = run.finite and bool(run.seen)
        self._varied = []
        self._passes.add(run.told)
        for example in [0] if briefly else sorted({0, examples // 2, examples - 1}):
            own = range(example * views, (example + 1) * views)
            following = (example + 1) % examples
            other = range(following * views, (following + 1) * views)
            changes: list[Change] = [contents, contents_of_sequences, contents_of_floats]
            found = self._first_that_runs(base, run, own, other, changes, start)
            if found is None:
                shown = False
            else:
                self._compare(base, run, found, own, start)
                self._varied.append((found.rows, own))
            others = (huge, blank, broken) if example == examples // 2 else ()
            for change in () if briefly else (early, *others):
                found = self._first_that_runs(base, run, own, other, [change], start)
                if found is not None:
                    self._compare(base, run, found, own, start)
        return True if shown else None

    def _first_that_runs(
        self,
        base: Rows,
        run: _Run,
        own: range,
        other: range,
        changes: Sequence[Change],
        start: Callable[[], None],
    ) -> _Run | None:
        """The run with the first change that the module puts up with, calling the same layers."""
        for change in changes:
            rows = base.changed(own, other, change)
            if rows is None:
                continue
            try:
                found = self._run(rows, start)
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
                    f"whether layer {self._name(s)!r} takes part depends on one example of the "
                    "batch: it did for some numbers of that example, and not for others, so that "
                    "the example decides what gradients all the others have. Call the layer for "
                    "every example, and choose between results row by row (torch.where)"
                )
        for s in theirs:
            if not isinstance(s.layer, RNNLinear) and len(s.gradient) != rows:
                raise RuntimeError(
                    f"layer {self._name(s)!r} is called on as many rows as the numbers in the "
                    f"batch say ({len(s.gradient)}, of {rows} examples, where one of them was "
                    "changed), so that nothing says which rows are whose: call it on all "
                    "positions of every example, and mask what does not count afterwards"
                )

    def _compare(
        self, base: Rows, run: _Run, found: _Run, own: range, start: Callable[[], None]
    ) -> None:
        """Refuse what moved with another example."""
        self._passes.add(found.told)
        if next(moved(run.seen, found.seen, base.rows, own), None) is None:
            return
        # Is it rounding? On some devices sums come out in another order every time.
        before = [p.detach().clone() for p in self.module.parameters()]
        again = self._run(base, start)
        if any(
            not torch.equal(p, q) for p, q in zip(self.module.parameters(), before, strict=True)
        ):
            return  # a pass that writes into parameters: no step is made after it (StateWatch)
        if not same_calls(run.seen, again.seen) or _noisy(run.seen, again.seen):
            raise RuntimeError(
                "two runs of the module on the same numbers, with all random generators in the "
                "same state, differ, so that nothing shows whether it keeps the examples apart: "
                "let what is random in it use torch's, numpy's or Python's global generators, or "
                f"an attribute of a layer; {_SWITCH}"
            )
        calls = list(moved(run.seen, found.seen, base.rows, own, again.seen))
        if not calls:
            return
        by_input = [s for s, of_input in calls if of_input]
        if by_input:
            raise RuntimeError(
                f"layer {self._name(by_input[-1])!r} is given for one example what depends on "
                "another: its input moved when another example of the batch was changed. The "
                "module mixes the examples before this layer (by statistics, attention or a "
                "dimension that is not theirs), and no example's contribution can be bounded; "
                "keep the examples apart, one in each row of the first dimension"
            )
        ties = _TIES if run.reduced else ""
        raise RuntimeError(
            f"the gradient of one example at layer {self._name(calls[0][0])!r} moved when another "
            "example of the batch was changed, or ended early: what comes after this layer mixes "
            f"the examples, and no example's contribution can be bounded.{ties} Keep the examples "
            "apart"
        )

    def _name(self, s: Sighting) -> str:
        return self._names.get(s.layer, type(s.layer).__name__) or "(the module itself)"


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


def _gradients(
    outputs: Sequence[torch.Tensor],
    rows: int = 0,
    of: tuple[int, Sequence[int]] | None = None,
    loss: float = 1.0,
    steps_first: bool = False,
) -> tuple[list[torch.Tensor], bool]:
    """By all outputs, of Σ w·y − cos y with random w (``weigh``); and whether one is a loss.

    A single number is taken for a loss, a sum over the examples as it is, or ``loss`` times that.
    """
    found: list[torch.Tensor] = []
    reduced = False
    generator = torch.Generator().manual_seed(0)
    for y in outputs:
        if y.numel() == 1:
            found.append(torch.full_like(y, loss))
            reduced = True
        else:
            shape, picked = y.shape, None
            if of is not None and not len(y) % rows:
                each = len(y) // rows
                shape = torch.Size((of[0] * each, *y.shape[1:]))
                picked = [k * each + j for k in of[1] for j in range(each)]
                if steps_first:
                    picked = [j * of[0] + k for j in range(each) for k in of[1]]
            w = torch.randn(shape, generator=generator)
            found.append(weigh(y, w if picked is None else w[picked]))
    return found, reduced
