"""Embeddings, and operators that pick or put elements by indices."""

from __future__ import annotations

from collections.abc import Sequence

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
)
from dptrain.clipping.owners.rules.along import broadcasts
from dptrain.clipping.owners.rules.calls import Call, Map, rule


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
    return [m if broadcasts(m, t) else join_all(m) for m, t in zip(found, results, strict=True)]


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
    """Owners of the indices, as they broadcast; their place in the result, and number of dims."""
    given = _given(picked)
    if all(is_shared(call.of(i)) for i in given):
        return None, 0, 0
    if _masks(picked):
        # Elements chosen by a mask have places that all of the mask decides.
        return join(*(join_all(call.of(i)) for i in given)), 0, 0
    places = [k for k, i in enumerate(picked) if i is not None]
    chosen = join(*(call.word(i) for i in given))
    size = max(i.dim() for i in given)
    together = places == list(range(places[0], places[0] + len(places)))
    return chosen, places[0] if together else 0, size


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """The indices decide where values are written, and so also what is not written over."""
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
    """Owners after a write at indices that are everybody's to know."""
    places = torch.arange(owners.numel()).view(owners.shape)
    where = torch.ops.aten.index.Tensor(places, _on_cpu(picked))
    flat = owners.reshape(-1).contiguous()
    values = values.expand(where.shape).reshape(-1)
    return thinned(_joined_at(flat, where.reshape(-1), values, keep=add).view(owners.shape))


def _put_by_own_rows(
    call: Call, owners: Map, picked: Sequence[torch.Tensor | None], values: Map
) -> Map | None:
    """Rows that are picked by what all know, and places within them by what is the row's own.

    Rows are along the first dimension that all know an index of.
    """
    if picked[0] is None or _masks(picked):
        return None
    given = _given(picked)
    known = [k for k, i in enumerate(picked) if i is not None and is_shared(call.of(i))]
    if not known:
        return None
    dim, index = known[0], picked[known[0]]
    assert index is not None
    owners = owners.movedim(dim, 0)
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    each = join(*(call.word(i) for i in given)).expand(shape)
    size = len(shape)
    rest = [n for k, n in enumerate(call["self"].shape) if k >= len(picked) or picked[k] is None]
    values = join_along(values.expand(*shape, *rest), range(size, size + len(rest)))
    each = join(each, values.expand(*shape, *[1] * len(rest)).reshape(shape)).reshape(-1)
    rows = index.cpu().expand(shape).reshape(-1)
    rows = torch.where(rows < 0, rows + owners.shape[0], rows)
    base = join_along(owners, range(1, owners.dim())).reshape(-1).expand(owners.shape[0])
    untouched = owners.clone(memory_format=torch.contiguous_format)
    written = _joined_at(base, rows, each, keep=True)
    hit = torch.zeros(owners.shape[0], dtype=torch.bool).index_fill(0, rows, True)
    ones = [1] * (owners.dim() - 1)
    found = torch.where(hit.view(-1, *ones), written.view(-1, *ones), untouched)
    return thinned(found.movedim(0, dim))


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
    """All elements decide how many results there are, and where each is."""
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
    """Any element may be any's: which value lands where, all of the mask or the index decides."""
    every = join(*(join_all(m) for m in call.maps()))
    if int(every) < 0 and not is_shared(every):
        return [call.trace.unknown(call.name, t.shape) for t in results]
    return [every for _ in results]


@rule("_pack_padded_sequence")
def packed(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Rows by length: the operator itself says whose they are."""
    owners, lengths = call.map("input"), call["lengths"]
    call.trace.escaped(lengths, call.name)  # Python sees how many there are of each step
    content = torch.ops.aten._pack_padded_sequence(
        owners.double().contiguous(), lengths.cpu(), call["batch_first"]
    )[0].to(torch.int32)
    return [thinned(content), shared(results[1].shape)]
