"""Views, and operators that put elements elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dptrain.clipping.owners.maps import (
    SHARED,
    is_shared,
    join,
    join_all,
    join_along,
    shared,
    thin,
    thinned,
    viewed,
)
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule, tensors_in


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy", "view_copy")
def in_another_shape(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The same elements in the same order."""
    if call.func._overloadname == "dtype":
        return _in_another_dtype(call, results)
    return [viewed(call.map("self"), t.shape) for t in results]


def _in_another_dtype(call: Call, results: list[torch.Tensor]) -> list[Map]:
    owners = call.map("self")
    (result,) = results
    if result.shape == owners.shape:
        return [owners]
    if result.dim() and result.shape[:-1] == owners.shape[:-1]:
        return [join_along(owners, [-1]).expand(result.shape)]
    return [join_all(owners)]


_MOVED = names("""
    permute transpose t slice select expand unsqueeze squeeze split split_with_sizes chunk unbind
    diagonal unfold alias detach narrow movedim swapaxes lift_fresh lift numpy_T mT adjoint
    tensor_split hsplit vsplit dsplit flip roll rot90 repeat tile permute_copy transpose_copy
    slice_copy select_copy expand_copy unsqueeze_copy squeeze_copy split_copy
    split_with_sizes_copy unbind_copy diagonal_copy unfold_copy t_copy pixel_shuffle
    pixel_unshuffle channel_shuffle native_channel_shuffle broadcast_to _fw_primal view_as
    unsafe_split unsafe_chunk unsafe_split_with_sizes
""")


@rule(*_MOVED)
def moved(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The operator itself says where the elements go."""
    places = [t for t in call.tensors if t is not call["self"] and not is_shared(call.of(t))]
    if call.name == "tensor_split" and places:  # where it is cut becomes shapes
        call.trace.escaped(places[0], call.name)
        return [call.trace.unknown(call.name, t.shape) for t in results]
    args = [call.of(a) if isinstance(a, torch.Tensor) else a for a in call.args]
    func = _functional(call.func)
    kwargs = {k: v for k, v in call.kwargs.items() if k != "out"}
    found = list(tensors_in(func(*args, **kwargs)))
    return found if call.name in _STRIDED else [thinned(m) for m in found]


_STRIDED = frozenset(
    names("""
    permute transpose t slice select expand unsqueeze squeeze split split_with_sizes chunk unbind
    diagonal alias detach narrow movedim lift_fresh""")
)


@functools.cache
def _functional(func: Any) -> Any:
    """The overload that returns its result and writes nowhere."""
    if func._schema.is_mutable:
        packet = func.overloadpacket
        names = [n for n in packet.overloads() if not getattr(packet, n)._schema.is_mutable]
        return getattr(packet, names[0])
    return func


@rule("as_strided", "as_strided_copy")
def strided(call: Call, results: list[torch.Tensor]) -> list[Map | None]:
    """The storage says whose the elements are."""
    if call.name == "as_strided":
        return [None]
    return [join_all(call.map("self"))]


@rule("_conj", "_neg_view")
def same(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The map as it was."""
    return [call.map("self")]


@rule("view_as_real", "view_as_real_copy")
def as_real(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Two real numbers of each."""
    return [call.map("self").unsqueeze(-1).expand(t.shape) for t in results]


@rule("view_as_complex")
def as_complex(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """One number of two."""
    return [join_along(call.map("self"), [-1]).squeeze(-1) for _ in results]


@rule("cat", "concatenate", "concat")
def concatenated(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """One after the other."""
    dim = call["dim"] or 0
    tensors = [t for t in call["tensors"] if t.shape != (0,)]
    return [_side_by_side([call.of(t) for t in tensors], dim, results[0])]


def _side_by_side(maps: list[Map], dim: int, result: torch.Tensor) -> Map:
    if not maps:
        return shared(result.shape)
    dim %= result.dim()
    few = [thin(m) for m in maps]
    sizes = [max(m.shape[d] for m in few) for d in range(result.dim())]
    parts = []
    for whole, m in zip(maps, few, strict=True):
        shape = [*sizes]
        shape[dim] = whole.shape[dim]
        parts.append(m.expand(shape))
    return thinned(torch.cat(parts, dim)).expand(result.shape)


@rule("stack")
def stacked(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """One after the other in a new dimension."""
    dim = (call["dim"] or 0) % results[0].dim()
    return [_side_by_side([call.of(t).unsqueeze(dim) for t in call["tensors"]], dim, results[0])]


@rule("constant_pad_nd")
def padded(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A constant around it."""
    owners = call.map("self").contiguous()
    return [thinned(torch.constant_pad_nd(owners, call["pad"], SHARED))]


@rule("select_backward", "slice_backward", "diagonal_backward")
def put_back(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The gradient at its place, zeros elsewhere."""
    grad, shape = call.map("grad_output"), results[0].shape
    if call.name == "diagonal_backward":
        found = shared(shape).contiguous()
        found.diagonal(call["offset"], call["dim1"], call["dim2"]).copy_(grad)
        return [thinned(found)]
    dim = call["dim"] % len(shape)
    if call.name == "select_backward":
        grad = grad.unsqueeze(dim)
    # Written out along that dimension, and along others only where owners differ.
    few = thin(grad)
    sizes = [n if d == dim else few.shape[d] for d, n in enumerate(shape)]
    found = shared(sizes).contiguous()
    if call.name == "select_backward":
        found.select(dim, call["index"]).copy_(few.squeeze(dim))
    else:
        aten = torch.ops.aten.slice.Tensor
        aten(found, dim, call["start"], call["end"], call["step"]).copy_(few)
    return [thinned(found)]


@rule("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
def scattered_view(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A part of it written over."""
    found = call.map("self").clone(memory_format=torch.contiguous_format)
    source = call.map("src")
    if call.name == "select_scatter":
        found.select(call["dim"], call["index"]).copy_(source)
    elif call.name == "diagonal_scatter":
        found.diagonal(call["offset"], call["dim1"], call["dim2"]).copy_(source)
    elif call.name == "slice_scatter":
        aten = torch.ops.aten.slice.Tensor
        aten(found, call["dim"], call["start"], call["end"], call["step"]).copy_(source)
    else:
        return [join(join_all(found), join_all(source))]
    return [thinned(found)]


@rule("unfold_backward")
def unfolded_back(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Windows overlap along one dimension."""
    grad, (result,) = call.map("grad_in"), results
    if not result.dim():
        return [join_all(grad)]
    dim = call["dim"] % result.dim()
    return [join_along(join_along(grad, [dim, -1]).squeeze(-1), [dim])]


@rule("diag_embed")
def on_a_diagonal(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Zeros around it."""
    found = shared(results[0].shape).contiguous()
    found.diagonal(call["offset"], call["dim1"], call["dim2"]).copy_(call.map("self"))
    return [thinned(found)]
