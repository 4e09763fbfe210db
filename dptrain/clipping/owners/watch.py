"""Watch over steps of a run: whether what is clipped as an example's gradient is that example's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dptrain.clipping.base.rows import is_dense
from dptrain.clipping.owners.answers import Answers
from dptrain.clipping.owners.looks import look_of_call
from dptrain.clipping.owners.maps import EVENT, SHARED, thin
from dptrain.clipping.owners.trace import Event, OwnerTrace
from dptrain.sampling import MicroBatch

SHARE = 0.01
"""Share of steps after the first that are followed: each costs one to two ordinary ones more."""

_INPUT = "its input"
_AT_ONCE = 3  # calls that may look otherwise and be followed, and then one in _ONE_IN
_ONE_IN = 20

_REMEDY = "Keep the examples apart, one in each row of the first dimension"


class Ambiguous(Exception):
    """As many things as rows: one of each row, or things that have the rows each."""


class RowsMeet(RuntimeError):
    """A gradient that would be clipped as one example's depends on another."""


@dataclasses.dataclass
class Findings:
    """Findings of the steps that were followed; kept with the run.

    Attributes:
        shown: steps in which all that was clipped was each example's own.
        tested: steps in which that could not be followed.
        why: of the first of those, what could not.
        told: the first number that was told, and taken for a constant as it would have moved no
            row in passes over a few.
    """

    shown: list[int] = dataclasses.field(default_factory=list)
    tested: list[int] = dataclasses.field(default_factory=list)
    why: str | None = None
    told: str | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> Findings:
        """Findings from what ``dataclasses.asdict`` made, which is not changed."""
        return cls(**copy.deepcopy(dict(saved or {})))

    def note(self, *, vain: bool = False) -> str:
        """The guarantee's note on this; nothing in it follows from which examples a batch has.

        Args:
            vain: whether there was a batch of which passes over a few rows showed nothing.
        """
        apart = "that no example's gradient depends on another's "
        if self.shown and self.why is None:
            told = ""
            if self.told is not None:
                told = (
                    "; numbers that the program reads from tensors (the first: "
                    f"{self.told}) count as constants, because they changed no row in passes over "
                    "a few rows"
                )
            return (
                f"{apart}was shown operator by operator in the steps that were followed (the "
                f"first, and others at random) and is assumed for all other steps{told}"
            )
        tested = "was tested on a few rows only"
        if vain:
            tested = "is assumed, because passes over a few rows did not show it"
        why = "" if self.why is None else f" ({self.why})"
        return f"{apart}{tested}: not every followed step could be followed to its end{why}"


class _Running(threading.local):
    """The one whose trace is under way in a thread: of a run that was left, nothing goes on."""

    watch: weakref.ref[OwnerWatch] | None = None


_running = _Running()


class OwnerWatch:
    """Follows a few steps of a run with owner maps (``OwnerTrace``), from batch to gradients.

    The first step of a process is followed, a hundredth of the others at random, and a step from
    its call of the module on if that looks otherwise than all so far (``look_of_call``), as often
    as its cost allows. In these, all that layers' gradients are made of has to be of the example
    that it is clipped as (docs/theory/limits.md#thm-owners).

    Args:
        module: the user's.
        views: rows an example has.
        seed: of the choice of steps.
        once: whether only the first step that can be followed is.
    """

    def __init__(self, module: nn.Module, *, views: int, seed: int, once: bool = False) -> None:
        self.module, self.views = module, views
        self.findings = Findings()
        self._seed, self._once = seed, once
        self._due = True
        self._wanted = False  # of the batch at hand all is to be followed
        self._refused: str | None = None  # of its backward pass
        self._step: int | None = None  # all parts of which are followed
        self._trace: OwnerTrace | None = None
        self._owners = torch.empty(0, dtype=torch.int32)  # of the rows that the module is fed
        self._why: str | None = None
        self._seen = False
        self.answers: Answers | None = None  # of what the module is told in the call to come
        # Work left to do at the end of a step, which is told whether it was shown.
        self.waiting: dict[Any, Callable[..., None]] = {}
        self._looks: set[int] = set()
        self._calls = 0
        self._batch: MicroBatch | None = None
        self._collated = False
        self._halfway = False  # followed from the call of the module on
        self._stop: weakref.finalize[[], OwnerWatch] | None = None

    def begin(self, batch: MicroBatch, data: Any, *, collated: bool = False) -> None:
        """Note that the user is about to be given this batch.

        Args:
            batch: which examples it has.
            data: what the loader gives.
            collated: whether torch's default collate function made it, whose lists hold fields, or
                the texts of a field.
        """
        self.drop()
        self.waiting.clear()
        self._collated = collated
        other = None if _running.watch is None else _running.watch()
        if other is not None:
            other.drop()
        _running.watch = weakref.ref(self)
        self._batch = batch
        self._wanted, self._refused = False, None
        if not self._chosen(batch.step) or not len(batch.indices):
            return
        self._wanted, self._step = True, batch.step
        self._halfway = False
        self._start([data], collated=collated)

    def _start(self, given: Sequence[Any], **how: Any) -> None:
        """Follow from here, where the user has these; ``how`` is as of ``declare``."""
        batch = self._batch
        assert batch is not None
        sizes = np.ones(len(batch.weights), dtype=np.int64) if batch.sizes is None else batch.sizes
        records = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(torch.int32)
        self._owners = records.repeat_interleave(self.views)
        self._trace = trace = OwnerTrace(self._constants)
        self._why, self._seen = None, False
        try:
            if not declare(trace, given, records, self._owners, **how):
                self._doubt("the batch holds what is no tensor, or a tensor without a row each")
        except Ambiguous:  # of a batch of another size it may be clear
            self._trace, self._step = None, None
            self._wanted, self._due = False, True
            return
        undo = contextlib.ExitStack()
        undo.enter_context(_eagerly())
        undo.callback(trace.stop)
        self._stop = weakref.finalize(self, undo.close)
        trace.start()

    def _constants(self) -> Iterator[torch.Tensor]:
        held = (*self.module.parameters(), *self.module.buffers())
        return (tensor for tensor in held if is_dense(tensor))

    def _chosen(self, step: int) -> bool:
        if self._due or step == self._step:
            return True
        return not self._once and random.Random(f"{self._seed}:{step}").random() < SHARE

    @property
    def following(self) -> bool:
        """True if what is done now is followed, from the batch on."""
        return self._trace is not None and not self._trace.ended and not self._halfway

    def end(self) -> None:
        """The step is to be made: nothing is followed from here.

        Raises:
            RowsMeet: if a backward pass of its batch was refused.
            RuntimeError: of what was left to do.
        """
        if self._refused is not None:
            raise RowsMeet(self._refused)
        waiting, self.waiting = self.waiting, {}
        shown = self._ended()
        for each in waiting.values():
            each(shown=shown)

    def _ended(self) -> bool:
        """Take note of what was found; whether all that was clipped was each example's own."""
        trace = self._trace
        failed = trace is None or trace.ended
        self.drop()
        step = -1 if self._batch is None else self._batch.step
        if trace is None or failed:
            if self._wanted:
                self.findings.tested.append(step)
                self.findings.why = self.findings.why or "an error, or another run, ended it"
            return False
        self._due = False
        if trace.escapes:
            self._doubt(f"numbers leave the tensors: {trace.escapes[0]}")
        if trace.lost is not None:
            self._doubt(f"nothing is known of what {trace.lost} returns")
        if not self._seen:
            self._doubt("no gradient of the batch was seen")
        shown = self._why is None
        if self._halfway:
            return shown  # of what came before the call nothing is known
        if shown:
            self.findings.shown.append(step)
            if trace.vouched is not None:
                self.findings.told = self.findings.told or str(trace.vouched)
        else:
            self.findings.tested.append(step)
            self.findings.why = self.findings.why or self._why
        return shown

    def drop(self) -> None:
        """Drop the step that was followed, if one was."""
        if self._stop is not None:
            self._stop()
        self._due = self._due or self._trace is not None
        self._stop = self._trace = None

    def _doubt(self, why: str) -> None:
        self._why = self._why or why

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """A context for what is no part of the user's program, as it calls the module."""
        return self._beside(within=False)

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """A context for what is no part of the user's program, within a call of torch too."""
        return self._beside(within=True)

    @property
    def traces(self) -> bool:
        """True while a trace is under way, be it from the middle of a step on."""
        return self._trace is not None

    @contextlib.contextmanager
    def _beside(self, *, within: bool) -> Iterator[None]:
        trace = self._trace
        if trace is None:
            yield
            return
        try:
            with trace.unseen() if within else trace.aside():
                yield
        except BaseException:
            if within:  # and not stop: torch may hold its modes aside in this call
                trace.end()
            else:
                self.drop()
            raise

    def called(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], second: Sequence[torch.Tensor] = ()
    ) -> None:
        """The module is called on these: rows of which nobody knows whose they are, are taken so.

        What a program makes of texts before is between the data and the module; what is left to
        show is the module and the loss.

        Args:
            args, kwargs: of the call.
            second: tensors among them that have the rows in their second dimension.
        """
        batch = self._batch
        if batch is None or not len(batch.indices):
            return
        if not self._once:
            self._look(batch, args, kwargs, second)
        if self._trace is None:
            return
        self._trace.vouch(self.answers)
        if self._halfway:
            return
        rows = len(self._owners)
        if not self._collated and any(len(t) == rows and not self.by_columns(t) for t in second):
            self.drop()  # of a square nothing said so; of a batch of another size it may be clear
            self._due, self._step = True, None
            return
        for tensor in _tensors((args, kwargs)):
            owners = self._trace.owners(tensor)
            few = thin(owners)
            unknown = few.numel() and bool((few <= EVENT).any())
            columns = _is_one_of(tensor, second)
            if not unknown or tensor.shape[columns : columns + 1] != (rows,):
                continue
            event = self._trace.event(int(few.min()))
            if event.kind == "unknown":
                self._doubt(f"what the module is called on is made by {event}")
                self._trace.own(tensor, _by_rows(self._owners, tensor, columns))

    def by_columns(self, tensor: torch.Tensor) -> bool:
        """True if the second dimension of a tensor is known to be the rows that are fed."""
        if self._trace is None or tensor.dim() < 2:
            return False
        columns = thin(self._trace.owners(tensor).transpose(0, 1))
        own = _by_rows(self._owners, columns)
        return len(columns) == len(own) and bool((columns == own).all())

    def returned(self, output: Any) -> None:
        """Note what the module returned; ``None``: its call failed.

        A number in it that follows from what the module was told is no constant to the loop.
        """
        if output is None:
            self.drop()
            return
        told = any(isinstance(leaf, bool | int | float) for leaf in _leaves(output))
        if told and self._trace is not None:
            self._trace.pass_on()

    def _look(
        self,
        batch: MicroBatch,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        second: Sequence[torch.Tensor],
    ) -> None:
        """Follow from this call on if it looks otherwise than all so far."""
        self._calls += 1
        look = look_of_call(self.module, args, kwargs, batch.rows * self.views)
        if look in self._looks:
            return
        within = len(self._looks) < _AT_ONCE + self._calls / _ONE_IN
        if within or self._trace is not None:
            self._looks.add(look)
        if self._trace is None and within:
            self._halfway = True
            self._start([*args, *kwargs.values()], called=True, second=second)

    def check(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> None:
        """Check the tensors that a layer's gradients are to be made of.

        Args:
            layer: of the module.
            inputs: with a row for each that the module is fed, or of what all share.
            gradient: by its output, shape (rows, ...).

        Raises:
            RowsMeet: if a row of them depends on another example.
        """
        if self._trace is None:
            return
        try:
            self._check_all(layer, inputs, gradient)
        except RowsMeet as error:
            self._refused = str(error)
            raise

    def _check_all(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> None:
        rows = len(gradient) if gradient.dim() else 1
        if rows > len(self._owners) or (self.views > 1 and rows * self.views == len(self._owners)):
            return  # refused, as that is no number of rows
        self._check(layer, "the gradient by its output", gradient)
        for x in inputs:
            if isinstance(x, torch.Tensor):
                self._check(layer, _INPUT, x)

    def _name(self, layer: nn.Module) -> str:
        names = {m: name for name, m in self.module.named_modules()}
        return f"layer {names.get(layer) or '(the module itself)'!r}, a {type(layer).__name__}"

    def _check(self, layer: nn.Module, what: str, tensor: torch.Tensor) -> None:
        assert self._trace is not None
        few = thin(self._trace.owners(tensor))
        if not few.numel():
            return
        own = self._owners[: len(tensor)] if tensor.dim() else self._owners[:0]
        if tensor.dim() and len(tensor) <= len(self._owners):
            mine = few == _by_rows(own, few)
        else:
            mine = torch.zeros(few.shape, dtype=torch.bool)
        self._seen = self._seen or bool(mine.any())
        few = few.expand(mine.shape)
        wrong = few[~mine & (few != SHARED)]
        if not wrong.numel():
            return
        least = int(wrong.min())
        if least > EVENT:
            raise RowsMeet(
                f"{self._name(layer)}: {what} has in one row of the batch numbers that belong to "
                "another example, so no example's contribution can be bounded. The rows are in "
                f"another order, or the examples are in another dimension than the first. {_REMEDY}"
            )
        # Where a bag begins, the examples before it say, and what is made of its ids says so too.
        places = isinstance(layer, nn.EmbeddingBag) and what == _INPUT
        mixed = (
            []
            if places
            else [e for v in wrong.unique().tolist() if v <= EVENT and (e := self._event(v))]
        )
        if mixed:
            raise RowsMeet(
                f"{self._name(layer)}: {what} depends for one example on another, so no "
                f"example's contribution can be bounded: {mixed[0]} combines the numbers of "
                f"several examples. {_remedy(mixed[0])}"
            )
        self._doubt(f"{what} of {self._name(layer)}, is made by {self._trace.event(least)}")

    def _event(self, owner: int) -> Event | None:
        assert self._trace is not None
        found = self._trace.event(owner)
        return found if found.kind == "mixed" else None


def _remedy(event: Event) -> str:
    if event.operator.startswith("nll_loss"):
        return (
            "A mean over the targets that count divides by a number that depends on the whole "
            "batch: use a loss from dptrain.losses, which reduces each example by itself"
        )
    if event.module is None:  # as Lightning's training_step and a loop's own lines
        return (
            "This happens outside the module's forward, as in a loss: reduce each example by "
            "itself there, as the losses of dptrain.losses do"
        )
    return _REMEDY


def _by_rows(owners: torch.Tensor, like: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    return owners.view(-1, *[1] * (like.dim() - dimension - 1))


def _is_one_of(tensor: torch.Tensor, those: Sequence[torch.Tensor]) -> bool:
    return any(tensor is one for one in those)


def declare(
    trace: OwnerTrace,
    given: Sequence[Any],
    records: torch.Tensor,
    fed: torch.Tensor,
    *,
    collated: bool = False,
    called: bool = False,
    second: Sequence[torch.Tensor] = (),
) -> bool:
    """Say whose the numbers of a batch are; True if all that it holds is known then.

    Args:
        given: what the loader gives, or what the module is called on.
        records: whose the rows are, shape (rows,).
        fed: whose they are where each has all its views.
        collated: whether lists hold fields, but for lists of texts.
        called: whether the module is called on it, as are switches of the program's.
        second: tensors that have the rows that are fed in their second dimension.
    """
    known = True
    several = len(records) > 1

    def whole(value: Any, owners: torch.Tensor | int) -> None:
        for tensor in _tensors(value):
            if is_dense(tensor):
                trace.own(tensor, owners)

    def one(leaf: Any) -> None:
        nonlocal known
        if isinstance(leaf, torch.Tensor) and not is_dense(leaf):
            known = False  # whose its numbers are, is unknown as they stand
        elif not several and isinstance(leaf, torch.Tensor):
            whole(leaf, 0)
        elif isinstance(leaf, torch.Tensor):
            d = int(_is_one_of(leaf, second))
            owners = along(leaf, d)
            known = known and owners is not None
            if owners is None and turned:
                d, owners = 1, along(leaf, 1)
            if owners is None:
                whole(leaf, trace.note("unknown", "a tensor of the batch without a row each"))
            else:
                trace.own(leaf, _by_rows(owners, leaf, d))
        elif isinstance(leaf, PackedSequence):
            known = _declare_packed(trace, leaf, records) and known
        elif isinstance(leaf, list | tuple):  # an item for each row, of shapes that Python knows
            for owner, item in zip(records.tolist(), leaf, strict=True):
                whole(item, owner)
            known = False
        elif leaf is not None and not (called and isinstance(leaf, bool)):
            known = False

    def along(tensor: torch.Tensor, dimension: int) -> torch.Tensor | None:
        size = tensor.shape[dimension : dimension + 1]
        return next((o for o in (records, fed) if size == o.shape), None)

    leaves = [leaf for v in given for leaf in _leaves(v, len(records), collated=collated)]
    # Where all come as (steps, rows, ...), they are taken so, though nothing shows it.
    turned = not any(
        isinstance(leaf, torch.Tensor)
        and is_dense(leaf)
        and leaf.dim() > 1
        and along(leaf, 0) is not None
        for leaf in leaves
    )
    for leaf in leaves:
        one(leaf)
    if not known:
        trace.own_python()
    return known


def _declare_packed(trace: OwnerTrace, leaf: PackedSequence, records: torch.Tensor) -> bool:
    sizes = leaf.batch_sizes.tolist()
    if not sizes or sizes[0] != len(records):
        trace.own(leaf.data, trace.note("unknown", "a packed sequence without a row each"))
        return False
    order = records if leaf.sorted_indices is None else records[leaf.sorted_indices.cpu()]
    trace.own(leaf.data, _by_rows(torch.cat([order[:n] for n in sizes]), leaf.data))
    return True


def _leaves(value: Any, rows: int | None = None, *, collated: bool = False) -> Iterator[Any]:
    """All that is in nested containers; whole lists where they have an item for each row."""
    if isinstance(value, PackedSequence):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        if _is_by_rows(value, rows, collated=collated):
            yield value
            return
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        yield value
    for item in items:
        yield from _leaves(item, rows, collated=collated)


def _is_by_rows(value: Sequence[Any], rows: int | None, *, collated: bool) -> bool:
    """True if a list has an item for each row."""
    if rows is None or rows < 2 or len(value) != rows:
        return False
    if collated:
        return all(isinstance(item, str | bytes) for item in value)
    if any(_has_rows(leaf, rows) for leaf in _within(value)):
        raise Ambiguous
    return True


def _within(value: Sequence[Any]) -> Iterator[Any]:
    """Containers and what they hold, whatever has a length."""
    for item in value:
        yield item
        if isinstance(item, Mapping):
            yield from _within(list(item.values()))
        elif isinstance(item, tuple | list):
            yield from _within(item)


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == rows
    return isinstance(value, tuple | list) and len(value) == rows


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Context without compiled code, which hides its operators."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
