"""Transport of tensors between ranks: few messages, on a device that the backend can send from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 1 << 23  # numbers of small tensors that travel together, 32 MiB of float32


def bucket_length(longest: int, ranks: int) -> int:
    """Count of numbers of each rank's slice that travel together.

    Args:
        longest: numbers of the longest slice.
        ranks: how many there are.
    """
    return max(1, min(longest, BUCKET // ranks))


def everywhere(error: Exception) -> Exception:
    """Mark an error that all ranks raise at this point of their programs."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report an error in this context as one of the connection: no other rank can be told."""
    try:
        yield
    except Exception as error:
        raise everywhere(
            ConnectionError(
                f"a rank of this run has ended, or did not answer in time ({error}). No step is "
                "released in part: resume from the last checkpoint on all ranks"
            )
        ) from error


def device_for(device: torch.device) -> torch.device:
    """``device``, or another that the process group can send from."""
    backends = str(dist.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    if f"{device.type}:" in backends:
        return device
    if "cpu:" in backends:
        return torch.device("cpu")
    kind = backends.partition(":")[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device at a time, the same on every rank."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket


@torch.no_grad()
def travel(bucket: Sequence[torch.Tensor], send: Callable[[torch.Tensor], Any]) -> None:
    """``send`` the numbers of a bucket as one vector, and write back what comes of it."""
    pieces = [tensor.flatten() for tensor in bucket]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    flat = flat.to(device_for(flat.device))
    if flat.numel():
        with reported():
            send(flat)
    for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(piece.view_as(tensor))
