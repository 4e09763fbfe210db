"""Operations, most of which per-example gradients follow from without running them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.operations.operation import Operation, Unhandled
from dptrain.clipping.bookkeeping.rules.layers import positions
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use
from dptrain.core import named_error

Handler = Callable[[Operation], Any]


def _functions(*names: str) -> Iterator[Callable[..., Any]]:
    """torch's functions and methods of these names, wherever they are."""
    for name in names:
        for holder in (torch, torch.Tensor, F, torch.special):
            if (found := getattr(holder, name, None)) is not None:
                yield found


# Functions that take a tensor's type, shape or device, and none of its numbers.
_LOOKED_AT = frozenset(
    _functions(
        "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
        "is_same_size", "result_type", "promote_types",
        "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
        "__ge__", "isnan", "isinf", "isfinite", "isclose", "allclose", "equal", "argmax", "argmin",
        "argsort", "sign", "sgn", "round", "floor", "ceil", "trunc", "detach", "item", "tolist",
        "numpy", "__bool__", "__float__", "__int__", "__len__",
    )
)  # fmt: skip
# The same, of all but the first argument.
_OTHERS_LOOKED_AT = frozenset(
    _functions("type_as", "view_as", "reshape_as", "expand_as", "to", "resize_as", "broadcast_to")
)

SAME_ROWS = frozenset(
    _functions("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave")
)
"""Operations that make equal rows of one."""

COPIES = frozenset(_functions("contiguous", "clone", "to", "float", "double"))
"""Operations whose result has the same entries in the same places."""


def only_looked_at(func: Callable[..., Any]) -> bool:
    """True if no gradient goes through the operation, whatever its arguments are."""
    return func in _LOOKED_AT


def others_only_looked_at(func: Callable[..., Any]) -> bool:
    """True if no gradient goes to any argument but the first."""
    return func in _OTHERS_LOOKED_AT


def broadcast(op: Operation) -> Any:
    """Element by element: each tracked tensor with a copy for every row.

    Autograd then has every row's gradient, for what it costs to have their sum.
    """
    tensors = [op.leaves[k] for k in op.by_rows]
    dims = max(t.dim() for t in tensors)
    shared = [op.leaves[k].dim() for k, factor in op.factors.items() if not factor]
    if any(t.dim() != dims for t in tensors) or max(shared, default=0) > dims:
        return NotImplemented
    return _by_rows(op, dims)


def _by_rows(op: Operation, dims: int) -> Any:
    """Of tensors of so many dimensions, the tracked ones with a copy for every row."""
    try:
        copies = {k: op.session.each_row(op.leaves[k], op.factor, dims) for k in op.places}
    except Unhandled:
        return NotImplemented
    return op.run(copies)


def assign(op: Operation) -> Any:
    """``x[:, 0] = parameter`` and its like, rows first."""
    target, index, _ = op.args
    first = index[0] if isinstance(index, tuple) else index
    plain = all(
        i is None or i is Ellipsis or isinstance(i, int | slice)
        for i in (index if isinstance(index, tuple) else (index,))
    )
    if not plain or first not in (Ellipsis, slice(None)) or not op.by_row(target):
        return NotImplemented
    dims = target.detach()[index].dim()
    return _by_rows(op, dims)


def linear(op: Operation) -> Any:
    """``F.linear``: x Wᵀ + b."""
    x, weight, bias = _arguments(op, ("input", "weight", "bias"))
    return _product(op, x, weight, bias, transposed=False)


def matmul(op: Operation) -> Any:
    """x W of rows and a matrix; of more dimensions, with a copy of W for every row."""
    left, right = op.args[:2]
    if op.by_row(left) and op.place(right) is not None and right.dim() == 2 and left.dim() > 1:
        return _product(op, left, right, None, transposed=True)
    if min(left.dim(), right.dim()) < 2:
        return NotImplemented
    return broadcast(op)


def _product(op: Operation, x: Any, weight: Any, bias: Any, *, transposed: bool) -> Any:
    if not op.by_row(x) or x.dim() < 2 or weight.dim() != 2:
        return NotImplemented
    of_weight, of_bias = op.place(weight), op.place(bias)

    def uses(saved: tuple[Any, ...], gradient: torch.Tensor) -> dict[int, Use]:
        found: dict[int, Use] = {}
        left = positions(gradient)
        if of_weight is not None:
            right = positions(saved[0])
            found[of_weight] = (
                OuterProducts(right, left) if transposed else OuterProducts(left, right)
            )
        if of_bias is not None:
            found[of_bias] = Materialized(left.sum(1))
        return found

    return op.session.observed(op, op.run(), [x] if of_weight is not None else [], uses)


def layer_norm(op: Operation) -> Any:
    """Layer norm: normalize without weights, and then apply these."""
    x, shape, weight, bias, eps = _arguments(
        op, ("input", "normalized_shape", "weight", "bias", "eps")
    )
    y = F.layer_norm(x, shape, eps=1e-5 if eps is None else eps)
    return _affine(op, x, y, weight, bias, 0)


def rms_norm(op: Operation) -> Any:
    """RMS norm, in the same way."""
    x, shape, weight, eps = _arguments(op, ("input", "normalized_shape", "weight", "eps"))
    return _affine(op, x, F.rms_norm(x, shape, eps=eps), weight, None, 0)


def group_norm(op: Operation) -> Any:
    """Group norm in the same way, with weights of dimension 1."""
    x, groups, weight, bias, eps = _arguments(op, ("input", "num_groups", "weight", "bias", "eps"))
    y = F.group_norm(x, groups, eps=1e-5 if eps is None else eps)
    return _affine(op, x, y, weight, bias, x.dim() - 2)


def _affine(op: Operation, x: Any, y: torch.Tensor, weight: Any, bias: Any, ones: int) -> Any:
    """y ⊙ w + b, for weights that so many dimensions come after."""
    if not op.by_row(x):
        return NotImplemented
    with torch._C._EnableTorchFunction():
        for value, apply in ((weight, torch.mul), (bias, torch.add)):
            if value is not None:
                y = apply(y, value.reshape(*value.shape, *[1] * ones))
    return y


def prelu(op: Operation) -> Any:
    """x where it is positive, else x times the weight of its channel."""
    x, weight = _arguments(op, ("input", "weight"))
    if not op.by_row(x):
        return NotImplemented
    with torch._C._EnableTorchFunction():
        if weight.numel() > 1 and x.dim() > 2:
            weight = weight.reshape(-1, *[1] * (x.dim() - 2))
        return torch.where(x >= 0, x, x * weight)


def masked_fill(op: Operation) -> Any:
    """The value where the mask is, else x; torch wants the value without dimensions."""
    x, mask, value = _arguments(op, ("input", "mask", "value"))
    if not op.by_row(x) or op.place(value) is None:
        return NotImplemented
    with torch._C._EnableTorchFunction():
        return torch.where(mask, value.to(x.dtype), x)


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


def embedding(op: Operation) -> Any:
    """Rows of a table, looked up by the examples."""
    ids, weight, padding, max_norm, _, by_frequency = _arguments(op, _EMBEDDING)
    place = op.place(weight)
    if place is None or max_norm is not None or by_frequency or not op.by_row(ids):
        return NotImplemented
    if padding is not None and padding < 0:
        padding += len(weight)
    return _looked_up(op, ids, place, padding)


def index(op: Operation) -> Any:
    """``table[ids]`` with one tensor of ids."""
    table, ids = op.args[:2]
    place = op.place(table)
    if place is None or not isinstance(ids, torch.Tensor) or table.dim() != 2:
        return NotImplemented
    if ids.is_floating_point() or ids.dtype == torch.bool:
        return NotImplemented
    return _looked_up(op, ids, place, None)


def looked_up(op: Operation) -> tuple[int, torch.Tensor, int | None] | None:
    """Place of the table that an operation without rows takes rows from, their ids, the padding.

    ``None`` for other operations, and of a table that is no parameter itself.
    """
    func, padding = op.func, None
    table: Any = op.args[0] if op.args else None
    index: Any = None
    if func is F.embedding:
        index, table, padding, max_norm, _, by_frequency = _arguments(op, _EMBEDDING)
        if max_norm is not None or by_frequency:
            return None
    elif func is torch.Tensor.__getitem__:
        index = op.args[1]
    elif func in (torch.index_select, torch.Tensor.index_select):
        table, dim, index = _arguments(op, ("input", "dim", "index"))
        if dim not in (0, -2):
            return None
    place = op.place(table)
    if place is None or not op.leaves[place].whole or table.dim() != 2:
        return None
    if isinstance(index, int | slice) and not isinstance(index, bool):
        index = torch.arange(len(table), device=table.device)[index]
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    padding = None if padding is None else padding % len(table)
    return place, index.to(table.device) % len(table), padding


def _looked_up(op: Operation, ids: torch.Tensor, place: int, padding: int | None) -> Any:
    length = len(op.leaves[place])

    def uses(saved: tuple[Any, ...], gradient: torch.Tensor) -> dict[int, Use]:
        own, b = saved[0].flatten(1) if saved[0].dim() > 1 else saved[0][:, None], gradient
        b = b[:, None] if saved[0].dim() == 1 else b.flatten(1, -2)
        if padding is not None:
            b = b.masked_fill((own == padding)[..., None], 0.0)
        return {place: Gathered(own % length, b, length)}

    return op.session.observed(op, op.run(), [ids], uses)


def convolution(op: Operation) -> Any:
    """``F.conv1d``, ``conv2d`` and ``conv3d`` with padding in numbers."""
    x, weight, bias, stride, padding, dilation, groups = _arguments(
        op, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    )
    if not op.by_row(x) or x.dim() != weight.dim() or isinstance(padding, str):
        return NotImplemented
    if not isinstance(groups or 1, int):
        return NotImplemented
    spatial = weight.dim() - 2

    def each(value: Any, default: int) -> tuple[int, ...]:
        value = default if value is None else value
        return (
            (value,) * spatial
            if isinstance(value, int)
            else tuple(value) * (spatial if len(value) == 1 else 1)
        )

    geometry = ConvShape(
        in_channels=x.shape[1],
        out_channels=len(weight),
        kernel=tuple(weight.shape[2:]),
        stride=each(stride, 1),
        dilation=each(dilation, 1),
        padding=tuple((p, p) for p in each(padding, 0)),
        groups=groups or 1,
    )
    of_weight, of_bias = op.place(weight), op.place(bias)

    def uses(saved: tuple[Any, ...], gradient: torch.Tensor) -> dict[int, Use]:
        found: dict[int, Use] = {}
        if of_weight is not None:
            found[of_weight] = Convolved(saved[0], gradient, geometry)
        if of_bias is not None:
            found[of_bias] = Materialized(gradient.flatten(2).sum(2))
        return found

    return op.session.observed(op, op.run(), [x] if of_weight is not None else [], uses)


def _arguments(op: Operation, names: tuple[str, ...]) -> list[Any]:
    """The arguments in this order; ``None`` for those that are left out."""
    args, kwargs = op.args, op.kwargs
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in enumerate(names)]


DIRECT: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys(
        _functions(
            "add", "add_", "sub", "sub_", "subtract", "rsub", "mul", "mul_", "multiply", "div",
            "div_", "divide", "true_divide", "pow", "float_power", "where", "maximum", "minimum",
            "fmax", "fmin", "lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "atan2",
            "logaddexp", "logaddexp2", "clamp", "clip", "hypot", "copy_",
            "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__",
            "__rmul__", "__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__div__",
            "__rdiv__", "__idiv__", "__pow__", "__rpow__", "scaled_dot_product_attention",
            "broadcast_tensors",
        ),
        broadcast,
    ),
    **dict.fromkeys(_functions("masked_fill"), masked_fill),
    **dict.fromkeys(_functions("__setitem__"), assign),
    **dict.fromkeys(_functions("linear"), linear),
    **dict.fromkeys(_functions("matmul", "__matmul__", "mm"), matmul),
    **dict.fromkeys(_functions("layer_norm"), layer_norm),
    **dict.fromkeys(_functions("rms_norm"), rms_norm),
    **dict.fromkeys(_functions("group_norm"), group_norm),
    **dict.fromkeys(_functions("prelu"), prelu),
    F.embedding: embedding,
    **dict.fromkeys(_functions("__getitem__"), index),
    **dict.fromkeys(_functions("conv1d", "conv2d", "conv3d"), convolution),
}  # fmt: skip
"""Handler of each function and method; others are run again for each example."""


def replayed(op: Operation) -> Any:
    """The operation's result, its tracked tensors' gradients found by running it for each row."""
    output = op.run()
    if not isinstance(output, torch.Tensor) or not output.dim():
        raise op.session.refusal(
            op.func, "returns something other than one tensor with a row per example"
        )
    if any(leaf is output for leaf in op.leaves):
        raise op.session.refusal(op.func, "writes into its input")
    rows, factor, by_rows = op.session.rows, op.factor, op.by_rows
    constant = [
        x
        for k, x in enumerate(op.leaves)
        if isinstance(x, torch.Tensor) and k not in by_rows and not x.is_inference()
    ]
    versions = [x._version for x in constant]

    def uses(saved: tuple[Any, ...], gradient: torch.Tensor) -> dict[int, Use]:
        if versions != [x._version for x in constant]:
            raise op.session.refusal(op.func, "uses a tensor that is modified in place afterwards")
        # In half precision so would be the gradients, which are added up.
        values = [_like(op.leaves[k].detach(), gradient) for k in op.places]

        def one(g: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def run(*tracked: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = op.run(
                    {
                        **dict(zip(by_rows, inputs, strict=True)),
                        **dict(zip(op.places, tracked, strict=True)),
                    }
                )
                return found

            y, back = torch.func.vjp(run, *values)[:2]
            if y.shape != g.shape:
                raise op.session.refusal(op.func, "depends on the number of examples")
            found: tuple[torch.Tensor, ...] = back(g)
            return found

        numbers = sum(v.numel() for v in values) + gradient[:factor].numel()
        try:
            found = _over_rows(one, [gradient, *saved], rows, factor, chunk_size(gradient, numbers))
        except RuntimeError as error:
            why = f"cannot be run for one example ({named_error(error)})"
            raise op.session.refusal(op.func, why) from error
        return {k: Materialized(g) for k, g in zip(op.places, found, strict=True)}

    return op.session.observed(op, output, [op.leaves[k] for k in by_rows], uses)


def _over_rows(
    one: Callable[..., tuple[torch.Tensor, ...]],
    tensors: list[torch.Tensor],
    rows: int,
    factor: int,
    step: int,
) -> list[torch.Tensor]:
    """The results of ``one`` for every example's rows, stacked; a loop where vmap refuses."""
    apart = [t.unflatten(0, (rows, factor)) for t in tensors]
    try:
        return list(torch.func.vmap(one, chunk_size=step)(*apart))
    except RuntimeError as error:
        if "randomness" in str(error):  # another run would draw other numbers
            raise
    found = [one(*each) for each in zip(*apart, strict=True)]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def _like(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return value.to(gradient.dtype) if value.is_floating_point() else value
