"""Operators that work by groups of channels, and statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptrain.clipping.owners.maps import join, join_all, join_along, shared, viewed
from dptrain.clipping.owners.rules.calls import Call, Map, rule


def _in_groups(owners: Map, groups: int) -> Map:
    """Of what is made of all of a group, shape (rows, groups) of (rows, channels, ...)."""
    rows = owners.shape[0]
    inner = viewed(owners, (rows, groups, owners.numel() // max(rows * groups, 1)))
    return join_along(inner, [2])[..., 0].expand(rows, groups)


def _of_groups(owners: Map, shape: Sequence[int]) -> Map:
    """(rows, groups) for each channel of that group, shape (rows, channels, ...)."""
    rows, groups = owners.shape
    each = owners.unsqueeze(-1).expand(rows, groups, shape[1] // groups)
    return viewed(each, (rows, shape[1])).reshape(rows, shape[1], *[1] * (len(shape) - 2))


def _by_channel(owners: Map, dims: int) -> Map:
    return owners.reshape(1, -1, *[1] * (dims - 2)) if owners.dim() == 1 else owners


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All of a group of channels, at all places."""
    (result,) = results
    inner = _in_groups(call.map("input"), call["groups"])
    weight = _in_groups(call.map("weight").unsqueeze(0), call["groups"])
    each = _of_groups(join(inner, weight).expand(inner.shape), result.shape)
    return [join(each, _by_channel(call.map("bias"), result.dim()))]


@rule("convolution_backward")
def convolution_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """As the forward pass; of the weights what all rows give in a group."""
    groups = call["groups"]
    grad, source = (_in_groups(call.map(n), groups) for n in ("grad_output", "input"))
    weight = _in_groups(call.map("weight").unsqueeze(0), groups)
    inner = join(grad, weight).expand(grad.shape)
    own = join_along(join(grad, source).expand(grad.shape), [0])[0]
    found = []
    for k, t in zip(_wanted(call), results, strict=True):
        if k == 0:
            found.append(_of_groups(inner, t.shape))
        elif own.shape[0] in (1, groups) and t.dim() and t.shape[0] % groups == 0:
            each = own.expand(groups).unsqueeze(-1).expand(groups, t.shape[0] // groups)
            found.append(viewed(each, (t.shape[0],)).reshape(-1, *[1] * (t.dim() - 1)))
        else:
            found.append(join_all(own))
    return found


def _wanted(call: Call) -> list[int]:
    """Positions of the results that are there."""
    return [k for k, wanted in enumerate(call["output_mask"]) if wanted]


@rule("native_group_norm")
def group_norm(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All of a group of channels."""
    source = call.map("input")
    if not source.numel():
        return [shared(t.shape) for t in results]
    inner = _in_groups(source, call["group"])
    parameters = [_by_channel(call.map(n), source.dim()) for n in ("weight", "bias")]
    return [join(_of_groups(inner, source.shape), *parameters), inner, inner]


@rule("native_group_norm_backward")
def group_norm_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """As the forward pass; of the parameters what all rows give in a group."""
    source = call.map("input")
    parameters = _by_channel(call.map("weight"), source.dim())
    each = join(call.map("grad_out"), source, parameters).expand(source.shape)
    inner = join(_in_groups(each, call["group"]), call.map("mean"), call.map("rstd"))
    whole = _of_groups(inner.expand(source.shape[0], call["group"]), source.shape)
    own = join_along(whole, [0]).reshape(-1)
    return [whole if k == 0 else own for k in _wanted(call)]


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_native_batch_norm_legit_functional",
    "miopen_batch_norm",
)
def batch_norm(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Of fixed statistics element by element, otherwise all examples in each channel."""
    names = ("weight", "bias", "running_mean", "running_var")
    own = [call.map(n) for n in names if call.has(n)]
    source = call.map("input")
    by_channel = [join(*own)] if own else []
    rest = [m.reshape(1, -1, *[1] * (source.dim() - 2)) if m.dim() == 1 else m for m in by_channel]
    training = (call.has("training") and call["training"]) or call["running_mean"] is None
    if call.name.endswith("no_training"):
        training = False
    if not training:
        return [join(source, *rest), *(join_all(join(*own)) for _ in results[1:])]
    dims = [d for d in range(source.dim()) if d != 1]
    channel = join_along(source, dims)
    for name in ("running_mean", "running_var"):
        if call.has(name) and isinstance(call[name], torch.Tensor):
            call.trace.wrote(call, call[name], join(channel.reshape(-1), call.map(name)))
    every = join_all(channel)
    return [join(channel, *rest), *(every for _ in results[1:])]


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """As the forward pass; parameters are everybody's."""
    training = call["train"] if call.has("train") else True
    grad = next(call.map(n) for n in ("grad_out", "grad_output") if call.has(n))
    source, dims = call.map("input"), results[0].dim()
    beside = [n for n in ("weight", "running_mean", "running_var") if call.has(n)]
    own = join(shared(()), *(_by_channel(call.map(n), dims) for n in beside))
    others = [d for d in range(dims) if d != 1]
    channel = join_along(join(grad, source), others)
    whole = join(channel if training else grad, own)
    return [whole if k == 0 else join(channel, own).reshape(-1) for k in _wanted(call)]
