"""Sums of float32 gradients in float32, whatever torch rounds products to elsewhere."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")
_AS_SUCH = ("ieee", "none", "highest")  # what wider switches hand down is read, not "none"
_ENTERING = threading.Lock()  # the switches are those of all threads
_within: list[list[str]] = []  # what was read by each that is within


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Outside ``torch.autocast``, also where what is done is done within it."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 matrices as such: not of numbers rounded to TensorFloat32 or bfloat16.

    ``torch.set_float32_matmul_precision("medium")`` and what is like it allow torch to round what
    it multiplies to 8 or 11 bits, and ``torch.autocast`` has it do so where a step is taken within.
    A clipped sum would then be another than the one that norms were taken of, by up to 4·10⁻³ of
    what its terms add up to, and one of terms that cancel by far more than itself. So norms and
    sums are both formed within.
    """
    with contextlib.ExitStack() as entered:
        for device in _DEVICES:
            entered.enter_context(without_autocast(device))
        with full_products():
            yield


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """The same where autocast is to be left alone; of several threads the last puts back."""
    with _ENTERING:
        before = _read()
        # To set them takes longer than to look.
        counted = bool(_within) or not all(value in _AS_SUCH for value in before)
        if counted:
            if not _within:
                _write(["ieee" if _switches() else "highest"] * len(before))
            _within.append(before)
    try:
        yield
    finally:
        if counted:
            with _ENTERING:
                before = _within[0]
                _within.pop()
                if not _within:
                    _write(before)


def _read() -> list[str]:
    if kinds := _switches():
        return [kind.fp32_precision for kind in kinds]
    return [torch.get_float32_matmul_precision()]  # torch before 2.9


def _write(values: list[str]) -> None:
    if kinds := _switches():
        for kind, value in zip(kinds, values, strict=True):
            kind.fp32_precision = value
    else:
        torch.set_float32_matmul_precision(values[0])


@functools.cache
def _switches() -> list[Any]:
    """What has a precision of float32 of its own, in torch 2.9 and later."""
    kinds = (
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
        getattr(torch.backends.mkldnn, "conv", None),
    )
    return [kind for kind in kinds if hasattr(kind, "fp32_precision")]
