"""What owners the results of torch's operators have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dptrain.clipping.owners.maps import (
    EVENT,
    NEW,
    SHARED,
    is_shared,
    join,
    join_all,
    join_along,
    shared,
    thin,
    thinned,
    uniform,
    viewed,
)

Map = torch.Tensor


class Owners(Protocol):
    """What rules ask of a trace."""

    def owners(self, tensor: torch.Tensor) -> Map:
        """Whose the elements are."""

    def unknown(self, operator: str, shape: Sequence[int]) -> Map:
        """Of what nobody knows whose it is."""

    def escaped(self, tensor: torch.Tensor, operator: str) -> None:
        """The numbers of a tensor leave torch."""

    def wrote(self, call: Call, tensor: torch.Tensor, owners: Map) -> None:
        """An operator wrote into an argument, which its schema need not say."""


class Call:
    """A call of an operator, with the maps of its tensors as they are before it.

    Attributes:
        func: the operator's overload.
        name: without overload, and without the ending of what works in place.
        writes: whether what it returns are arguments that it wrote into.
        trace: that it is seen by.
        tensors: among its arguments.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], trace: Owners
    ) -> None:
        self.func, self.args, self.kwargs, self.trace = func, args, kwargs, trace
        self.name, self.writes, self._places = _facts(func)
        self._maps: dict[int, Map] = {}
        self.tensors = list(_tensors((*args, *kwargs.values())))
        for tensor in self.tensors:
            self._maps[id(tensor)] = trace.owners(tensor)

    def __getitem__(self, argument: str) -> Any:
        """An argument by its name in the operator's schema; its default if it was not given."""
        if argument in self.kwargs:
            return self.kwargs[argument]
        place, default = self._places[argument]
        return self.args[place] if place < len(self.args) else default

    def has(self, argument: str) -> bool:
        """Whether the operator has such an argument."""
        return argument in self._places

    def of(self, value: Any) -> Map:
        """The map of a tensor argument; SHARED of what is none."""
        if isinstance(value, torch.Tensor):
            return self._maps[id(value)]
        return shared(())

    def map(self, argument: str) -> Map:
        """The map of the argument of this name."""
        return self.of(self[argument])

    def word(self, index: torch.Tensor) -> Map:
        """Whose word an index is, which says where elements are taken from or put.

        Places that several examples decide together (an offset is the sum of the lengths before)
        are unknown and not mixed: the elements themselves may well be one example's.
        """
        owners = self.of(index)
        few = thin(owners)
        if not few.numel() or int(few.min()) > EVENT:
            return owners
        place = int(self.trace.unknown(f"{self.name} by indices of several examples", ())[()])
        return torch.where(few <= EVENT, place, few).expand(owners.shape)

    def maps(self, *, but: Sequence[str] = ()) -> list[Map]:
        """The maps of all tensors, but for some arguments."""
        left_out = {id(t) for name in but for t in _tensors((self[name],))}
        return [m for key, m in self._maps.items() if key not in left_out]


@functools.cache
def _facts(func: Any) -> tuple[str, bool, dict[str, tuple[int, Any]]]:
    """Name, whether it writes, and its arguments' places and defaults."""
    name = func.overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    schema = func._schema
    places = {
        a.name: (
            k if not a.kwarg_only else 1 << 20,
            a.default_value if a.has_default_value() else None,
        )
        for k, a in enumerate(schema.arguments)
    }
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return name, writes, places


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _names(text: str) -> list[str]:
    return text.split()


Rule = Callable[[Call, list[torch.Tensor]], Sequence[Map | None]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of these names."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def owners_of_results(call: Call, value: Any) -> list[tuple[torch.Tensor, Map]]:
    """What an operator returned, and wrote into, with the maps that it has now."""
    if torch.Tag.inplace_view in call.func.tags:
        return []
    if call.name in _ESCAPES:
        for tensor in call.tensors:
            call.trace.escaped(tensor, call.name)
    results = list(_tensors(value))
    if call.name.startswith("_foreach"):
        results = results or list(call["self"])
        return list(zip(results, foreach(call, results), strict=True))
    results = results or list(_written(call))  # with out= lists return nothing
    known = call.func.namespace in ("aten", "prims")
    rule_of_it = RULES.get(call.name) if known else None
    if rule_of_it is None and torch.Tag.pointwise in call.func.tags:
        rule_of_it = pointwise
    if rule_of_it is not None:
        pairs = zip(results, rule_of_it(call, results), strict=True)
        return [(t, _of_shape(m, t)) for t, m in pairs if m is not None]
    written = [t for t in _written(call) if not any(t is r for r in results)]
    if all(is_shared(m) for m in call.maps()):
        return [(t, shared(t.shape)) for t in (*results, *written)]
    return [(t, call.trace.unknown(call.func.name(), t.shape)) for t in (*results, *written)]


def _written(call: Call) -> list[torch.Tensor]:
    """Arguments that the operator says it writes into."""
    found = []
    for a in call.func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            found += list(_tensors(call[a.name]))
    return found


_ESCAPES = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"})


def _of_shape(owners: Map, result: torch.Tensor) -> Map:
    return owners if owners.shape == result.shape else owners.expand(result.shape)


# Element by element, and what depends on no example.

_POINTWISE = _names("""
    where masked_fill native_dropout native_dropout_backward threshold_backward gelu_backward
    sigmoid_backward tanh_backward hardtanh_backward silu_backward mish_backward elu_backward
    leaky_relu_backward softplus_backward hardswish_backward hardsigmoid_backward
    hardshrink_backward softshrink_backward log_sigmoid_forward log_sigmoid_backward
    logit_backward prelu _prelu_kernel _prelu_kernel_backward rrelu_with_noise_backward
    clamp clamp_min clamp_max bernoulli normal poisson
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
    soft_margin_loss_backward l1_loss_backward clone _to_copy contiguous copy fill lift_fresh_copy
    nan_to_num real imag angle polar complex view_as_complex_copy relu relu6 dropout
    _fused_dropout isin_Scalar lerp addcmul addcdiv tril triu conj_physical _conj_physical
    logical_and logical_or logical_not logical_xor ldexp
    frexp to bitwise_left_shift bitwise_right_shift gcd lcm isclose
    _add_relu add_relu alias_copy detach_copy celu alpha_dropout xlogy special_xlog1py
""")

_FACTORIES = _names("""
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
    return [_broadcast(found, call, t) for t in results]


def _broadcast(found: Map, call: Call, result: torch.Tensor) -> Map:
    shape = found.shape
    pairs = zip(reversed(shape), reversed(result.shape), strict=False)
    if len(shape) <= result.dim() and all(a in (1, b) for a, b in pairs):
        return found
    return join(*(join_all(m) for m in call.maps()))


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
    """What was there before is gone."""
    source = call["src"] if call.has("src") else call["value"]
    return [thin(call.of(source)) for _ in results]


@rule(*_FACTORIES)
def made(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Depends on no example, whatever shape it has from one, but on numbers that it is given."""
    given = call.maps(but=("self",) if call.has("self") else ())
    return [join(shared(()), *(join_all(m) for m in given)) for _ in results]


@rule("random", "uniform", "exponential", "geometric", "cauchy", "log_normal", "zero")
def filled(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Nothing of what was there before is left."""
    return [shared(t.shape) for t in results]


# Views, and what puts elements elsewhere.


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


_MOVED = _names("""
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
    args = [call.of(a) if isinstance(a, torch.Tensor) else a for a in call.args]
    func = _functional(call.func)
    kwargs = {k: v for k, v in call.kwargs.items() if k != "out"}
    found = list(_tensors(func(*args, **kwargs)))
    return found if call.name in _STRIDED else [thinned(m) for m in found]


_STRIDED = frozenset(
    _names("""
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
    """As it was."""
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
    found = shared(results[0].shape).contiguous()
    grad = call.map("grad_output")
    if call.name == "select_backward":
        found.select(call["dim"], call["index"]).copy_(grad)
    elif call.name == "diagonal_backward":
        found.diagonal(call["offset"], call["dim1"], call["dim2"]).copy_(grad)
    else:
        aten = torch.ops.aten.slice.Tensor
        aten(found, call["dim"], call["start"], call["end"], call["step"]).copy_(grad)
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


# Made of all elements along dimensions.

_REDUCTIONS = _names("""
    sum mean amax amin max min argmax argmin var std var_mean std_mean prod logsumexp nansum any all
    norm linalg_vector_norm count_nonzero median nanmedian mode kthvalue aminmax nanmean
    special_logsumexp hash_tensor
""")


@rule(*_REDUCTIONS)
def reduced(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All elements along the dimensions that it reduces; all of them, if it names none."""
    owners = call.map("self")
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
        found = _without(found, every)
    return [found if _fits(found, t) else join_all(owners) for t in results]


def _without(owners: Map, dims: Sequence[int]) -> Map:
    for d in sorted(set(dims), reverse=True):
        owners = owners.select(d, 0) if owners.shape[d] else owners.sum(d)
    return owners


def _fits(owners: Map, result: torch.Tensor) -> bool:
    pairs = zip(owners.shape, result.shape, strict=False)
    return owners.dim() == result.dim() and all(a in (1, b) for a, b in pairs)


_ALONG = _names("""
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
    return [found if _fits(found, t) else join_all(found) for t in results]


@rule("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax_backward")
def softmax_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """As the softmax."""
    both = join(call.map("grad_output"), call.map("output"))
    return [join_along(both, [call["dim"]]) if both.dim() else both]


@rule("glu_backward", "logcumsumexp_backward")
def along_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """As the forward pass."""
    (result,) = results
    dim = call["dim"] % max(result.dim(), 1)
    parts = [join_along(m, [dim]) for m in call.maps()]
    found = join(*parts)
    return [found if _fits(found, result) else join_all(found)]


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def transformed(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All elements along the transformed dimensions."""
    return [join_along(call.map("self"), call["dim"]) for _ in results]


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By the last dimensions."""
    last = range(-len(call["normalized_shape"]), 0)
    inner = join_along(call.map("input"), last)
    out = join(inner, call.map("weight"), call.map("bias") if call.has("bias") else shared(()))
    return [out, *(inner for _ in results[1:])]


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By the last dimensions; of the parameters what all rows give."""
    count = len(call["normalized_shape"])
    each = join(*call.maps())
    inner = join_along(each, range(-count, 0))
    leading = range(each.dim() - count)
    own = join_along(each, leading)
    for _ in leading:
        own = own.select(0, 0)
    found = [inner, *(own for _ in results[1:])]
    return [m if _broadcasts(m, t) else join_all(m) for m, t in zip(found, results, strict=True)]


def _broadcasts(owners: Map, result: torch.Tensor) -> bool:
    pairs = zip(reversed(owners.shape), reversed(result.shape), strict=False)
    return owners.dim() <= result.dim() and all(a in (1, b) for a, b in pairs)


# Products.


@rule("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation")
def product(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with a column of the second, and what is added."""
    pairs = [("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("mat", "vec")]
    pairs += [("self", "vec"), ("self", "tensor"), ("self", "other")]
    left, right = next((a, b) for a, b in pairs if call.has(a) and call.has(b))
    first, second = call.map(left), call.map(right)
    rows = join_along(first, [-1])
    if second.dim() == 1:
        found = join(rows.squeeze(-1), join_all(second))
    else:
        found = join(rows, join_along(second, [-2]))
    if call.name == "addbmm":
        found = join_along(found, [0]).squeeze(0)
    if call.name in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"):
        found = join(call.map("self"), found)
    return [found]


@rule("linear")
def linear(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """x Wᵀ + b."""
    weight = join_along(call.map("weight"), [-1]).squeeze(-1)
    return [join(join_along(call.map("input"), [-1]), weight, call.map("bias"))]


@rule("_cdist_forward")
def distances(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with a row of the second."""
    first, second = (join_along(call.map(n), [-1]) for n in ("x1", "x2"))
    return [join(first, second.transpose(-1, -2))]


@rule("_cdist_backward")
def distances_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with all of the second."""
    each = join(call.map("grad"), call.map("cdist"), join_along(call.map("x1"), [-1]))
    other = join_along(call.map("x2"), [-1, -2])
    return [join(join_along(each, [-1]), other)]


@rule("multinomial")
def drawn(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By the weights of a row."""
    return [join_along(call.map("self"), [-1])]


@rule("_trilinear")
def trilinear(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A sum over products of three that are expanded to the same dimensions."""
    parts = []
    for k in (1, 2, 3):
        m = call.map(f"i{k}")
        for d in sorted(call[f"expand{k}"]):
            m = m.unsqueeze(d)
        parts.append(m)
    every = join(*parts)
    dims = [d % every.dim() for d in call["sumdim"]]
    return [_without(join_along(every, dims), dims)] if dims else [every]


# By groups of channels, which are rows of their own where (1, rows · channels) are given.


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
    """Which results are there."""
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


# By rows: each row of a result is made of that row of some arguments and of all of the others.
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
    "max_pool2d_with_indices": (("self",), ()),
    "max_pool3d_with_indices": (("self",), ()),
    "max_pool2d_with_indices_backward": (("grad_output", "self", "indices"), ()),
    "max_pool3d_with_indices_backward": (("grad_output", "self", "indices"), ()),
    "max_unpool2d": (("self", "indices"), ()),
    "max_unpool3d": (("self", "indices"), ()),
    "fractional_max_pool2d": (("self", "random_samples"), ()),
    "fractional_max_pool3d": (("self", "random_samples"), ()),
    "fractional_max_pool2d_backward": (("grad_output", "self", "indices"), ()),
    "fractional_max_pool3d_backward": (("grad_output", "self", "indices"), ()),
    "searchsorted": ((), ()),
    "multi_margin_loss_backward": ((), ()),
    "slow_conv2d_forward": (("self",), ()),
    "mkldnn_max_pool2d": (("self",), ()),
}
for _name in _names("""
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa max_pool1d
"""):
    _BY_ROWS[_name] = (("self", "input"), ())
    _BY_ROWS[_name + "_backward"] = (("grad_output", "self", "indices"), ())


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


# Losses.

_LOSSES = _names("""
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss l1_loss kl_div
    binary_cross_entropy_with_logits
""")


@rule(*_LOSSES)
def loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Element by element, and all of them if they are reduced."""
    each = join(*call.maps())
    return [join_all(each) if call["reduction"] else each]


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By target; the total weight belongs to all of them, where targets are not alike in it."""
    self, target = call.map("self"), call.map("target")
    classes = min(1, self.dim() - 1)
    each = _without(join_along(self, [classes]), [classes])
    each = join(each, target, join_all(call.map("weight")))
    reduction = call["reduction"]
    total = shared(())
    counts_all = call["weight"] is None and not bool((call["target"] == call["ignore_index"]).any())
    if reduction == 1 and not counts_all:
        total = join_all(target)
    return [join_all(each) if reduction else each, total]


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By target."""
    classes = min(1, results[0].dim() - 1)
    grad, target = call.map("grad_output"), call.map("target")
    if not target.dim():
        return [join(*(join_all(m) for m in call.maps(but=("self",))))]
    if grad.dim():
        grad = grad.unsqueeze(classes)
    total = call.map("total_weight") if call["reduction"] == 1 else shared(())
    weight = join_all(call.map("weight"))
    return [join(grad, target.unsqueeze(classes), weight, join_all(total))]


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def margin_loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By row."""
    self, target = call.map("self"), call.map("target")
    rows = join_along(self, [-1]).squeeze(-1) if self.dim() else self
    marks = join_along(target, [-1]).squeeze(-1) if target.dim() > rows.dim() else target
    if self.dim() == 1:
        rows, marks = join_all(self), join_all(target)
    each = join(rows, marks, join_all(call.map("weight")) if call.has("weight") else shared(()))
    found = [join_all(each) if call["reduction"] else each]
    inner = join(join_along(self, [-1]), join_along(target, [-1])) if len(results) > 1 else each
    return [*found, *(inner for _ in results[1:])]


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def margin_loss_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By row."""
    self, target, grad = (call.map(n) for n in ("self", "target", "grad_output"))
    if self.dim() < 2:
        return [join(*(join_all(m) for m in call.maps()))]
    rows = [join_along(self, [1]), target if target.dim() > 1 else target.unsqueeze(1)]
    rows = [rows[0], join_along(rows[1], [1])]
    if call.has("is_target"):
        rows.append(join_along(call.map("is_target"), [1]))
    weight = join_all(call.map("weight")) if call.has("weight") else shared(())
    return [join(*rows, grad.unsqueeze(1) if grad.dim() else grad, weight)]


# Statistics of a batch.


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
    (grad, source), dims = (call.map(n) for n in (_grad_of(call), "input")), results[0].dim()
    beside = [n for n in ("weight", "running_mean", "running_var") if call.has(n)]
    own = join(shared(()), *(_by_channel(call.map(n), dims) for n in beside))
    others = [d for d in range(dims) if d != 1]
    channel = join_along(join(grad, source), others)
    whole = join(channel if training else grad, own)
    return [whole if k == 0 else join(channel, own).reshape(-1) for k in _wanted(call)]


def _grad_of(call: Call) -> str:
    return next(n for n in ("grad_out", "grad_output") if call.has(n))


# Embeddings and indices.


@rule("embedding")
def embedding(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Rows of a table."""
    table, ids = call.map("weight"), call.map("indices")
    if is_shared(table):
        return [ids.unsqueeze(-1).expand(results[0].shape)]
    rows = join_along(table, [1])[:, 0]
    return [join(rows[call["indices"].cpu()], ids).unsqueeze(-1)]


@rule("embedding_dense_backward", "embedding_backward", "_embedding_bag_dense_backward")
def embedding_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Any row of the table."""
    return [join(*(join_all(m) for m in call.maps()))]


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """By bag, where the bags are not the examples' to decide."""
    each = join(call.map("indices"), call.map("per_sample_weights"))
    bags = _bags(call, results[0].shape[0])
    if not is_shared(call.map("offsets")):
        every = join_all(each)
        if int(every) < 0:
            return [call.trace.unknown(f"{call.name} by offsets", t.shape) for t in results]
        return [join(every, *(join_all(m) for m in call.maps())) for _ in results]
    others = join_all(call.map("weight"))
    if bags is None or int(others) != SHARED:
        return [join(*(join_all(m) for m in call.maps())) for _ in results]
    each = each.expand(call["indices"].shape)
    owners = _joined_at(shared([results[0].shape[0]]), bags, each, keep=True)
    # The output, the bag of every index, the size of every bag, where its largest numbers were.
    found = [owners.unsqueeze(-1), shared(()), owners, owners.unsqueeze(-1)]
    return [m if _broadcasts(m, t) else join_all(m) for m, t in zip(found, results, strict=True)]


def _bags(call: Call, count: int) -> torch.Tensor | None:
    """The bag of every index."""
    offsets = call["offsets"].cpu()
    length = len(call["indices"])
    if call["include_last_offset"]:
        offsets = offsets[:-1]
    if len(offsets) != count:
        return None
    places = torch.arange(length)
    return torch.searchsorted(offsets.long().contiguous(), places, right=True) - 1


def _joined_at(base: Map, index: torch.Tensor, values: Map, *, keep: bool) -> Map:
    """Maps of which elements of the first dimension are joined where an index puts them.

    Args:
        base: shape (n,).
        index: shape (m,), of the places.
        values: shape (m,).
        keep: whether what is there stays a part of it.
    """
    most = torch.full(base.shape, torch.iinfo(torch.int32).min, dtype=torch.int32)
    least = torch.full(base.shape, torch.iinfo(torch.int32).max, dtype=torch.int32)
    owner = least.clone()
    values = values.contiguous()
    most = most.scatter_reduce(0, index, values, "amax")
    least = least.scatter_reduce(0, index, values, "amin")
    theirs = torch.where(values == SHARED, torch.iinfo(torch.int32).max, values)
    owner = owner.scatter_reduce(0, index, theirs, "amin")
    hit = torch.zeros(base.shape, dtype=torch.bool).index_fill(0, index, True)
    several = torch.where(least <= -2, least, NEW)
    same_owner = (owner == most) | ((most == SHARED) & (least == SHARED))
    found = torch.where(same_owner, most, several)
    found = join(found, base).expand(base.shape) if keep else found
    return torch.where(hit, found, base)


@rule("index", "_unsafe_index")
def indexed(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The elements that were picked, and whose word it was to pick them."""
    owners, picked = call.map("self"), call["indices"]
    chosen, start, size = _choice(call, picked)
    for mask in _given(picked) if _masks(picked) else []:
        call.trace.escaped(mask, call.name)  # Python sees how many there are
    if chosen is not None and _masks(picked) and int(chosen) < 0:
        return [call.trace.unknown(call.name, t.shape) for t in results]
    content = torch.ops.aten.index.Tensor(owners, _on_cpu(picked))
    if chosen is None:
        return [thinned(content)]
    rest = content.dim() - start - size
    chosen = chosen.expand(content.shape[start : start + size])
    return [join(thinned(content), chosen.reshape(*chosen.shape, *[1] * rest))]


def _given(picked: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [i for i in picked if i is not None]


def _masks(picked: Sequence[torch.Tensor | None]) -> bool:
    return any(i.dtype in (torch.bool, torch.uint8) for i in _given(picked))


def _on_cpu(picked: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if i is None else i.cpu() for i in picked]


def _choice(call: Call, picked: Sequence[torch.Tensor | None]) -> tuple[Map | None, int, int]:
    """Whose word the indices are, as they broadcast; where in the result, and how many dims."""
    given = _given(picked)
    if all(is_shared(call.of(i)) for i in given):
        return None, 0, 0
    if _masks(picked):
        # What is chosen by a mask has places that all of the mask decides.
        return join(*(join_all(call.of(i)) for i in given)), 0, 0
    places = [k for k, i in enumerate(picked) if i is not None]
    chosen = join(*(call.word(i) for i in given))
    size = max(i.dim() for i in given)
    together = places == list(range(places[0], places[0] + len(places)))
    return chosen, places[0] if together else 0, size


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Where what is written lands is decided by the indices, and what is not written over too."""
    owners, values = call.map("self"), call.map("values")
    picked, given = call["indices"], _given(call["indices"])
    words = [call.word(i) for i in given]
    lost = [int(thin(w).min()) for w in words if w.numel() and int(thin(w).min()) <= EVENT]
    if lost:
        return [uniform(lost[0], ())]
    decided = join(*(join_all(w) for w in words)) if given else shared(())
    add = bool(call["accumulate"])
    if int(decided) == SHARED:
        return [_put(owners, picked, values, add=add)]
    if _masks(picked):
        if len(given) == 1 and call["values"].numel() == 1:
            place = next(k for k, i in enumerate(picked) if i is not None)
            rest = owners.dim() - place - given[0].dim()
            return [join(owners, words[0].reshape(*words[0].shape, *[1] * rest), join_all(values))]
        if int(decided) < 0:  # which value lands where, all of the mask decides
            return [call.trace.unknown(f"{call.name} by a mask", t.shape) for t in results]
    found = _put_by_own_rows(call, owners, picked, values)
    if found is not None:
        return [found]
    return [join(join_all(owners), join_all(values), decided)]


def _put(owners: Map, picked: Sequence[torch.Tensor | None], values: Map, *, add: bool) -> Map:
    """Where every index is everybody's to know."""
    places = torch.arange(owners.numel()).view(owners.shape)
    where = torch.ops.aten.index.Tensor(places, _on_cpu(picked))
    flat = owners.reshape(-1).contiguous()
    values = values.expand(where.shape).reshape(-1)
    return thinned(_joined_at(flat, where.reshape(-1), values, keep=add).view(owners.shape))


def _put_by_own_rows(
    call: Call, owners: Map, picked: Sequence[torch.Tensor | None], values: Map
) -> Map | None:
    """Rows that are picked by what all know, and places within them by what is the row's own."""
    first = picked[0]
    if first is None or first.dtype in (torch.bool, torch.uint8) or not is_shared(call.of(first)):
        return None
    given = _given(picked)
    if _masks(picked):
        return None
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    each = join(*(call.word(i) for i in given)).expand(shape)
    size = len(shape)
    inner = join_along(values, range(values.dim() - max(values.dim() - size, 0), values.dim()))
    if values.dim() > size:
        inner = inner.reshape(inner.shape[:size])
    each = join(each, inner).expand(shape).reshape(-1)
    rows = first.cpu().expand(shape).reshape(-1)
    rows = torch.where(rows < 0, rows + owners.shape[0], rows)
    base = join_along(owners, range(1, owners.dim())).reshape(-1).expand(owners.shape[0])
    untouched = owners.clone(memory_format=torch.contiguous_format)
    written = _joined_at(base, rows, each, keep=True)
    hit = torch.zeros(owners.shape[0], dtype=torch.bool).index_fill(0, rows, True)
    ones = [1] * (owners.dim() - 1)
    return thinned(torch.where(hit.view(-1, *ones), written.view(-1, *ones), untouched))


@rule("index_select", "gather", "take_along_dim", "take")
def gathered(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The elements that were picked, and whose word it was to pick them."""
    owners, index = call.map("self"), call["index"]
    word = call.word(index)
    here = index.cpu()
    if call.name == "take":
        return [join(owners.reshape(-1)[here.long()], word)]
    dim = call["dim"]
    if call.name == "gather":
        return [
            join(thinned(owners.gather(dim, here)), word) if owners.dim() else join(owners, word)
        ]
    if not owners.dim():
        return [join(owners, join_all(word))]
    content = thinned(owners.index_select(dim, here.reshape(-1)))
    ones = [1] * (content.dim() - 1 - dim % content.dim())
    return [join(content, word.reshape(-1, *ones))]


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
def scattered(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All that is written along the dimension, at every place of it."""
    owners, index = call.map("self"), call["index"]
    dim = call["dim"]
    name = next((n for n in ("src", "source", "value") if call.has(n)), None)
    source = call.map(name) if name is not None else shared(())
    if not owners.dim():
        return [join(*(join_all(m) for m in (owners, source, call.word(index))))]
    dim %= owners.dim()
    word = call.word(index)
    if word.numel() and int(thin(word).min()) <= EVENT:
        return [thin(word).min()]
    if call.name.startswith("index"):
        if is_shared(word):
            return [_indexed_along(call, owners, index, source, dim)]
        source = join_along(source, [dim]) if source.dim() else source
        return [join(join_along(owners, [dim]), source, join_all(word))]
    adds = call.name != "scatter" or (call.has("reduce") and call["reduce"] is not None)
    if is_shared(word):
        return [_scattered_along(owners, index.cpu(), source, dim, add=adds)]
    if any(index.shape[d] > owners.shape[d] for d in range(owners.dim())):
        return [join(*(join_all(m) for m in (owners, source, word)))]
    source = source if not source.dim() else _first(source, index.shape)
    line = join_along(join(source, word).expand(index.shape), [dim])
    line = line.expand([1 if d == dim else n for d, n in enumerate(index.shape)])
    return [_joined_corner(join_along(owners, [dim]), line, owners.shape, dim)]


def _first(owners: Map, shape: Sequence[int]) -> Map:
    for d, size in enumerate(shape):
        owners = owners.narrow(d, 0, size)
    return owners


def _joined_corner(owners: Map, line: Map, shape: Sequence[int], dim: int) -> Map:
    """Joined where an index has entries, which may be fewer than the tensor."""
    whole = shared([1 if d == dim else n for d, n in enumerate(shape)]).contiguous()
    _first(whole, line.shape).copy_(line)
    return join(owners, thinned(whole))


def _scattered_along(owners: Map, index: torch.Tensor, source: Map, dim: int, *, add: bool) -> Map:
    places = torch.arange(owners.numel()).view(owners.shape)
    grid = torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij")
    where = places[tuple(index if d == dim else g for d, g in enumerate(grid))]
    values = (_first(source, index.shape) if source.dim() else source).expand(index.shape)
    flat = owners.reshape(-1).contiguous()
    found = _joined_at(flat, where.reshape(-1), values.reshape(-1), keep=add)
    return thinned(found.view(owners.shape))


def _indexed_along(call: Call, owners: Map, index: torch.Tensor, source: Map, dim: int) -> Map:
    picked: list[torch.Tensor | None] = [None] * owners.dim()
    picked[dim] = index.reshape(-1)
    return _put(owners, picked, source, add=call.name == "index_add")


@rule("masked_select", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "nonzero_static")
def counted(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """How many there are, and where each is, all of them decide."""
    if all(is_shared(m) for m in call.maps()):
        return [shared(t.shape) for t in results]
    for tensor in call.tensors:
        call.trace.escaped(tensor, call.name)  # Python sees how many there are
    every = join(*(join_all(m) for m in call.maps()))
    if int(every) >= 0:
        return [every for _ in results]
    return [call.trace.unknown(call.name, t.shape) for t in results]


@rule("masked_scatter", "masked_scatter_backward", "put")
def everything(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Any element may be any's."""
    every = join(*(join_all(m) for m in call.maps()))
    return [every for _ in results]


@rule("_pack_padded_sequence")
def packed(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Rows by length: the operator itself says whose they are."""
    owners, lengths = call.map("input"), call["lengths"]
    content = torch.ops.aten._pack_padded_sequence(
        owners.double().contiguous(), lengths.cpu(), call["batch_first"]
    )[0].to(torch.int32)
    return [thinned(content), shared(results[1].shape)]


@rule("_local_scalar_dense", "equal", "is_nonzero", "_assert_async", "_assert_tensor_metadata")
def nothing(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """No tensor comes of it."""
    return []


@rule("diag_embed")
def on_a_diagonal(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Zeros around it."""
    found = shared(results[0].shape).contiguous()
    found.diagonal(call["offset"], call["dim1"], call["dim2"]).copy_(call.map("self"))
    return [thinned(found)]


_MATRICES = _names("""
    linalg_inv_ex linalg_cholesky_ex cholesky _linalg_svd _linalg_eigh linalg_eig linalg_qr
    linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet linalg_matrix_exp linalg_pinv
    linalg_householder_product linalg_solve_triangular _linalg_solve_ex cholesky_solve
    cholesky_inverse triangular_solve linalg_lstsq linalg_ldl_factor_ex lu_unpack geqrf
    _linalg_eigvals linalg_eigvals linalg_cross
""")


@rule(*_MATRICES)
def of_matrices(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All of a matrix, of each in a batch of them."""
    maps = [m for m in call.maps() if m.dim() >= 2]
    if len(maps) != len(call.maps()):
        return [join(*(join_all(m) for m in call.maps())) for _ in results]
    each = join(*(join_along(m, [-1, -2]) for m in maps))
    batch = each[..., 0, 0]
    found: list[Map] = []
    for t in results:
        inner = t.dim() - batch.dim()
        grown = batch.reshape((*batch.shape, *[1] * inner)) if inner >= 0 else batch
        found.append(grown if _fits(grown, t) else join_all(batch))
    return found


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
