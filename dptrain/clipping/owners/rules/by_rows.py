"""Operators that make each row of a result of that row of some arguments and all of the others."""

from __future__ import annotations

import torch

from dptrain.clipping.owners.maps import join, join_all, join_along, shared
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule

# name: (arguments with rows, results without).
_BY_ROWS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (("query", "key", "value", "attn_mask"), ()),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        ("grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask"),
        (),
    ),
    "_scaled_dot_product_efficient_attention": (("query", "key", "value", "attn_bias"), (2, 3)),
    "_scaled_dot_product_efficient_attention_backward": (
        ("grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp"),
        (),
    ),
    "grid_sampler_2d": (("input", "grid"), ()),
    "grid_sampler_3d": (("input", "grid"), ()),
    "grid_sampler_2d_backward": (("grad_output", "input", "grid"), ()),
    "grid_sampler_3d_backward": (("grad_output", "input", "grid"), ()),
    "affine_grid_generator": (("theta",), ()),
    "im2col": (("self",), ()),
    "col2im": (("self",), ()),
    "max_unpool2d": (("self", "indices"), ()),
    "max_unpool3d": (("self", "indices"), ()),
    "fractional_max_pool2d": (("self", "random_samples"), ()),
    "fractional_max_pool3d": (("self", "random_samples"), ()),
    "fractional_max_pool2d_backward": (("grad_output", "self", "indices"), ()),
    "fractional_max_pool3d_backward": (("grad_output", "self", "indices"), ()),
    "multi_margin_loss_backward": ((), ()),
    "slow_conv2d_forward": (("self",), ()),
}


@rule(*_BY_ROWS)
def by_rows(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Rows of those that have rows, and all of the others."""
    names, without = _BY_ROWS[call.name]
    having = [n for n in names if call.has(n) and isinstance(call[n], torch.Tensor)]
    rest = [join_all(m) for m in call.maps(but=having)]
    rows: list[Map] = []
    count: int | None = None
    for name in having:
        owners = call.map(name)
        few = join_along(owners, range(1, owners.dim()))
        first = owners.shape[0] if owners.dim() else 1
        if name in ("attn_bias", "attn_mask") and (owners.dim() != 4 or first == 1):
            rest.append(join_all(owners))
            continue
        if count not in (None, first):
            return [join(join_all(few), *(join_all(m) for m in call.maps())) for _ in results]
        count = first
        rows.append(few.reshape(-1) if few.numel() != 1 else few.reshape(1))
    each = join(*rows, *rest) if rows or rest else shared(())
    every = join_all(each)
    found = []
    for k, t in enumerate(results):
        fits = t.dim() > 0 and t.shape[0] == count and k not in without
        found.append(each.reshape(-1, *[1] * (t.dim() - 1)) if fits and each.dim() else every)
    return found


_SPATIAL = names("""
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa max_pool1d
    max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d
""")


@rule(*_SPATIAL, *(name + "_backward" for name in _SPATIAL))
def spatial(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Every channel of every row by itself, whose positions are along the last dimensions."""
    count = int(next(c for c in reversed(call.name) if c.isdigit()))
    maps = call.maps()
    leading = {m.shape[:-count] if m.dim() >= count else None for m in maps}
    leading |= {t.shape[:-count] for t in results}
    if len(leading) > 1:
        return [join(*(join_all(m) for m in maps)) for _ in results]
    return [join(*(join_along(m, range(-count, 0)) for m in maps)) for _ in results]


@rule("_ctc_loss", "_ctc_loss_backward")
def ctc_loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Rows are second in what is transcribed, and the gradient by it; first in all others."""
    owners = call.map("log_probs")
    each = [join_along(owners, [0, 2]).reshape(-1)]
    targets = call["targets"]
    if targets.dim() == 1:  # one after the other: where each begins, the lengths before it say
        each.append(join_all(call.map("targets")))
    for name in ("targets", "grad", "neg_log_likelihood", "log_alpha"):
        if call.has(name) and call[name].dim() > (name == "targets"):
            own = call.map(name)
            each.append(join_along(own, range(1, own.dim())).reshape(-1))
    each += [
        call.of(call[name]) if targets.dim() > 1 else join_all(call.of(call[name]))
        for name in ("input_lengths", "target_lengths")
    ]
    found = join(*each)
    backward = call.name == "_ctc_loss_backward"
    return [
        found[None, :, None] if backward else found.reshape(-1, *[1] * (t.dim() - 1))
        for t in results
    ]
