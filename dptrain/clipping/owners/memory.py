"""Which owners the elements of a storage have, whatever tensors look at it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dptrain.clipping.owners.maps import join_all, join_along, shared, thinned

_PURGE = 4096  # new storages until those that are gone are forgotten

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


@dataclasses.dataclass
class _Cell:
    """A storage.

    Attributes:
        alive: keeps its address from being another's, and not its memory.
        root: through which all is known that is known of it.
        views: maps of tensors that look at it, as they are now, the root's among them.
        opaque: an owner that all of it has, as something writes there that nobody sees.
    """

    alive: StorageWeakRef
    root: Geometry
    views: dict[Geometry, torch.Tensor]
    opaque: int | None = None


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
                flat = shared(whole[0]).contiguous()
                _store(flat, geometry, owners)
                self._cells[address] = _Cell(StorageWeakRef(storage), whole, {whole: flat})
            else:
                self._cells[address] = _Cell(StorageWeakRef(storage), geometry, {geometry: owners})
            if len(self._cells) > self._next:
                self._purge()
        elif not written:
            cell.views[geometry] = owners
        elif _covers(geometry, tensor.untyped_storage().nbytes()):
            cell.root, cell.views = geometry, {geometry: owners}
        else:
            self._write_part(cell, geometry, owners, tensor.untyped_storage().nbytes())

    def hide(self, tensor: torch.Tensor, owner: int) -> None:
        """From now on nobody knows what is written there."""
        if self.find(tensor) is None:
            self.put(tensor, shared(tensor.shape), written=True)
        self._cells[_address(tensor)].opaque = owner

    def _through_root(self, cell: _Cell, geometry: Geometry) -> torch.Tensor:
        """The map of a tensor that was not made by an operator that was seen."""
        root = cell.views[cell.root]
        if geometry[3].itemsize != cell.root[3].itemsize:
            return join_all(root).expand(geometry[0])
        flat = _flat(cell.root, root, _last(geometry))
        return thinned(_within(flat, geometry))

    def _write_part(
        self, cell: _Cell, geometry: Geometry, owners: torch.Tensor, nbytes: int
    ) -> None:
        root = cell.views[cell.root]
        if geometry[3].itemsize != cell.root[3].itemsize:
            lost = join_all(torch.stack([join_all(root), join_all(owners)]))
            cell.views = {cell.root: lost.expand(cell.root[0])}
            return
        size = max(_last(geometry), nbytes // geometry[3].itemsize)
        flat = _flat(cell.root, root, size)
        _store(flat, geometry, owners)
        cell.root = (torch.Size([len(flat)]), (1,), 0, cell.root[3])
        cell.views = {cell.root: flat}

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
    """Whether a tensor has every element of its storage, each once."""
    shape, stride, offset, dtype = geometry
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return offset == 0 and expected * dtype.itemsize >= nbytes


def _store(flat: torch.Tensor, geometry: Geometry, owners: torch.Tensor) -> None:
    """Write a map to where the elements of its tensor are."""
    shape, stride, _, _ = geometry
    same = [d for d, (n, s) in enumerate(zip(shape, stride, strict=True)) if s == 0 and n > 1]
    if same:  # one element stands at all places along them
        owners = join_along(owners, same)
        for d in same:
            geometry = (torch.Size([*shape[:d], 1, *shape[d + 1 :]]), *geometry[1:])
            shape = geometry[0]
        owners = owners.expand(shape)
    expected = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= expected:  # windows that overlap
            _within(flat, geometry).fill_(int(join_all(owners)))
            return
        expected += step * (size - 1)
    _within(flat, geometry).copy_(owners)


def _flat(root: Geometry, owners: torch.Tensor, least: int) -> torch.Tensor:
    """Written out for every element of the storage, at least so many; a copy."""
    flat = shared([max(_last(root), least)]).contiguous()
    _store(flat, root, owners)
    return flat


def _within(flat: torch.Tensor, geometry: Geometry) -> Any:
    shape, stride, offset, _ = geometry
    return flat.as_strided(shape, stride, offset)
