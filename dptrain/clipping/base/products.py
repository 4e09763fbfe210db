"""Matrix products by whichever of torch's two libraries is the faster one on this processor.

On a CPU torch multiplies by the BLAS that it is built with, usually MKL, and has oneDNN for
convolutions, recurrent layers and half precision. Where the BLAS does not use all that the
processor has, as MKL does not on AMD's with AVX-512, oneDNN takes half of its time.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import torch

from dptrain.core import on_processor

_LEAST = 2**21  # multiplications below which a call of oneDNN costs more than it saves
_FASTER = 1.3  # how much that is worth another order of additions; far from what is measured
_SIZE = 256  # of the product that is timed
_WITHOUT_BFLOAT16 = ("AVX", "AVX512_CORE", "AVX512_CORE_VNNI")  # sets that oneDNN may be held to


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + b, outside of autograd.

    Args:
        x: shape (m, k).
        weight: W, shape (n, k).
        bias: b, shape (n,), if there is one.
    """
    if _by_onednn(x, weight):
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found
    return torch.nn.functional.linear(x, weight, bias)


def outer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Σ_t l_t r_tᵀ, outside of autograd.

    oneDNN copies the first side into rows, so that one is the narrower: of 8,192 rows of 1,024 and
    of 256 numbers the other way took half as long again.

    Args:
        left: l, shape (rows, m).
        right: r, shape (rows, n).
    """
    if left.shape[1] > right.shape[1] and _by_onednn(right.t(), left.t()):
        return product(right.t(), left.t()).t().contiguous()
    return product(left.t(), right.t())


def add_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """total + x Wᵀ, outside of autograd; in place where that costs less.

    Args:
        total: shape (m, n), not to be used any more.
        x: shape (m, k).
        weight: W, shape (n, k).
    """
    if _by_onednn(x, weight):
        fused = torch.ops.mkldnn._linear_pointwise.binary
        found: torch.Tensor = fused(x, total, weight, None, "add")
        return found
    return total.addmm_(x, weight.t())


def multiplies_bfloat16(tensor: torch.Tensor) -> bool:
    """True if a tensor is of bfloat16, on a processor that has units to multiply it.

    oneDNN, which torch multiplies it by, adds up in float32 there and rounds each result once.
    This goes by the processor and not by a clock, as a step that is made again after a checkpoint
    has to come out the same bit for bit.
    """
    return tensor.dtype == torch.bfloat16 and on_processor(tensor) and _bfloat16_units()


@functools.cache
def _bfloat16_units() -> bool:
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None or not torch.backends.mkldnn.is_available():
        return False
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    narrow = allowed.startswith(("SSE", "AVX2")) or allowed in _WITHOUT_BFLOAT16
    return bool(ask().get("avx512_bf16", False)) and not narrow


class Squashed:
    """squash(x Wᵀ + b) as one operation of oneDNN, with W laid out for many calls of it.

    Args:
        weight: W, shape (n, k).
        bias: b, shape (n,), if there is one.
        squash: "sigmoid" or "tanh".
        rows: of x, about.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, squash: str, rows: int
    ) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        self._bias, self._squash = bias, squash

    @staticmethod
    def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
        """True if it is faster than a product and what comes after it."""
        return _by_onednn(x, weight) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result for x, of shape (m, k)."""
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, self._squash, [], ""
        )
        return found


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        on_processor(x)
        and x.dtype == weight.dtype == torch.float32
        and len(x) * weight.numel() >= _LEAST
        # For other strides oneDNN has no fast kernel, but one that takes seconds.
        and (x.stride(1) == 1 or x.t().is_contiguous())
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and _onednn_is_faster(torch.get_num_threads())
    )


@functools.cache
def _onednn_is_faster(threads: int) -> bool:
    """True if oneDNN is faster: measured once a number of threads, in a few milliseconds."""
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    x = torch.linspace(-1, 1, _SIZE * _SIZE).view(_SIZE, _SIZE)

    def by_onednn() -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], "")
        return found

    with torch.no_grad():
        theirs, ours = _shortest(lambda: x @ x.t()), _shortest(by_onednn)
    return theirs > _FASTER * ours


def _shortest(run: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
