"""The probe: whether what is clipped as one example's depends on that example alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from dptrain.clipping.base.precision import exact_products
from dptrain.clipping.base.rows import check_dense
from dptrain.clipping.owners import Answers, OwnerWatch, look_of_call
from dptrain.clipping.probe.examination import SWITCH, Examination
from dptrain.clipping.probe.inputs import Named, Rows, structure
from dptrain.clipping.probe.passes import AtHand, Pass
from dptrain.clipping.probe.restoring import attached, replay
from dptrain.clipping.probe.signature import LossSignature
from dptrain.clipping.probe.witness import Witness
from dptrain.core import modules_of, named_error, remember_globals, restore_global_state

PROBES = ("first", "shapes", "off")
"""Times at which the probe looks: at the first batch, at every new shape of inputs, or never."""

_ROUNDS = 5  # of looking for uses of parameters past their layers, and following these

_OUTSIDE = "called outside the module's own forward"
_UNSEEN = (
    f"a gradient reached layer {{layer!r}}, on which the outputs of the module do not seem to "
    "depend, so it cannot be checked that the module treats the examples separately. Let the "
    f"module's forward return what the loss is computed from, as tensors. {SWITCH}"
)
_FAILED = (
    "the module cannot be run on a few rows of the batch, nor on a copy of it, so it cannot be "
    f"checked that it treats the examples separately ({{error}}). Give every argument with one "
    f"row per example its rows in the first dimension. {SWITCH}"
)
_NO_ROWS = (
    f"the batch has {{rows}} rows, and no argument of the module has this size in its first "
    "dimension, so its numbers cannot be assigned to examples. Pass the module tensors with one "
    f"row per example in the first dimension. {SWITCH}"
)


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
        owners: follows some of the steps, where it is told of batches.

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
        owners: OwnerWatch,
    ) -> None:
        self.together, self.around, self.owners = together, around, owners
        self.module, self.witnessed, self.at_hand, self.settle = module, witnessed, at_hand, settle
        self.follow = follow
        self.when, self.hooked = when, hooked
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._named = Named(module)
        self._known: set[Any] = set()
        self._shown: set[nn.Module] = set()  # layers that a probe's gradient reached
        self._passes = Examination(module, witnessed, self._trained, self._shown)
        self._busy = False
        self._probed = False  # for the call that is being made
        self._call: tuple[Any, ...] | None = None
        self._unseen: set[nn.Module] = set()  # layers called in it that no probe has reached
        self._in_vain: set[nn.Module] = set()  # those that a further probe did not reach either
        self._answers: dict[str, str | None] = {}  # what became of their doubts
        self._inside = False
        self._signature = LossSignature(owners.unseen)
        self.outside = self.vain = False
        self._key: Any = None  # of the call that is being made
        self._looks: Any = None  # of the same, plain values and all, where it is followed
        self._told: dict[Any, Answers] = {}  # by what was probed
        self._why: str | None = None  # what a backward pass of this forward pass is refused for
        self._any = False  # whether there is but one example, so that any layer will do
        # Places and names of arguments that were seen to have the rows in their second dimension.
        self._second: set[tuple[int, str]] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Probe the module, if need be: it is about to be called with these arguments.

        Raises:
            RuntimeError: naming the layer, and the remedy.
        """
        if self._busy or self.when == "off":
            return
        # Nor could it be run on a few of the rows of what is not dense.
        check_dense(f"module, a {type(self.module).__name__}", args, kwargs)
        with self.owners.aside(), self.around():
            self._inside = False
            self._any = self._probed = False
            self._unseen.clear()
            batch, self._looks = self.at_hand(), None
            if self.owners.following and batch is not None:
                self._looks = look_of_call(self.module, args, kwargs, batch.rows)
            self._why = self._look(args, kwargs)
            self.owners.answers = self._told.get((self._key, self._looks))
            self._call = args, kwargs, remember_globals()
            self._inside = True
        self.owners.called(args, kwargs, self._seconds(args, kwargs))

    def end(self, output: Any = None) -> None:
        """Note that the call has ended, with this output if there is one."""
        if self._busy or self.when == "off":
            return
        with self.owners.aside(), self.around():
            self._inside = False
            call, self._call = self._call, None
            if call is not None and output is not None:
                self._look_again(*call)
            batch = self.at_hand()
            if output is not None and batch is not None and batch.examples:
                found = (
                    (y, d) for y, d in self._passes.outputs.as_they_are(output) if y.requires_grad
                )
                if torch.is_grad_enabled():
                    self._signature.look_at(found, batch.rows, batch.reduction)
        self.owners.returned(output)

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
        return _UNSEEN.format(layer=self._passes.names.get(layer))

    def doubt(self, layer: nn.Module) -> str | None:
        """The doubt to give ``resolve`` when a gradient of this call of a layer comes."""
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
        """Note that a gradient of a call came, with the doubt that there was at the call.

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
        """The reason why these examples are not kept apart, or ``None``; looks as asked."""
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
        """The key of a due probe, the batch and the arguments; ``None`` if none is due."""
        batch = self.at_hand()
        if batch is None or batch.examples == 0 or not torch.is_grad_enabled():
            self._any = True
            return None
        if self.when == "first" and self._known:
            self._any = True
            return None
        arguments = self._named(args)
        layers = modules_of(self.module)
        whole = self._rows_of(arguments, kwargs, batch.rows)
        key = (
            structure({**arguments, **kwargs}, batch.rows),
            whole.second,
            # Layers that were exchanged, and hooks that were registered, since the last probe.
            tuple(layers),
            attached(layers),
            # Training flags, and switches of the user's own.
            tuple([v for m in layers for v in vars(m).values() if v is True or v is False]),
        )
        self._key = key
        if not again and key in self.owners.waiting:
            return None
        if not again and (key in self._known or (key, batch.rows) in self._known):
            return None
        return key, batch, whole

    def _seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The arguments that were seen to have the rows in their second dimension."""
        batch = self.at_hand()
        if batch is None or not self._second:
            return []
        found = self._rows_of(self._named(args), kwargs, batch.rows)
        leaves = zip(found.names, found.leaves(), strict=True)
        return [
            leaf
            for place, (name, leaf) in enumerate(leaves)
            if place in found.second and (place, name) in self._second
        ]

    def _rows_of(self, args: dict[str, Any], kwargs: dict[str, Any], rows: int) -> Rows:
        """The arguments; of a square, what came before tells on which side the rows are."""
        found = Rows.of(args, kwargs, rows, self._second)
        squares = found.squares().items()
        by_columns = {k for k, leaf in squares if self.owners.by_columns(leaf)}
        return dataclasses.replace(found, second=found.second | by_columns)

    def _looked(self, due: tuple[Any, AtHand, Rows]) -> str | None:
        """The reason why these examples are not kept apart, or ``None``."""
        key, batch, whole = due
        self._probed = True
        self._signature = LossSignature(self.owners.unseen)  # other shapes may have another loss
        self._passes = Examination(
            self.module,
            self.witnessed,
            self._trained,
            self._shown,
            views=batch.views,
            hooked=self.hooked,
        )
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
        waits = key in self.owners.waiting
        if found is not None and not waits:
            self._known.add(key if found else (key, batch.rows))
            self._told[key, self._looks] = self._passes.answers
        elif not waits and not self._any:
            self.vain = True
        return None

    def _probe(self, whole: Rows, batch: AtHand) -> bool | str | None:
        """True if it holds for all batches, or only for those of this size; ``None``: unknown.

        A text says why the module could not be run.
        """
        first_error: Exception | None = None
        try:
            for rows, few, more in self._passes.attempts(whole, batch):
                try:
                    base, most = (self._passes.taken(rows, batch, count) for count in (few, more))
                    for _ in range(_ROUNDS):
                        self._passes.settled(base, most, self.settle)
                        with exact_products():
                            larger = self._passes.run(most)
                        if not self.follow():
                            break
                    smaller = self._passes.run(base)
                except CheckpointError:  # a real pass would raise it too, in words of torch's
                    raise
                except Exception as error:
                    first_error = first_error or error
                    continue
                self._passes.check_rows(smaller.seen, few * batch.views)
                self._passes.check_rows(larger.seen, more * batch.views)
                self._passes.answers.add(larger.told)
                random, waits = smaller.random, self._may_wait(smaller)
                known = self._passes.vary(base, smaller, briefly=waits)
                del smaller
                try:
                    self._passes.leave_out(larger)
                except RuntimeError:
                    if waits:  # what is more than counting has a name of its own
                        self._passes.vary(base, self._passes.run(base))
                    raise
                del larger  # a decoder's logits, say, are in every run that is kept
                self._second |= {(k, rows.names[k]) for k in rows.following & rows.second}
                why = self._passes.unconfirmed(base, random=random)
                if waits and why is None:
                    of = self._key, base, self._passes
                    self.owners.waiting[self._key] = functools.partial(self._late, *of)
                return why or waits or known
            # Of a module that takes batches of one size only, that size is all there is to see.
            if whole.rows == batch.views:
                self._any = True
                return None
            try:
                run = self._passes.run(whole)
            except Exception as error:  # which the call itself is left to raise
                return _FAILED.format(error=named_error(first_error or error))
            self._passes.check_rows(run.seen, whole.rows)
            known = self._passes.vary(whole, run)
            if (why := self._passes.unconfirmed(whole, random=run.random)) is not None:
                return why
            return None if known is None else False
        finally:
            self._passes.start()

    def _may_wait(self, run: Pass) -> bool:
        """True if one example after the other is changed only if nothing is shown of this step.

        Of a program that is told numbers these passes show which of them matter, before it is; of a
        loss that the module returns, what it makes of targets that are ignored in other steps.
        """
        alone = self.owners.following and self.together is None
        return alone and not run.told and not run.reduced

    def _late(self, key: Any, base: Rows, passes: Examination, *, shown: bool) -> None:
        """The step has come to its end: what is known of the call, or what was left to do."""
        if not shown:
            now, self._busy = replay(), True
            try:
                with self.around():
                    known = passes.vary(base, passes.run(base))
                    why = passes.moved_too(base)
            finally:
                self._busy = False
                now()
            if why is not None:
                raise RuntimeError(why)
            if known is None:
                self.vain = True
                return
        self._known.add(key)
