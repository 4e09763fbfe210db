"""Owners of the elements of a storage, whichever tensors view it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dptrain.clipping.owners.maps import join_all, join_along, shared, thin, thinned

_PURGE = 4096  # new storages until those that are gone are forgotten

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


@dataclasses.dataclass
class _Cell:
    """A storage.

    Attributes:
        alive: keeps its address from being another's, and not its memory.
        root: through which all is known that is known of it.
        views: maps of tensors that look at it, as they are now, the root's among them, if it is no
            flat one.
        flat: the root's where parts were written. Nobody else has it.
        opaque: an owner that all of it has, as something writes there that nobody sees.
    """

    alive: StorageWeakRef
    root: Geometry
    views: dict[Geometry, torch.Tensor]
    flat: _ByBlock | None = None
    opaque: int | None = None


@dataclasses.dataclass(frozen=True)
class _ByBlock:
    """A map of all of a storage, whose elements have one owner in each block of so many."""

    owners: torch.Tensor  # of the blocks, contiguous
    size: int

    def finer(self, size: int, least: int) -> _ByBlock:
        """The map in blocks of a size that divides this one, of so many elements at least."""
        owners = self.owners
        if size != self.size:
            owners = owners.repeat_interleave(self.size // size)
        missing = -(-least // size) - len(owners)
        if missing > 0:
            owners = torch.cat([owners, shared([missing])])
        return self if owners is self.owners else _ByBlock(owners, size)


class Memory:
    """Owner maps by storages: aliases of one storage have one truth."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._next = _PURGE

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The map of a tensor; ``None``: its storage was never seen."""
        cell = self._cells.get(_address(tensor))
        if cell is None:
            return None
        if cell.opaque is not None:
            return torch.tensor(cell.opaque, dtype=torch.int32).expand(tensor.shape)
        geometry = _geometry(tensor)
        found = cell.views.get(geometry)
        if found is None:
            found = cell.views[geometry] = self._through_root(cell, geometry)
        return found

    def put(self, tensor: torch.Tensor, owners: torch.Tensor, *, written: bool) -> None:
        """The map of a tensor that an operator returned, or has written into."""
        address = _address(tensor)
        geometry = _geometry(tensor)
        cell = self._cells.get(address)
        if cell is None:
            storage = tensor.untyped_storage()
            if not _covers(geometry, storage.nbytes()):
                whole = (torch.Size([_length(geometry, storage.nbytes())]), (1,), 0, tensor.dtype)
                unit = _unit(geometry, owners)
                flat = _ByBlock(shared([-(-whole[0][0] // unit)]).contiguous(), unit)
                _store(flat, geometry, owners)
                self._cells[address] = _Cell(StorageWeakRef(storage), whole, {}, flat)
            else:
                self._cells[address] = _Cell(StorageWeakRef(storage), geometry, {geometry: owners})
            if len(self._cells) > self._next:
                self._purge()
        elif not written:
            cell.views[geometry] = owners
        elif _covers(geometry, tensor.untyped_storage().nbytes()):
            cell.root, cell.views, cell.flat = geometry, {geometry: owners}, None
        else:
            self._write_part(cell, geometry, owners, tensor.untyped_storage().nbytes())

    def hide(self, tensor: torch.Tensor, owner: int) -> None:
        """Note that nobody knows what is written there from now on."""
        if self.find(tensor) is None:
            self.put(tensor, shared(tensor.shape), written=True)
        self._cells[_address(tensor)].opaque = owner

    def _through_root(self, cell: _Cell, geometry: Geometry) -> torch.Tensor:
        """The map of a tensor that was not made by an operator that was seen."""
        if geometry[3].itemsize != cell.root[3].itemsize:
            return join_all(_whole(cell)).expand(geometry[0])
        flat = _flat(cell, _last(geometry), _unit(geometry))
        cell.flat = None if cell.flat is None else flat
        return _read(flat, geometry)

    def _write_part(
        self, cell: _Cell, geometry: Geometry, owners: torch.Tensor, nbytes: int
    ) -> None:
        if geometry[3].itemsize != cell.root[3].itemsize:
            lost = join_all(torch.stack([join_all(_whole(cell)), join_all(owners)]))
            cell.views, cell.flat = {cell.root: lost.expand(cell.root[0])}, None
            return
        size = max(_last(geometry), nbytes // geometry[3].itemsize)
        flat = _flat(cell, size, _unit(geometry, owners))
        _store(flat, geometry, owners)
        cell.root = (torch.Size([len(flat.owners) * flat.size]), (1,), 0, cell.root[3])
        cell.views, cell.flat = {}, flat

    def _purge(self) -> None:
        self._cells = {a: cell for a, cell in self._cells.items() if not cell.alive.expired()}
        self._next = 2 * len(self._cells) + _PURGE


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def _last(geometry: Geometry) -> int:
    """Elements of the storage up to the last one of a tensor."""
    shape, stride, offset, _ = geometry
    if 0 in shape:
        return offset
    return offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _length(geometry: Geometry, nbytes: int) -> int:
    return max(_last(geometry), nbytes // geometry[3].itemsize)


def _covers(geometry: Geometry, nbytes: int) -> bool:
    """True if a tensor has every element of its storage, each once."""
    shape, stride, offset, dtype = geometry
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return offset == 0 and expected * dtype.itemsize >= nbytes


def _unit(geometry: Geometry, owners: torch.Tensor | None = None) -> int:
    """The most elements in blocks that a tensor has whole; with one owner each, if these are given.

    Blocks are counted from the start of the storage.
    """
    shape, stride, offset, _ = geometry
    inner = _inner(geometry)
    if inner is None or (owners is not None and owners.stride(inner) != 0):
        return 1
    others = (s for d, (n, s) in enumerate(zip(shape, stride, strict=True)) if n > 1 and d != inner)
    return math.gcd(offset, shape[inner], *others)


def _inner(geometry: Geometry) -> int | None:
    """The dimension along which elements are next to each other."""
    pairs = enumerate(zip(geometry[0], geometry[1], strict=True))
    return next((d for d, (n, s) in pairs if n > 1 and s == 1), None)


def _in_blocks(flat: _ByBlock, geometry: Geometry) -> Any:
    """The blocks of a tensor that has them whole, as it has their elements."""
    shape, stride, offset, _ = geometry
    inner = _inner(geometry)
    sizes = [n // flat.size if d == inner else n for d, n in enumerate(shape)]
    steps = [1 if d == inner else s // flat.size for d, s in enumerate(stride)]
    return flat.owners.as_strided(sizes, steps, offset // flat.size)


def _read(flat: _ByBlock, geometry: Geometry) -> torch.Tensor:
    found = thin(thinned(_in_blocks(flat, geometry))).clone()
    inner = _inner(geometry)
    if inner is not None and found.shape[inner] > 1 and flat.size > 1:
        found = found.repeat_interleave(flat.size, inner)
    return found.expand(geometry[0])


def _store(flat: _ByBlock, geometry: Geometry, owners: torch.Tensor) -> None:
    """Write a map to where the elements of its tensor are."""
    shape, stride, _, _ = geometry
    same = [d for d, (n, s) in enumerate(zip(shape, stride, strict=True)) if s == 0 and n > 1]
    if same:  # one element stands at all places along them
        owners = join_along(owners, same)
        for d in same:
            geometry = (torch.Size([*shape[:d], 1, *shape[d + 1 :]]), *geometry[1:])
            shape = geometry[0]
        owners = owners.expand(shape)
    inner = _inner(geometry)
    if inner is not None and flat.size > 1:
        owners = owners.narrow(inner, 0, shape[inner] // flat.size)
    blocks = _in_blocks(flat, geometry)
    expected = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= expected:  # windows that overlap
            blocks.fill_(int(join_all(owners)))
            return
        expected += step * (size - 1)
    blocks.copy_(owners)


def _whole(cell: _Cell) -> torch.Tensor:
    return cell.views[cell.root] if cell.flat is None else cell.flat.owners


def _flat(cell: _Cell, least: int, unit: int) -> _ByBlock:
    """Map written out for so many elements at least; the cell's own if that will do.

    Args:
        least: elements.
        unit: of which the size of blocks is to be a divisor.
    """
    if cell.flat is not None:
        return cell.flat.finer(math.gcd(unit, cell.flat.size), least)
    owners = cell.views[cell.root]
    unit = math.gcd(unit, _unit(cell.root, owners))
    flat = _ByBlock(shared([-(-max(_last(cell.root), least) // unit)]).contiguous(), unit)
    _store(flat, cell.root, owners)
    return flat
