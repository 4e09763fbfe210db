"""Opening the stream of a strategy's noise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dptrain.core import checks
from dptrain.noise.streams import FlatStream, RegenerationStream, Shard, stream_class
from dptrain.strategies import Strategy


def noise_stream(
    strategy: Strategy,
    *,
    steps: int,
    like: Sequence[torch.Tensor],
    seed: int,
    secure: bool = False,
    dtype: torch.dtype = torch.float32,
    regenerate: bool = False,
    per_parameter: bool = False,
    shard: tuple[int, int] | None = None,
    pieces: Sequence[Sequence[int]] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> FlatStream:
    """Rows of C^-1 Z for tensors shaped ``like`` these, one a step.

    Args:
        strategy: the strategy matrix C; it is bound to ``steps`` if it is not yet.
        steps: n, the number of rows that the stream hands out.
        like: parameters (or tensors) whose shapes, dtypes and devices the noise has.
        seed: any integer in [0, 2^128); whoever knows it can subtract the noise. Draw it with
            ``secrets.randbits(128)``.
        secure: draw from a cryptographic generator.
        dtype: of the buffers, ``torch.float32`` or ``torch.bfloat16``: half the memory, but
            C·noise is then only approximately Gaussian, as ``stream.notes`` says.
        regenerate: keep no buffers, draw the normals of earlier steps again: O(D) memory at the
            price of as many rows drawn a step as C^-1 has bands.
        per_parameter: a flat row per parameter, not one for all parameters of a device: no
            allocation is larger than a parameter. The noise of a seed is then another.
        shard: (rank, world) of one of ``world`` equal slices, whose noise alone is drawn and kept;
            as ``FlatStream.shard``, without the memory of the whole at any time.
        pieces: in place of a shard, which entries of each flattened tensor noise is drawn and kept
            for: (first, one past the last) for each of ``like``. The noise of an entry is that of
            the whole stream, so that any division among processes gives the same noise.
        folder: keep the buffers in a file there, not in memory; the noise is the same bit for bit.
            The file has no name and is gone with the process. Whoever reads the disk beneath it can
            subtract the noise; the folder has to be closed to others (mode 0700). For noise on the
            CPU, on Linux; a stream without buffers makes no file.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if no stream serves the strategy, it does not fit the steps, or another
            argument is out of range; if ``pieces`` do not fit the tensors or stand beside
            ``shard``; if ``folder`` is for noise on another device, or stands beside
            ``regenerate``.
        OSError: if ``folder`` is not there, is open to others (``PermissionError``), or has less
            room than the buffers take.
    """
    checks.instance("strategy", strategy, Strategy, example="BandMF(bands=16)")
    checks.instance("dtype", dtype, torch.dtype)
    for name, switch in (
        ("secure", secure),
        ("regenerate", regenerate),
        ("per_parameter", per_parameter),
    ):
        checks.flag(name, switch)
    cut = None if shard is None else _shard(shard)
    if isinstance(like, str) or not isinstance(like, Iterable):
        raise TypeError(f"{checks.named('like', like)} must be a sequence of tensors")
    like = list(like)
    for tensor in like:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{checks.named('like', like)} must be a sequence of tensors")
    if cut is not None and pieces is not None:
        raise ValueError("shard= and pieces= are both given: leave one of the two out")
    if folder is not None:
        checks.instance("folder", folder, (str, os.PathLike))
    kind = RegenerationStream if regenerate else stream_class(type(strategy))
    return kind(
        strategy,
        steps=steps,
        like=like,
        seed=seed,
        secure=secure,
        dtype=dtype,
        per_parameter=per_parameter,
        shard=cut,
        pieces=pieces,
        folder=folder,
    )


def _shard(shard: Any) -> Shard:
    """The slice that is asked for."""
    if not isinstance(shard, tuple) or len(shard) != 2:
        raise TypeError(
            f"{checks.named('shard', shard)} must be (rank, world), for instance (0, 8)"
        )
    try:
        return Shard(*shard)
    except (TypeError, ValueError) as error:
        raise type(error)(f"shard={shard}: {error}") from error
