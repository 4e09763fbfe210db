"""Owners of the results of any operator."""

from __future__ import annotations

from typing import Any

import torch

from dptrain.clipping.owners.answers import TELLING
from dptrain.clipping.owners.maps import is_shared, shared
from dptrain.clipping.owners.rules.calls import RULES, Call, Map, tensors_in
from dptrain.clipping.owners.rules.elementwise import foreach, pointwise


def owners_of_results(call: Call, value: Any) -> list[tuple[torch.Tensor, Map]]:
    """Tensors that an operator returned, and wrote into, with the maps that they have now."""
    if torch.Tag.inplace_view in call.func.tags:
        return []
    if call.name in TELLING:
        for tensor in call.tensors:
            call.trace.escaped(tensor, call.name, value)
    elif _is_counted(call) or _is_sparse(value):
        for tensor in call.tensors:
            call.trace.escaped(tensor, call.name)  # Python sees how many there are
    results = list(tensors_in(value))
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


def _is_counted(call: Call) -> bool:
    """True if the size of a result follows from numbers, and no rule says of which."""
    return torch.Tag.dynamic_output_shape in call.func.tags and call.name not in RULES


def _is_sparse(value: Any) -> bool:
    return any(t.layout != torch.strided for t in tensors_in(value))


def _written(call: Call) -> list[torch.Tensor]:
    """Arguments that the operator says it writes into."""
    found = []
    for a in call.func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            found += list(tensors_in(call[a.name]))
    return found


def _of_shape(owners: Map, result: torch.Tensor) -> Map:
    return owners if owners.shape == result.shape else owners.expand(result.shape)
