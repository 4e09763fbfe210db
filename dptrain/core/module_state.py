"""A module's state besides its code: parameters, buffers and what its attributes lead to."""

from __future__ import annotations

import copy
import enum
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

# Of every module: its parts, which are looked into, its hooks and its mode.
_STRUCTURE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_PLAIN_TYPES = frozenset(_PLAIN)
_CONTAINERS = (list, dict, set, deque)
# Objects that hold bytes of their own, and are compared by them.
_HOLDING_BYTES = (
    bytearray,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
# Of a LightningModule: which of its hooks runs, and who runs it, what its metrics are called, and
# which parameters toggle_optimizer() is to unfreeze.
_LIGHTNING = frozenset(
    (
        "_current_fx_name",
        "_trainer",
        "_fabric",
        "_metric_attributes",
        "_param_requires_grad_state",
    )
)
# Of a Hugging Face configuration: which loss it is, by the number of classes and the labels' dtype.
_HUGGING_FACE = frozenset(("problem_type",))
# Of a module that fully_shard was called on: how far torch is in gathering its parameters.
_COMPOSED = "__composable_api_"
# Of tensors: what the wrapped optimizer and Opacus's hooks keep there for a batch. The compiler
# notes how it takes them in attributes that begin with "_dynamo".
_OF_TENSORS = frozenset(("grad_sample", "summed_grad", "_current_grad_sample", "_forward_counter"))


class _Kind(enum.Enum):
    """How the state of a value is found."""

    PLAIN = enum.auto()
    OF_A_RUN = enum.auto()
    MODULE = enum.auto()
    TENSOR = enum.auto()
    NUMBERS = enum.auto()  # of NumPy
    BYTES = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    SET = enum.auto()
    CODE = enum.auto()
    OBJECT = enum.auto()


@functools.lru_cache(maxsize=4096)
def _kind_of(kind: type) -> _Kind:
    """The kind of the values of a class, looked up once: a step asks for thousands of values."""
    if issubclass(kind, _PLAIN):
        return _Kind.PLAIN
    if getattr(kind, "of_a_run", False):
        return _Kind.OF_A_RUN
    kinds: tuple[tuple[_Kind, Any], ...] = (
        (_Kind.MODULE, nn.Module),
        (_Kind.TENSOR, torch.Tensor),
        (_Kind.NUMBERS, (np.ndarray, np.generic)),
        (_Kind.BYTES, _HOLDING_BYTES),
        (_Kind.MAPPING, Mapping),
        (_Kind.SEQUENCE, (list, tuple, deque)),
        (_Kind.SET, (set, frozenset)),
        (_Kind.CODE, types.ModuleType),
    )
    found = next((name for name, classes in kinds if issubclass(kind, classes)), None)
    if found is not None:
        return found
    called = any("__call__" in vars(base) for base in kind.__mro__)
    return _Kind.CODE if called else _Kind.OBJECT


class ModuleState:
    """Everything that a forward pass could leave behind in a module, found by one walk.

    These are parameters, buffers and whatever tensors, NumPy arrays, byte arrays, random
    generators, numbers and text there are in the attributes of these and in the other ones of all
    modules: directly, in lists, tuples, dicts, sets and deques, and in the attributes of an object
    that is no module (whose own objects are not looked into), and the gradients of all of these but
    of trained parameters. A tensor with several paths is there once, by the first. Not found: what
    closures, iterators, classes or globals keep, and attributes that are no entry of ``__dict__``;
    nor a private run, its optimizer or its loader (``of_a_run``), which a module may hold, nor
    which hook of a LightningModule runs, nor which loss a Hugging Face configuration has.

    Args:
        module: the user's.
        own: attributes that were put there to train it, and are left out.

    Attributes:
        by_path: values by the path that they are found at: parameters and buffers by the names of
            ``named_parameters`` and ``named_buffers``.
        modules: by their names.
        containers: whatever holds something and can be written into, each once.
        held: arrays, byte arrays and generators, each once.
        parameters: each once.
        buffers: their identities.
    """

    def __init__(self, module: nn.Module, own: Collection[str] = ()) -> None:
        self.by_path: dict[str, Any] = {}
        self.modules: dict[str, nn.Module] = {}
        self.containers: list[Any] = []
        self.held: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        self.buffers: set[int] = set()
        self._own = own
        self._seen: dict[int, Any] = {}  # what was found, held so that no id is used again
        self._modules(module, "")

    def _modules(self, module: nn.Module, path: str) -> None:
        """Parameters and buffers first: by these names a tensor is known that has several."""
        seen, by_path = self._seen, self.by_path
        new, left = [], [(path, module)]
        while left:  # as named_modules does, which calls itself for every module
            name, m = left.pop()
            if id(m) not in seen:
                seen[id(m)] = m
                start = f"{name}." if name else ""
                new.append((name, start, m))
                for n, part in reversed(m._modules.items()):
                    if part is not None:
                        left.append((start + n, part))
        for name, start, m in new:
            self.modules[name] = m
            for held in (m._parameters, m._buffers):
                for own_name, tensor in held.items():
                    if tensor is None:
                        continue
                    if held is m._buffers:
                        self.buffers.add(id(tensor))
                    if id(tensor) not in seen:
                        seen[id(tensor)] = tensor
                        self._tensor(start + own_name, tensor)
        for _, start, m in new:
            own = vars(m)
            self.containers.append(own)
            skipped = _skipped(type(m))  # type: ignore[arg-type]
            for attribute, value in list(own.items()):
                if attribute in _STRUCTURE and isinstance(value, _CONTAINERS):
                    self.containers.append(value)
                if attribute in skipped or attribute in self._own:
                    continue
                if attribute.startswith(_COMPOSED):
                    continue
                if type(value) in _PLAIN_TYPES:
                    by_path[start + attribute] = value
                else:
                    self._value(start + attribute, value, inside=False)

    def _value(self, path: str, value: Any, *, inside: bool) -> None:
        """Record one attribute or element.

        Args:
            inside: whether it is a part of an object that is no module.
        """
        kind = _kind_of(type(value))  # type: ignore[arg-type]
        if kind is _Kind.OBJECT or kind is _Kind.CODE:  # or a proxy, of what it says that it is
            kind = _kind_of(value.__class__)
        if kind is _Kind.PLAIN:
            self.by_path[path] = value
        elif kind is _Kind.OF_A_RUN:
            return
        elif kind is _Kind.MODULE:
            self._modules(value, path)
        elif not self._is_new(value):
            return
        elif kind is _Kind.TENSOR:
            self._tensor(path, value)
        elif kind is _Kind.NUMBERS:
            self.by_path[path] = value
            self.held += [value] if isinstance(value, np.ndarray) else []
        elif kind is _Kind.BYTES:
            self.by_path[path] = value
            self.held.append(value)
        elif kind is _Kind.MAPPING:
            self._elements(path, value, list(value.items()), inside=inside)
        elif kind is _Kind.SEQUENCE:
            self._elements(path, value, list(enumerate(value)), inside=inside)
        elif kind is _Kind.SET:
            plain = frozenset([e for e in value if isinstance(e, _PLAIN)])
            others = [e for e in value if not isinstance(e, _PLAIN)]
            self.by_path[path] = plain, len(others)
            self.containers += [value] if isinstance(value, set) else []
            for k, element in enumerate(others):
                self._value(f"{path}[{k}]", element, inside=inside)
        elif not (inside or kind is _Kind.CODE):
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        """Record the attributes of an object that is no module, where it has any."""
        own = getattr(value, "__dict__", None)
        if own is None:
            return
        self.containers.append(own)
        skipped = _skipped(type(value))  # type: ignore[arg-type]
        for attribute, element in list(own.items()):
            if attribute in skipped:
                continue
            if type(element) in _PLAIN_TYPES:
                self.by_path[f"{path}->{attribute}"] = element
            else:
                self._value(f"{path}->{attribute}", element, inside=True)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.by_path[path] = tensor
        parameter = type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)
        if parameter:
            self.parameters.append(tensor)  # type: ignore[arg-type]
        if vars(tensor):
            for attribute, value in list(vars(tensor).items()):
                if attribute not in _OF_TENSORS and not attribute.startswith("_dynamo"):
                    self._value(f"{path}.{attribute}", value, inside=True)
        trained = parameter and tensor.requires_grad  # the run's, and cleared before a release
        if not trained and tensor.is_leaf and tensor.grad is not None:
            self._value(f"{path}.grad", tensor.grad, inside=True)

    def _elements(
        self, path: str, value: Any, elements: list[tuple[Any, Any]], *, inside: bool
    ) -> None:
        if isinstance(value, _CONTAINERS):
            self.containers.append(value)
        parts = value.values() if isinstance(value, Mapping) else value
        if _PLAIN_TYPES.issuperset(map(type, parts)):  # a vocabulary, say
            self.by_path[path] = tuple(elements)
            return
        self.by_path[path] = tuple(k if isinstance(k, _PLAIN) else repr(k) for k, _ in elements)
        for key, element in elements:
            self._value(f"{path}[{key!r}]", element, inside=inside)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules within, each once, as ``modules()`` has them, in a single call."""
    found: dict[int, nn.Module] = {}
    left = [module]
    while left:
        m = left.pop()
        if id(m) not in found:
            found[id(m)] = m
            left += reversed([part for part in m._modules.values() if part is not None])
    return list(found.values())


def content_of(value: Any) -> Any:
    """The state of a byte array or random generator, as a comparable value; any other value itself.

    Nothing of the global generators, which every pass moves on, and which the run looks after.
    """
    if not isinstance(value, _HOLDING_BYTES):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, torch.Generator):
        return None if value in _global_generators() else _comparable(value.get_state())
    if isinstance(value, random.Random):
        return None if value is getattr(random, "_inst", None) else value.getstate()
    return None if _of_numpy_itself(value) else _comparable(_state(value))


def extra_states(state: ModuleState) -> dict[str, Any]:
    """Values that ``get_extra_state`` of modules returns, by path, as comparable values."""
    return {
        f"{name}._extra_state" if name else "_extra_state": _comparable(m.get_extra_state())
        for name, m in state.modules.items()
        if type(m).get_extra_state is not nn.Module.get_extra_state
    }


def put_back(value: Any) -> Callable[[], None]:
    """Return a function that restores the present contents of an array, byte array or generator."""
    if isinstance(value, np.ndarray):
        numbers = value.copy()
        return lambda: np.copyto(value, numbers) if value.flags.writeable else None
    if isinstance(value, bytearray):
        return functools.partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, torch.Generator):
        return functools.partial(_call, value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, _state(value))
    return functools.partial(setattr, value.bit_generator, "state", copy.deepcopy(_state(value)))


def _call(function: Callable[[Any], Any], argument: Any) -> None:
    function(argument)


def _state(value: np.random.Generator | np.random.RandomState) -> Any:
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.bit_generator.state


def _of_numpy_itself(value: Any) -> bool:
    return value is getattr(np.random.mtrand, "_rand", None)


def _global_generators() -> Sequence[torch.Generator]:
    of_devices = getattr(torch.get_device_module(), "default_generators", ())
    return (torch.default_generator, *of_devices)


def attribute_of(path: str) -> str:
    """The buffer or attribute of a module that a path of ``ModuleState`` begins with."""
    return path.split("[", 1)[0].split("->", 1)[0]


def memory_of(value: Any) -> Sequence[torch.Tensor]:
    """The memory that a tensor or array lies in, as tensors of bytes, where that can be had.

    Of a tensor its whole storage, of a sparse one those of its parts; nothing of other values, of
    tensors without memory and of arrays that cannot be written to.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not value.flags.writeable:
            return ()
        while isinstance(value.base, np.ndarray):
            value = value.base
        if not value.flags.c_contiguous:
            return ()
        return (torch.from_numpy(value.reshape(-1).view(np.uint8)),)
    if not isinstance(value, torch.Tensor):
        return ()
    parts = parts_of(value)
    if len(parts) > 1 or parts[0] is not value:
        return [memory for part in parts for memory in memory_of(part)]
    if value.layout != torch.strided or value.device.type == "meta":
        return ()
    storage = value.untyped_storage()
    return (torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage),)


def parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that a sparse or composed tensor is made of; any other tensor by itself."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return (tensor,)


@functools.lru_cache(maxsize=4096)
def _skipped(kind: type) -> frozenset[str]:
    """Attributes of an object of a class that are none of its state."""
    names = {base.__name__ for base in kind.__mro__}  # nothing is imported to find out
    if issubclass(kind, nn.Module):
        return _STRUCTURE | _LIGHTNING if "LightningModule" in names else _STRUCTURE
    return _HUGGING_FACE if names & {"PretrainedConfig", "PreTrainedConfig"} else frozenset()


def _comparable(value: Any) -> Any:
    """A module's extra state, made anew at every call, as values that can be compared."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, numbers.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return tuple((repr(k), _comparable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_comparable(v) for v in value)
    return value if isinstance(value, _PLAIN) else repr(value)
