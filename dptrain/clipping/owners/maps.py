"""Owner maps: for every element of a tensor the example that it depends on.

A map is an int32 tensor of the shape of what it is of, on the CPU. Dimensions along which all
owners are alike have stride 0, as most have, so that a map of (rows, positions, channels) by rows
holds one number a row and rules work on these (``thin``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

SHARED = -1
"""Owner of elements of no example: all share them, or they do not depend on the batch."""

EVENT = -2  # and below: several examples, or nobody knows; -2 - the number of the event
NEW = -(2**31)  # several examples, by the operator that is being followed


def shared(shape: Sequence[int]) -> torch.Tensor:
    """Map of what depends on no example."""
    return uniform(SHARED, shape)


def uniform(owner: int, shape: Sequence[int]) -> torch.Tensor:
    """Map in which all elements have this owner."""
    return torch.tensor(owner, dtype=torch.int32).expand(tuple(shape))


def thin(owners: torch.Tensor) -> torch.Tensor:
    """The map with size 1 in every dimension along which owners are alike."""
    for d, (size, stride) in enumerate(zip(owners.shape, owners.stride(), strict=True)):
        if stride == 0 and size > 1:
            owners = owners.narrow(d, 0, 1)
    return owners


def thinned(owners: torch.Tensor) -> torch.Tensor:
    """The same map, with stride 0 wherever owners turn out to be alike."""
    shape, found = owners.shape, thin(owners)
    for d in reversed(range(found.dim())):  # rows, which differ, come first
        if found.shape[d] > 1 and found.numel():
            first = found.narrow(d, 0, 1)
            # Where they differ at all, neighbors mostly do.
            if torch.equal(found.narrow(d, 1, 1), first) and bool((found == first).all()):
                found = first
    return found.expand(shape)


def is_shared(owners: torch.Tensor) -> bool:
    """True if the map has no example at all."""
    few = thin(owners)
    return not few.numel() or bool((few == SHARED).all())


def join(*maps: torch.Tensor) -> torch.Tensor:
    """Map of what is made element by element of tensors that broadcast; thin."""
    found: torch.Tensor | None = None
    for owners in maps:
        other = thin(owners)
        found = other if found is None else _joined(found, other)
    assert found is not None
    return found


def _joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a is b:
        return a
    if a.numel() == 1 and int(a) == SHARED:
        return b.expand(torch.broadcast_shapes(a.shape, b.shape))
    if b.numel() == 1 and int(b) == SHARED:
        return a.expand(torch.broadcast_shapes(a.shape, b.shape))
    several = torch.where((a >= 0) & (b >= 0), NEW, torch.minimum(a, b))
    either = torch.where(a == SHARED, b, torch.where(b == SHARED, a, several))
    return torch.where(a == b, a, either)


def join_along(owners: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Map of what is made of all elements along some dimensions, which keep the size 1."""
    few = thin(owners)
    those = [d for d in {d % max(few.dim(), 1) for d in dims} if few.dim() and few.shape[d] != 1]
    if not those:
        return few
    if 0 in few.shape:  # of no numbers at all something is made that depends on none
        shape = [1 if d in those else size for d, size in enumerate(few.shape)]
        return shared(shape)
    most = few.amax(those, keepdim=True)
    least = few.amin(those, keepdim=True)
    # The least that is somebody's: SHARED itself lies below all examples.
    owner = torch.where(few == SHARED, torch.iinfo(torch.int32).max, few).amin(those, keepdim=True)
    several = torch.where(least <= EVENT, least, NEW)
    return torch.where((owner == most) | (most == SHARED) & (least == SHARED), most, several)


def join_all(owners: torch.Tensor) -> torch.Tensor:
    """Map of what is made of all elements; shape ()."""
    return join_along(owners, range(owners.dim())).reshape(())


def viewed(owners: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The map of the same elements in another shape, in their order.

    Dimensions are matched in groups of equal products; within a group along which all owners are
    alike nothing is written out.
    """
    sizes = tuple(shape)
    if tuple(owners.shape) == sizes:
        return owners
    if 0 in sizes:
        return shared(sizes)
    few: list[int] = []
    many: list[int] = []
    for before, after in _groups(owners.shape, sizes):
        alike = all(owners.stride(d) == 0 or owners.shape[d] == 1 for d in before)
        few += [1] * len(after) if alike else [sizes[d] for d in after]
        many += [] if alike else before
    kept = owners
    for d in range(owners.dim()):
        if d not in many:
            kept = kept.narrow(d, 0, 1)
    return kept.reshape(few).expand(sizes)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Runs of dimensions of the one that are as many elements as such a run of the other."""
    a = b = 0
    while a < len(old) or b < len(new):
        before, after = [], []
        if a < len(old):
            before.append(a)
            a += 1
        if b < len(new):
            after.append(b)
            b += 1
        left = old[before[0]] if before else 1
        right = new[after[0]] if after else 1
        while left != right:
            if left < right:
                before.append(a)
                left *= old[a]
                a += 1
            else:
                after.append(b)
                right *= new[b]
                b += 1
        yield before, after


def of_rows(count: int, shape: Sequence[int], each: int = 1) -> torch.Tensor:
    """Map of ``each`` rows of an example after the other in the first dimension."""
    owners = torch.arange(count, dtype=torch.int32)
    if each > 1:
        owners = owners.div(each, rounding_mode="floor")
    return owners.view(count, *itertools.repeat(1, len(shape) - 1)).expand(tuple(shape))
