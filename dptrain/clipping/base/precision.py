"""Sums of float32 gradients in float32, whatever torch rounds products to elsewhere."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_AS_SUCH = ("ieee", "none")  # what wider switches hand down is read, not "none"
_ENTERING = threading.Lock()  # the switches are those of all threads


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Context outside of ``torch.autocast``, also where it is entered within that."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def in_full_float32(function: Callable[P, T]) -> Callable[P, T]:
    """Multiply float32 matrices as such: not of numbers rounded to TensorFloat32 or bfloat16.

    ``torch.set_float32_matmul_precision("medium")`` and what is like it allow torch to round what
    it multiplies to 8 or 11 bits, and ``torch.autocast`` has it do so where a step is taken within.
    A clipped sum would then be another than the one that norms were taken of, by up to 4·10⁻³ of
    what its terms add up to, and one of terms that cancel by far more than itself. So norms and
    sums are both formed within such functions. They cost little where nothing was lowered.
    """

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        lowered = any([torch.is_autocast_enabled(device) for device in _devices()])
        if not lowered and _PRODUCTS.are_full():
            return function(*args, **kwargs)
        with _full_float32():
            return function(*args, **kwargs)

    return within


@functools.cache
def _devices() -> tuple[str, ...]:
    """The kinds of device that products are taken on."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        for device in _devices():
            entered.enter_context(without_autocast(device))
        with full_products():
            yield


class _Switches:
    """Precisions of float32 of some kinds of operators, which are those of all threads.

    Args:
        find: the objects of ``torch.backends`` that have one, in torch 2.9 and later.
    """

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = functools.cache(find)
        self._within: list[list[str]] = []  # what was read by each that is within

    def are_full(self) -> bool:
        """True if all is full float32, and no other thread is about to restore what is less."""
        with _ENTERING:
            if self._within:
                return False
            for kind in self._find():
                if kind.fp32_precision not in _AS_SUCH:
                    return False
        return True

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Context of full float32; of several threads the last restores what the first found."""
        with _ENTERING:
            before = [kind.fp32_precision for kind in self._find()]
            # To set them takes longer than to look.
            counted = bool(self._within) or not all(value in _AS_SUCH for value in before)
            if counted:
                if not self._within:
                    self._write(["ieee"] * len(before))
                self._within.append(before)
        try:
            yield
        finally:
            if counted:
                with _ENTERING:
                    before = self._within[0]
                    self._within.pop()
                    if not self._within:
                        self._write(before)

    def _write(self, values: list[str]) -> None:
        for kind, value in zip(self._find(), values, strict=True):
            kind.fp32_precision = value


def _with_precision(*kinds: Any) -> list[Any]:
    return [kind for kind in kinds if hasattr(kind, "fp32_precision")]


class _OfOldTorch:
    """The one setting of torch before 2.9."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision().replace("highest", "ieee")

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(value.replace("ieee", "highest"))


def _of_products() -> list[Any]:
    backends = torch.backends
    mkldnn = (getattr(backends.mkldnn, name, None) for name in ("matmul", "conv"))
    return _with_precision(backends.cuda.matmul, *mkldnn) or [_OfOldTorch()]


def _of_cudnn() -> list[Any]:
    cudnn = torch.backends.cudnn
    return _with_precision(*(getattr(cudnn, name, None) for name in ("conv", "rnn")))


_PRODUCTS, _CUDNN = _Switches(_of_products), _Switches(_of_cudnn)


def full_products() -> contextlib.AbstractContextManager[None]:
    """Context of full float32 products, which leaves autocast alone."""
    return _PRODUCTS.full()


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 numbers as such in cuDNN too, lest both ways differ by other errors."""
    with full_products(), _CUDNN.full():
        yield
