"""Operators whose results are made of all elements along dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from dptrain.clipping.owners.maps import join, join_all, join_along, shared
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule

_REDUCTIONS = names("""
    sum mean amax amin max min argmax argmin var std var_mean std_mean prod logsumexp nansum any all
    norm linalg_vector_norm count_nonzero median nanmedian mode kthvalue aminmax nanmean
    special_logsumexp hash_tensor
""")


@rule(*_REDUCTIONS)
def reduced(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All elements along the dimensions that it reduces; all of them, if it names none."""
    owners = call.map("self")
    counting = call.name == "sum" and call.trace.calling[cross_entropy]
    if counting and call["self"].dtype == torch.bool and bool(call["self"].all()):
        return [shared(t.shape) for t in results]  # no target is ignored (``nll_loss``)
    if call.has("other") and isinstance(call["other"], torch.Tensor):  # max of two
        return [join(owners, call.map("other"))]
    dims = call["dim"] if call.has("dim") else None
    if isinstance(dims, int):
        dims = [dims]
    keep = bool(call.has("keepdim") and call["keepdim"])
    if not owners.dim():
        return [owners for _ in results]
    every = [d % owners.dim() for d in dims] if dims else list(range(owners.dim()))
    found = join_along(owners, every)
    if not keep:
        found = without(found, every)
    return [found if fits(found, t) else join_all(owners) for t in results]


def without(owners: Map, dims: Sequence[int]) -> Map:
    """The map without dimensions along which it has the size 1, or 0."""
    for d in sorted(set(dims), reverse=True):
        owners = owners.select(d, 0) if owners.shape[d] else owners.sum(d)
    return owners


def fits(owners: Map, result: torch.Tensor) -> bool:
    """True if the map has as many dimensions as the result, and expands to it."""
    pairs = zip(owners.shape, result.shape, strict=False)
    return owners.dim() == result.dim() and all(a in (1, b) for a, b in pairs)


_ALONG = names("""
    _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin _cummax_helper _cummin_helper
    sort topk argsort _sort
    softmax log_softmax _safe_softmax glu renorm linalg_vander msort
""")


@rule(*_ALONG)
def along(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All elements along one dimension make each of its results."""
    self = call["self"]
    if not self.dim():
        return [call.map("self") for _ in results]
    dim = call["dim"] if call.has("dim") else (0 if call.name == "msort" else -1)
    dims = (
        [dim] if call.name != "renorm" else [d for d in range(self.dim()) if d != dim % self.dim()]
    )
    found = join_along(call.map("self"), dims)
    return [found if fits(found, t) else join_all(found) for t in results]


_ALL_ALONG = names("""
    linalg_cross _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward
    glu_backward logcumsumexp_backward _fft_r2c _fft_c2c _fft_c2r
""")


@rule(*_ALL_ALONG)
def all_along(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All elements of every argument along the dimensions make each of its results."""
    dims = [call["dim"]] if isinstance(call["dim"], int) else call["dim"]
    found = join(*(join_along(m, dims) for m in call.maps()))
    return [found if fits(found, t) else join_all(found) for t in results]


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by the last dimensions."""
    last = range(-len(call["normalized_shape"]), 0)
    inner = join_along(call.map("input"), last)
    out = join(inner, call.map("weight"), call.map("bias") if call.has("bias") else shared(()))
    return [out, *(inner for _ in results[1:])]


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by the last dimensions; of the parameters what all rows give."""
    count = len(call["normalized_shape"])
    each = join(*call.maps())
    inner = join_along(each, range(-count, 0))
    leading = range(each.dim() - count)
    own = join_along(each, leading)
    for _ in leading:
        own = own.select(0, 0)
    found = [inner, *(own for _ in results[1:])]
    return [m if broadcasts(m, t) else join_all(m) for m, t in zip(found, results, strict=True)]


def broadcasts(owners: Map, result: torch.Tensor) -> bool:
    """True if the map expands to the result."""
    pairs = zip(reversed(owners.shape), reversed(result.shape), strict=False)
    return owners.dim() <= result.dim() and all(a in (1, b) for a, b in pairs)
