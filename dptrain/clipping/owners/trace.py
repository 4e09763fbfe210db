"""Trace of a program, operator by operator, and of whose every number in it is."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.functional import cross_entropy, one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from dptrain.clipping.owners.answers import Answers, Place, place
from dptrain.clipping.owners.maps import EVENT, NEW, is_shared, shared, thin
from dptrain.clipping.owners.memory import Memory
from dptrain.clipping.owners.rules import Call, owners_of_results

_MOST = 2000  # events of which it is looked up where they were
_FUNCTORCH = os.path.join(os.path.dirname(torch.__file__), "_functorch")


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation at which owners were lost.

    Attributes:
        kind: ``"mixed"``: what several examples have was put together; ``"unknown"``: nothing says
            whose it is.
        operator: of torch.
        line: ``file:number`` of the program's own line, ``None`` in a backward pass.
        module: the class of the module whose forward that line is in, if it is in one's.
    """

    kind: Literal["mixed", "unknown"]
    operator: str
    line: str | None
    module: nn.Module | None

    def __str__(self) -> str:
        where = "" if self.line is None else f" at {self.line}"
        within = "" if self.module is None else f", in a {type(self.module).__name__}"
        return f"{self.operator}{where}{within}"


class OwnerTrace:
    """Follows all operators of torch within the context, forward and backward.

    Theorem: docs/theory/limits.md#thm-owners.

    For every storage it knows which example each element depends on; what an operator makes of
    these is told by rules (``owners_of_results``). Tensors that were there before depend on no
    example, but for those that ``own`` declares.

    What leaves the tensors (``.item()``, ``if tensor:``, ``.numpy()``) can come back as a number
    that nobody sees, so that a trace with an escape shows nothing of what came after it; tensors
    that no operator has met or made until then are unknown, but for constants.

    Args:
        constants: of the program, which depend on no example.

    Attributes:
        events: what owners ≤ -2 stand for, by -2 - owner.
        escapes: where what depends on examples was made a number or an array.
        vouched: the first number that was told and that would have moved no row, as ``Answers``
            have it, had it been another; it is taken for a constant.
        lost: an operator that returned what has no strided memory, ``None`` if none did.
    """

    def __init__(self, constants: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self._constants = constants
        self.events: list[Event] = []
        self.escapes: list[Event] = []
        self.vouched: Event | None = None
        self._answers: Answers | None = None
        self._told = collections.Counter[Place]()
        self.memory = Memory()
        self._tainted = False  # there was an escape
        self._unknown_constant: int | None = None
        self._lent: list[torch.Tensor] = []  # whose memory Python may write into
        self.lost: str | None = None  # an operator whose results have no place in memory
        self.ended = False
        self.calling = collections.Counter[Any]()  # functions of torch's, under way
        self.off = 0  # contexts in which nothing is followed
        self._modes = (_Operators(self), _Functions(self))

    def own(self, tensor: torch.Tensor, owners: torch.Tensor | int) -> None:
        """Declare whose the elements are.

        Args:
            tensor: a strided one.
            owners: an example's number, or whole numbers that broadcast to the tensor's shape.
        """
        with _unseen():
            found = torch.as_tensor(owners, dtype=torch.int32, device="cpu")
            self.memory.put(tensor, found.expand(tensor.shape), written=True)

    def own_python(self) -> None:
        """Take tensors made of Python's objects for the examples' from now on."""
        self._taint()

    def owners(self, tensor: torch.Tensor) -> torch.Tensor:
        """Owners of the elements now: int32, of the tensor's shape."""
        with _unseen():
            return self._owners(tensor)

    def _owners(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return self.unknown("a tensor of layout " + str(tensor.layout), tensor.shape)
        found = self.memory.find(tensor)
        if found is not None:
            return found
        if not self._tainted:
            self.memory.put(tensor, shared(tensor.shape), written=True)
            return shared(tensor.shape)
        if self._unknown_constant is None:
            self._unknown_constant = self.note(
                "unknown", "a tensor that consists of Python objects"
            )
        found = torch.tensor(self._unknown_constant, dtype=torch.int32).expand(tensor.shape)
        self.memory.put(tensor, found, written=True)
        return found

    def event(self, owner: int) -> Event:
        """The event that an owner ≤ -2 stands for."""
        return self.events[EVENT - owner]

    def note(self, kind: Literal["mixed", "unknown"], operator: str) -> int:
        """Make a new event here, and return its owner."""
        line, module = place() if len(self.events) < _MOST else (None, None)
        self.events.append(Event(kind, operator, line, module))
        return EVENT - (len(self.events) - 1)

    def unknown(self, operator: str, shape: Sequence[int]) -> torch.Tensor:
        """Map of elements of which nobody knows whose they are."""
        owner = self.note("unknown", operator)
        return torch.tensor(owner, dtype=torch.int32).expand(tuple(shape))

    def vouch(self, answers: Answers | None) -> None:
        """The module is called: these are known of what it may be told in this call."""
        self._answers = answers
        self._told.clear()

    def pass_on(self) -> None:
        """Suppose that the program acts past the module on numbers it was told within."""
        if self.vouched is not None:
            self.escapes.append(self.vouched)
            self._taint()

    def escaped(self, tensor: torch.Tensor, operator: str, told: Any = None) -> None:
        """Note that the numbers of a tensor leave torch.

        Args:
            tensor: whose numbers do.
            operator: by which.
            told: the number, if it is a single one.
        """
        if self.calling[one_hot]:
            return
        where = place()
        number = self._told[where]
        if told is not None:
            self._told[where] += 1
        with _unseen():
            if is_shared(self._owners(tensor)):
                return
        event = Event("unknown", operator, *where)
        known = self._answers if told is not None else None
        if known is not None and known.move_nothing(where, number, told):
            self.vouched = self.vouched or event
            return
        self.escapes.append(event)
        self._taint()

    def lent(self, tensor: torch.Tensor, operator: str) -> None:
        """Note that something that is no operator may write into a tensor's memory from now on."""
        with _unseen():
            if not self._tainted:
                self._lent.append(tensor.detach())
            else:
                self.memory.hide(tensor, self.note("unknown", operator))

    def _taint(self) -> None:
        """Note that Python may hold what depends on examples from now on."""
        if self._tainted:
            return
        with _unseen():
            for tensor in self._constants():
                self._owners(tensor)
            self._tainted = True
            for tensor in self._lent:
                self.memory.hide(tensor, self.note("unknown", "memory that Python writes to"))
        self._lent.clear()

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """A call that is about to be made; ``None``: nothing is known of such operators."""
        try:
            return Call(func, args, kwargs, self) if isinstance(func, OpOverload) else None
        except Exception:  # a program is not to fail for being followed
            return None

    def returned(self, func: Any, call: Call | None, value: Any) -> None:
        """Take note of what a call returned. Whatever cannot be followed is unknown."""
        if call is not None:
            try:
                self.result(call, owners_of_results(call, value), writes=call.writes)
                return
            except Exception as error:
                name = f"{call.name} (whose rule fails: {type(error).__name__})"
        else:
            name = str(func)
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self._lose(tensor, name)

    def _lose(self, tensor: torch.Tensor, operator: str) -> None:
        try:
            self.memory.put(tensor, self.unknown(operator, tensor.shape), written=True)
        except Exception:
            self.lost = self.lost or operator

    def wrote(self, call: Call, tensor: torch.Tensor, owners: torch.Tensor) -> None:
        """Note that an operator wrote into an argument."""
        self.result(call, [(tensor, owners)], writes=True)

    def result(
        self, call: Call, found: Sequence[tuple[torch.Tensor, torch.Tensor]], *, writes: bool
    ) -> None:
        """Take note of what an operator returned or wrote."""
        event: int | None = None
        for tensor, owners in found:
            if tensor.layout != torch.strided:
                continue
            few = thin(owners)
            if few.numel() and int(few.min()) == NEW:
                if event is None:
                    event = self.note("mixed", call.name)
                few = torch.where(few == NEW, event, few)
            self.memory.put(tensor, few.expand(tensor.shape), written=writes)

    def end(self) -> None:
        """Stop watching all that is under way; ``stop`` or the next ``start`` clears up."""
        self.off += 1
        self.ended = True

    def start(self) -> None:
        """Follow what this thread does from now on, below all modes that the user has entered.

        Theirs may end before this, or later: they find their own on top of the stack.
        """
        operators, functions = self._modes
        with _stack_of_operators() as stack:
            operators.__enter__()
            _pop_mode()
            stack[:] = [operators, *(m for m in stack if not _has_ended(m))]
        with _stack_of_functions() as others:
            others[:] = [functions, *(m for m in others if not _has_ended(m))]

    def stop(self) -> None:
        """Follow nothing any more."""
        operators, functions = self._modes
        with _stack_of_operators() as stack:
            if operators in stack:
                stack.remove(operators)
                _push_mode(operators)
                operators.__exit__(None, None, None)
        with _stack_of_functions() as others:
            if functions in others:
                others.remove(functions)
        self.end()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As ``unseen``, at less cost: in this thread, and not within a call of torch."""
        operators, functions = self._modes
        with _stack_of_operators() as stack:
            seen = operators in stack
            stack[:] = [m for m in stack if m is not operators]
        with _stack_of_functions() as others:
            others[:] = [m for m in others if m is not functions]
        try:
            yield
        finally:
            if seen:
                with _stack_of_operators() as stack:
                    stack.insert(0, operators)
                with _stack_of_functions() as others:
                    others.insert(0, functions)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """A context for what is no part of the program, in whatever thread."""
        self.off += 1
        try:
            yield
        finally:
            self.off -= 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _has_ended(mode: Any) -> bool:
    """True if it is of a trace that was stopped while torch held it aside, as it does in a call."""
    return isinstance(mode, _Operators | _Functions) and mode.of.ended


@contextlib.contextmanager
def _stack(
    count: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], Any]
) -> Iterator[list[Any]]:
    """Modes of this thread, from the lowest, to be changed."""
    found = [pop() for _ in range(count())]
    found.reverse()
    try:
        yield found
    finally:
        for mode in found:
            push(mode)


def _stack_of_operators() -> contextlib.AbstractContextManager[list[Any]]:
    """The modes that see operators."""
    return _stack(torch._C._len_torch_dispatch_stack, _pop_mode, _push_mode)


def _stack_of_functions() -> contextlib.AbstractContextManager[list[Any]]:
    """The modes that see calls of torch's functions."""
    c = torch._C
    push = c._push_on_torch_function_stack
    return _stack(c._len_torch_function_stack, c._pop_torch_function_stack, push)


class _Operators(TorchDispatchMode):
    """Sees every operator that runs."""

    def __init__(self, trace: OwnerTrace) -> None:
        super().__init__()
        self.of = trace

    supports_higher_order_operators = True

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.of.off:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            call = self.of.call(func, args, kwargs)
        try:
            value = func(*args, **kwargs)
        except Exception:  # which the program may catch
            if call is not None:
                for tensor in call.tensors:
                    self.of.escaped(tensor, f"an error of {call.name}")
            raise
        with torch._C.DisableTorchFunction():
            self.of.returned(func, call, value)
        return value


# Methods of a tensor that give its numbers, or its memory, to who is no operator.
_LEAVES = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__dlpack__: "dlpack",
    torch.Tensor.data_ptr: "data_ptr",
    torch.Tensor.storage: "storage",
    torch.Tensor.untyped_storage: "untyped_storage",
    torch.Tensor.__reduce_ex__: "pickle",
    torch.Tensor.__repr__: "repr",
    torch.Tensor.__format__: "format",
}
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)  # reads where to cut by no operator
_ADDRESSES = frozenset({"data_ptr", "storage", "untyped_storage"})
_SHARES = frozenset({"numpy", "dlpack", *_ADDRESSES})


def _classes(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Of a call of ``one_hot``; with a number of classes it only checks that targets are below."""
    return int(args[1] if len(args) > 1 else kwargs.get("num_classes", -1))


class _Functions(TorchFunctionMode):
    """Sees what gives numbers away without an operator."""

    def __init__(self, trace: OwnerTrace) -> None:
        super().__init__()
        self.of = trace

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.of.off:
            return func(*args, **(kwargs or {}))
        name = _LEAVES.get(func) if isinstance(func, _HASHABLE) else None
        if func is cross_entropy or (func is one_hot and _classes(args, kwargs or {}) > 0):
            self.of.calling[func] += 1
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.of.calling[func] -= 1
        if func in _SPLITS:
            for places in tree_leaves((args[1:], kwargs or {})):
                if isinstance(places, torch.Tensor):
                    self.of.escaped(places, "tensor_split")
        if name in _ADDRESSES and sys._getframe(1).f_code.co_filename.startswith(_FUNCTORCH):
            name = None  # which asks whether two tensors are one
        if name is not None and args and isinstance(args[0], torch.Tensor):
            self.of.escaped(args[0], name)
            if name in _SHARES:
                self.of.lent(args[0], name)
        return func(*args, **(kwargs or {}))


_HASHABLE = tuple({type(f) for f in _LEAVES})


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Context without modes: what is done here is no part of the program."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
