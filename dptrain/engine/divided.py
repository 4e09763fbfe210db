"""A checkpoint in a folder, of which each rank writes its part and reads what it needs (DCP).

The format is that of ``torch.distributed.checkpoint``. Parameters and the optimizer's state are
DTensors in it, which torch cuts anew for other ranks; the noise lies there in the blocks of its
streams, of which a rank reads those that it has entries of; all the rest is one tensor of bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import pathlib
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from dptrain.core import exact_device
from dptrain.distributed import Ranks, is_divided, local_of
from dptrain.engine.joined import single_optimizers
from dptrain.engine.release_ledger import checksum
from dptrain.engine.sealed import check_seal, on_cpu, seal
from dptrain.engine.shards import MODULE_PIECES, DividedModule, Shards
from dptrain.engine.sliced import PIECES, all_of, for_each_part
from dptrain.noise import FlatStream

_RUN = "run"  # under which all of it lies
_REST = "rest"  # what is not in tensors of their own, as bytes
_ENTRIES = "entries"  # where the rest has the checksums of parameters and optimizer state
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOT = 1 << 20  # entries that a checksum looks at together

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Holder:
    """This rank's part of a run, as far as a checkpoint is concerned."""

    ranks: Ranks
    module: nn.Module
    optimizer: torch.optim.Optimizer
    noise: FlatStream
    shards: Shards | None

    def __post_init__(self) -> None:
        if self.ranks.world_size > 1 and not isinstance(self.shards, DividedModule):
            raise ValueError(
                "save() and load() need one process or a model divided by fully_shard, and each "
                f"of the {self.ranks.world_size} ranks of this run holds the whole model: use "
                "private.state_dict(share=True) and private.load_state_dict()"
            )

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """First entry and one past the last of what this rank has of a flattened tensor."""
        if not is_divided(tensor):
            return 0, tensor.numel()
        assert isinstance(self.shards, DividedModule)
        pieces = self.shards.module.pieces([tensor], self.ranks.world_size)
        return pieces[self.ranks.rank][0]

    def parameter(self, key: str) -> torch.Tensor:
        """The parameter that a tensor of the optimizer's state belongs to."""
        _, single, index, _ = key.split(".", 3)
        return all_of(list(single_optimizers(self.optimizer))[int(single)])[int(index)]


def check_not_in_dcp() -> None:
    """Refuse to give a state to ``dcp.save`` or ``dcp.load``, which cannot do right by it.

    The files would be open to others. And a state is only read into what is there already, in an
    optimizer that has not stepped: into nothing.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            raise RuntimeError(
                "torch.distributed.checkpoint would write the secrets of a private run into files "
                "that others may read, and could not restore all of it. Leave the run out of "
                "dcp.save, and call private.save(folder) and private.load(folder), which use the "
                "same format"
            )


def write_folder(state: Mapping[str, Any], folder: pathlib.Path, holder: Holder) -> None:
    """Write a state; for all ranks. The folder is there when all of it is, for its owner only."""
    import torch.distributed.checkpoint as dcp  # which takes its time, and others need not

    ranks = holder.ranks
    part = folder.with_name(f".{folder.name}.part")
    _agree(ranks, folder)
    with _all_alike(ranks):
        tensors, rest = _apart(state, holder)
        if ranks.rank == 0:
            _make(folder, part)
    totals = _totals(_numbers(tensors, holder), ranks)
    if ranks.rank == 0:
        rest["private"] = {**rest["private"], _ENTRIES: totals}
        tensors[_REST] = _as_bytes(seal(rest))
    held = {_RUN: tensors} if tensors else {}  # nothing, where others save what this rank has
    with _by_itself(ranks) as alone:
        dcp.save(held, storage_writer=dcp.FileSystemWriter(part), no_dist=alone)
    with _all_alike(ranks):
        if ranks.rank == 0:
            for path in part.iterdir():
                path.chmod(0o600)
            part.rename(folder)


def read_folder(
    folder: pathlib.Path, holder: Holder, check: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """This rank's part of a state that ``write_folder`` wrote, as ``load_state_dict`` takes it.

    Args:
        folder: that all ranks see.
        check: is given the part that is not in tensors; raises where that is of another run.
    """
    import torch.distributed.checkpoint as dcp

    ranks = holder.ranks
    _agree(ranks, folder)
    with _all_alike(ranks):
        if not (folder / ".metadata").is_file():
            raise ValueError(
                f"folder={str(folder)!r} holds no checkpoint: name a folder written by "
                "private.save() that every rank can read"
            )
        reader: Any = dcp.FileSystemReader(folder)
        known = {
            name.removeprefix(f"{_RUN}."): found
            for name, found in reader.read_metadata().state_dict_metadata.items()
        }
        if _REST not in known:
            raise ValueError(
                f"{folder} is not a checkpoint of a private run: it was not written by "
                "private.save()"
            )
        packed = torch.empty(known[_REST].size, dtype=torch.uint8)
    with _by_itself(ranks) as alone:
        dcp.load({_RUN: {_REST: packed}}, storage_reader=reader, no_dist=alone)
    with _all_alike(ranks):
        rest = _from_bytes(packed, folder)
        check(rest)
        tensors = _wanted(known, holder)
    with _by_itself(ranks) as alone:
        dcp.load({_RUN: tensors}, storage_reader=reader, no_dist=alone)
    totals = _totals(_numbers(tensors, holder), ranks)
    with _all_alike(ranks):
        blocks = [(n, t) for n, t in tensors.items() if _is_noise(n)]
        damaged = [n for n, t in blocks if n.rsplit(".", 1)[1] != checksum([t])]
        if damaged or totals != rest["private"].pop(_ENTRIES):
            raise ValueError(
                f"the checkpoint {folder} is damaged: its tensors do not match the checksum stored "
                "with them. Resume from a copy or from an earlier checkpoint"
            )
    return seal(_together(tensors, rest, holder))


def _agree(ranks: Ranks, folder: pathlib.Path) -> None:
    ranks.agree("a checkpoint", lambda: {"folder": str(folder)}, error=ValueError)


@contextlib.contextmanager
def _all_alike(ranks: Ranks) -> Iterator[None]:
    """Raise on every rank what one rank raises within; all ranks leave together."""
    with ranks.together():
        yield
        ranks.any("a checkpoint", False)


@contextlib.contextmanager
def _by_itself(ranks: Ranks) -> Iterator[bool]:
    """True if DCP is to leave torch's process group alone; its warning about that is hidden."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield ranks.world_size == 1


def _make(folder: pathlib.Path, part: pathlib.Path) -> None:
    """The folder that is written to, empty."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"folder={str(folder)!r} already exists: name another, for instance by the number of "
            "steps, and remove the older one afterwards"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    if part.exists():
        shutil.rmtree(part)  # of a process that died while it wrote
    part.mkdir(mode=0o700)


def _apart(state: Mapping[str, Any], holder: Holder) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a state, divided ones as DTensors, and what is left of it."""
    found: Tensors = {}
    like = holder.module.state_dict()
    module = {}
    for name, value in state["module"].items():
        if isinstance(value, torch.Tensor):
            found |= _placed(f"module.{name}", value, like[name])
        else:
            module[name] = value
    rest = {name: v for name, v in state.items() if name not in ("share", MODULE_PIECES)}
    rest |= {"module": module, "private": dict(state["private"])}
    numbers = itertools.count()

    def left(single: torch.optim.Optimizer, states: Any) -> dict[str, Any]:
        number, parameters = next(numbers), all_of(single)
        kept: dict[int, dict[str, Any]] = {}
        for index, values in states[0]["state"].items():
            p, kept[index] = parameters[index], {}
            low, high = holder.place(p)
            shape = p.shape if high - low == p.numel() else (high - low,)
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == shape:
                    found.update(_placed(f"optimizer.{number}.{index}.{name}", value, p))
                else:
                    kept[index][name] = value
        return {**{n: v for n, v in states[0].items() if n != PIECES}, "state": kept}

    if "optimizer" in state:
        rest["optimizer"] = for_each_part(holder.optimizer, [state["optimizer"]], left)
    noise = state["private"]["noise"]
    if "blocks" in noise:  # of a FlatStream; another's is taken as it is
        for block, buffers in zip(noise["blocks"], noise["buffers"], strict=True):
            for place, buffer in enumerate(buffers):
                # Which entries of which row of noise, which of its buffers, and their checksum.
                name = ".".join(["noise", *map(str, block), str(place), checksum([buffer])])
                found[name] = buffer
        rest["private"]["noise"] = {**noise, "blocks": [], "buffers": []}
    return found, rest


def _placed(key: str, value: torch.Tensor, like: Any) -> Tensors:
    """A tensor by its name, a DTensor where ``like`` is one; nothing where a rank has nothing."""
    if not is_divided(like):
        return {key: value.view(like.shape)}
    if not value.numel():
        return {}
    from torch.distributed.tensor import DTensor

    local = value.reshape(local_of(like).shape)
    strides = torch.empty(like.shape, device="meta").stride()
    divided = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=strides
    )
    return {key: divided}


def _wanted(known: Mapping[str, Any], holder: Holder) -> Tensors:
    """The tensors that this rank is to read, by name: new ones, with arbitrary contents."""

    def room(key: str, like: torch.Tensor) -> Tensors:
        if tuple(known[key].size) != tuple(like.shape):
            raise ValueError(
                f"the state belongs to another module or optimizer: {key!r} has the shape "
                f"{tuple(known[key].size)} there and {tuple(like.shape)} here"
            )
        if is_divided(like) and not local_of(like).numel():
            return {}
        return {key: torch.empty_like(like.detach(), dtype=known[key].properties.dtype)}

    found: Tensors = {}
    module = {
        f"module.{name}": value
        for name, value in holder.module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if odd := sorted(set(module) ^ {key for key in known if key.startswith("module.")}):
        raise ValueError(f"the state belongs to another module: the two differ in {odd}")
    for key, value in module.items():
        found |= room(key, value)
    for key in known:
        if key.startswith("optimizer."):
            try:
                p = holder.parameter(key)
            except IndexError:
                raise ValueError(
                    "the state belongs to an optimizer with more parameters or groups of them"
                ) from None
            found |= room(key, p)
    blocks = holder.noise.state_dict().get("blocks", [])
    for key, kind in known.items():
        if _is_noise(key):
            group, start, stop = (int(n) for n in key.split(".")[1:4])
            if any(g == group and low < stop and start < high for g, low, high in blocks):
                found[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return found


def _together(
    tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any], holder: Holder
) -> dict[str, Any]:
    """A state of this rank's entries, in the form of ``private.state_dict()``."""
    state, several = dict(rest), holder.ranks.world_size > 1
    like = holder.module.state_dict()
    module = {
        name: local_of(t).reshape(-1) if is_divided(t) else t
        for name in like
        if (t := tensors.get(f"module.{name}")) is not None
    }
    state["module"] = {**rest["module"], **module}
    if several:
        state[MODULE_PIECES] = {
            name: list(holder.place(value))
            for name, value in like.items()
            if isinstance(value, torch.Tensor) and is_divided(value)
        }
        nothing = {n: torch.empty(0) for n in state[MODULE_PIECES] if n not in module}
        state["module"] |= nothing
    numbers = itertools.count()

    def filled(single: torch.optim.Optimizer, states: Any) -> dict[str, Any]:
        start = f"optimizer.{next(numbers)}."
        values = {index: dict(kept) for index, kept in states[0]["state"].items()}
        for key, tensor in tensors.items():
            if key.startswith(start):
                index, name = key.removeprefix(start).split(".", 1)
                value = local_of(tensor).reshape(-1) if is_divided(tensor) else tensor
                p = holder.parameter(key)
                whole = value.numel() == p.numel()
                values.setdefault(int(index), {})[name] = value.view(p.shape) if whole else value
        if not several:
            return {**states[0], "state": values}
        places = {i: list(holder.place(p)) for i, p in enumerate(all_of(single)) if is_divided(p)}
        return {**states[0], "state": values, PIECES: places}

    state["optimizer"] = for_each_part(holder.optimizer, [rest["optimizer"]], filled)
    blocks: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if _is_noise(key):
            *block, place = (int(n) for n in key.split(".")[1:5])
            blocks.setdefault(tuple(block), {})[place] = tensor
    noise = dict(rest["private"]["noise"])
    if "blocks" in noise:
        noise["blocks"] = [list(block) for block in blocks]
        noise["buffers"] = [[each[i] for i in sorted(each)] for each in blocks.values()]
    state["private"] = {**rest["private"], "noise": noise}
    return state


def _is_noise(key: str) -> bool:
    return key.startswith("noise.")


def _numbers(
    tensors: Mapping[str, torch.Tensor], holder: Holder
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The tensors that this rank sums up: name, its own entries, and the place of the first.

    Tensors that are not divided are answered for by the first rank, and copies by no one.
    """
    copies = holder.shards is not None and holder.shards.copies
    for key, tensor in tensors.items():
        if is_divided(tensor) and not copies:
            yield key, local_of(tensor), holder.place(tensor)[0]
        elif not is_divided(tensor) and not _is_noise(key) and holder.ranks.rank == 0:
            yield key, tensor, 0


def _totals(numbers: Iterable[tuple[str, torch.Tensor, int]], ranks: Ranks) -> list[str]:
    """Checksums over all ranks that do not depend on which entries each of them has.

    Two sums over all entries, modulo 2^64, of their bits times an odd number that follows from the
    name of the tensor and the place of the entry. One entry that changes is always noticed, any
    other accident with all but a chance of about 2^-64; an adversary is not.
    """
    totals = np.zeros(2, dtype=np.uint64)
    for key, tensor, first in numbers:
        salt = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = real.detach().reshape(-1)
        flat = flat.to(exact_device(flat.device))  # sums of 64 bits
        scale = len(flat) // max(1, tensor.numel())  # 2 for complex numbers
        bits = flat.view(_WORDS[flat.element_size()])
        for start in range(0, len(bits), _LOT):
            words = bits[start : start + _LOT].to(torch.int64)
            begin = first * scale + start
            places = torch.arange(begin, begin + len(words), device=words.device)
            odd = (places + salt) * 2 + 1
            odd *= 0x9E3779B97F4A7C1  # odd too
            sums = [(words * odd).sum(), ((words ^ (words >> 31)) * odd).sum()]
            totals += torch.stack(sums).cpu().numpy().view(np.uint64)
    if ranks.world_size == 1:
        return [f"{int(total):016x}" for total in totals]
    halves = totals.view(np.uint32).astype(np.float64)  # exact
    columns, _ = ranks.gather(halves.reshape(1, -1))
    each = columns.reshape(ranks.world_size, -1).astype(np.uint32).view(np.uint64)
    return [f"{int(total):016x}" for total in each.sum(axis=0, dtype=np.uint64)]


def _as_bytes(value: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of ``torch.save``: DCP would read what is no tensor by pickle, unrestricted."""
    file = io.BytesIO()
    torch.save(on_cpu(value), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _from_bytes(packed: torch.Tensor, folder: pathlib.Path) -> dict[str, Any]:
    value: Any = None
    with contextlib.suppress(Exception):  # whatever a reader of damaged bytes says
        value = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    check_seal(value, f"the checkpoint {folder}")
    found: dict[str, Any] = value
    return found
