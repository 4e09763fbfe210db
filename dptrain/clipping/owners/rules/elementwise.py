"""Operators that work element by element, and results that depend on no example."""

from __future__ import annotations

import torch

from dptrain.clipping.owners.maps import is_shared, join, join_all, join_along, shared, thin
from dptrain.clipping.owners.rules.along import broadcasts
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule

_POINTWISE = names("""
    where masked_fill native_dropout native_dropout_backward threshold_backward gelu_backward
    sigmoid_backward tanh_backward hardtanh_backward silu_backward mish_backward elu_backward
    leaky_relu_backward softplus_backward hardswish_backward hardsigmoid_backward
    hardshrink_backward softshrink_backward log_sigmoid_forward log_sigmoid_backward
    logit_backward prelu _prelu_kernel _prelu_kernel_backward rrelu_with_noise_backward
    clamp clamp_min clamp_max bernoulli normal poisson
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
    soft_margin_loss_backward l1_loss_backward clone _to_copy contiguous copy fill lift_fresh_copy
    nan_to_num real imag angle polar complex view_as_complex_copy relu relu6 dropout
    _fused_dropout lerp addcmul addcdiv tril triu conj_physical _conj_physical
    logical_and logical_or logical_not logical_xor ldexp
    hardswish abs copysign eq ne lt le gt ge mish gelu hardshrink softshrink softplus threshold rsub
    floor_divide frexp to bitwise_left_shift bitwise_right_shift gcd lcm isclose
    _add_relu add_relu alias_copy detach_copy celu alpha_dropout xlogy special_xlog1py
""")


_FACTORIES = names("""
    empty zeros ones full arange linspace logspace eye rand randn randint randperm scalar_tensor
    empty_strided new_empty new_zeros new_ones new_full new_empty_strided empty_like zeros_like
    ones_like full_like rand_like randn_like randint_like tril_indices triu_indices zero
    normal_functional random uniform exponential geometric cauchy log_normal hann_window
    hamming_window bartlett_window blackman_window kaiser_window empty_permuted
    _efficientzerotensor range
""")


@rule(*_POINTWISE)
def pointwise(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Each element of those at its place, if these broadcast to it."""
    found = join(*call.maps()) if call.maps() else shared(())
    return [
        found if broadcasts(found, t) else join(*(join_all(m) for m in call.maps()))
        for t in results
    ]


@rule("bucketize", "isin", "searchsorted")
def looked_up(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Each element of the one is looked up among all of the other, or of its last dimension."""
    elements, others = map(call.of, call.args[:2])
    if call.name == "searchsorted":
        elements, others = others, join(elements, join_all(call.map("sorter")))
    lines = call.name == "searchsorted" and others.dim() > 1
    among = join_along(others, [-1]) if lines else join_all(others)
    return [join(elements, among).expand(t.shape) for t in results]


@rule("rrelu_with_noise", "rrelu_with_noise_functional")
def randomly_leaky(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Coins are thrown for what is negative only: who gets which, all before decide."""
    owners = call.map("self")
    if not call["training"] or is_shared(owners):
        return [owners for _ in results]
    found = call.trace.unknown(call.name, call["noise"].shape)
    call.trace.wrote(call, call["noise"], found)
    return [found for _ in results]


@rule("copy", "fill")
def written_over(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners of the source: the former contents are gone."""
    source = call["src"] if call.has("src") else call["value"]
    return [thin(call.of(source)) for _ in results]


@rule(*_FACTORIES)
def made(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Depends on no example, whatever shape it has from one, but on numbers that it is given."""
    given = call.maps(but=("self",) if call.has("self") else ())
    return [join(shared(()), *(join_all(m) for m in given)) for _ in results]


@rule("random", "uniform", "exponential", "geometric", "cauchy", "log_normal", "zero")
def filled(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Results that all share: nothing is left of the former contents."""
    return [shared(t.shape) for t in results]


@rule("_local_scalar_dense", "equal", "is_nonzero", "_assert_async", "_assert_tensor_metadata")
def nothing(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """No map: no tensor comes of the operator."""
    return []


def foreach(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Of each in a list of tensors what is done to it, with those at its place in other lists."""
    lists = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, list | tuple)]
    lists = [v for v in lists if v and all(isinstance(t, torch.Tensor) for t in v)]
    single = [v for v in call.args if isinstance(v, torch.Tensor)]
    rest = [join_all(call.of(t)) for t in single]
    return [
        join_all(join(*(join_all(call.of(v[k])) for v in lists if k < len(v)), *rest))
        for k in range(len(results))
    ]
