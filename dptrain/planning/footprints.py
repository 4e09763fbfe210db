"""Bytes of a private step on each of several ranks: what is kept, held and sent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.base import summing_dtype
from dptrain.core import checks, size
from dptrain.distributed import bucket_length
from dptrain.noise import noise_stream, shard_pieces
from dptrain.strategies import Strategy

_PROBED = 1024  # entries of the stream whose bytes are counted
_GATHERED = 8  # bytes of an entry of the sum of several microbatches, which is float64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHARDS = ("all", "noise", "off")
_BACKENDS = ("nccl", "gloo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes of the rank with the longest slice; ``print`` it, or read its parts.

    Left out are activations and what clipping keeps of a microbatch, which depend on the model;
    temporary tensors of torch's optimizer (two of the largest parameter, or of all of them with
    ``foreach=True``); what torch, its backends and CUDA need for themselves; and what does not grow
    with the model, such as the bytes of it that are compared in every step (17 MB).

    Attributes:
        parameters: of the model.
        history: noise of earlier steps, as the stream of the strategy keeps it.
        optimizer: its state.
        gradients: ``p.grad``, which holds the release until it is set to ``None``; 0 where the
            optimizer steps on slices.
        sums: clipped and noisy sums at the moment of the step at which most is in memory.
        exchange: buffers of the exchange under way at that moment.
        sent: bytes that a rank sends in a step, apart from messages of a fixed size.
    """

    parameters: int
    history: int
    optimizer: int
    gradients: int
    sums: int
    exchange: int
    sent: int

    @property
    def kept(self) -> int:
        """Bytes that are held between two steps, once gradients are ``None``."""
        return self.parameters + self.history + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at the highest moment of a step."""
        return self.kept + self.sums + self.exchange

    def to_dict(self) -> dict[str, int]:
        """JSON-ready figures."""
        return {**dataclasses.asdict(self), "kept": self.kept, "peak": self.peak}

    def __str__(self) -> str:
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sent = parts.pop("sent")
        told = ", ".join(f"{name} {size(count)}" for name, count in parts.items())
        return f"{size(self.peak)} a rank ({told}); sends {size(sent)} a step"


def footprint(
    strategy: Strategy,
    *,
    steps: int,
    parameters: int,
    ranks: int = 1,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    shard: str = "all",
    dtype: torch.dtype = torch.float32,
    noise_dtype: torch.dtype = torch.float32,
    regenerate: bool = False,
    microbatches: int = 1,
    backend: str = "nccl",
) -> Footprint:
    """Memory and traffic of a step of a replicated model on each rank, before a machine is rented.

    Every rank holds the whole model and the clipped sums for it, and divides noise and optimizer as
    ``NoiseOptions.shard`` says (docs/guides/many-machines.md). What a strategy keeps is asked of
    its stream, and the state of the optimizer of an optimizer, which are made for a few numbers.
    ``test_formulas_are_what_ranks_hold_and_send`` compares with runs of 2 and 4 ranks.

    Args:
        strategy: of the noise.
        steps: n, of the run.
        parameters: D, that are trained; on one device and of one dtype.
        ranks: of the run, each with a model of its own.
        optimizer: called with a list of parameters; its state for each entry is counted. What an
            optimizer keeps for rows and columns only, as Adafactor does, is left out.
        shard: ``"all"``, ``"noise"`` or ``"off"``. ``"auto"`` of ``NoiseOptions`` is the first for
            optimizers that work entry by entry, the second for the others.
        dtype: of the parameters.
        noise_dtype: of the noise that is kept, ``NoiseOptions.dtype``.
        regenerate: keep no noise, ``NoiseOptions.regenerate``.
        microbatches: in how many parts a batch comes to a rank.
        backend: ``"nccl"`` or ``"gloo"``, which needs twice the buffers.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if one is out of range, or the strategy does not fit the steps.

    Example:
        >>> print(footprint(BandMF(bands=16), steps=2000, parameters=10**9, ranks=8))
        17 GB a rank (...); sends 7 GB a step
    """
    parameters = checks.integer("parameters", parameters)
    ranks = checks.integer("ranks", ranks)
    microbatches = checks.integer("microbatches", microbatches)
    checks.choice("shard", shard, _SHARDS)
    checks.choice("backend", backend, _BACKENDS)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype}: must be one of {[str(each) for each in _DTYPES]}")
    entry = torch.empty((), dtype=dtype)
    of_model, of_sums = dtype.itemsize, summing_dtype(entry).itemsize
    divided = ranks > 1 and shard != "off"
    mine = _longest_slice(parameters, ranks) if divided else parameters
    kept = history_bytes(strategy, steps=steps, dtype=noise_dtype, regenerate=regenerate)
    state = _state_bytes(optimizer, dtype)
    # Of several microbatches the sums are gathered in float64, the next one beside them.
    gathered = of_sums if microbatches == 1 else _GATHERED
    moments = [(parameters * (of_sums if microbatches == 1 else of_sums + _GATHERED), 0)]
    half = 0 if of_model == of_sums else parameters * of_model  # the release beside the noisy sums
    if divided:
        copies = 1 if backend == "nccl" else 2  # of what all ranks send, or are sent
        bucket = bucket_length(mine, ranks) * (1 + copies * ranks)
        others = (ranks - 1) * mine
        moments.append(((parameters + mine) * of_sums, bucket * of_sums))
        if shard == "all":
            moments.append((mine * of_sums, bucket * of_model))
            sent = others * (of_sums + of_model)
        else:
            moments.append(((parameters + mine) * of_sums, bucket * of_sums))
            moments.append(((parameters + mine) * of_sums + half, 0))
            sent = 2 * others * of_sums
    else:
        if ranks == 1:
            beside = 0 if of_model == gathered else parameters * of_model
            moments.append((parameters * gathered + beside, 0))
        else:
            moments.append((parameters * of_sums + half, 0))
            moments.append((parameters * of_sums, bucket_length(parameters, 1) * of_sums))
        sent = round(2 * (ranks - 1) / ranks * parameters * of_sums)
    sums, exchange = max(moments, key=sum)
    sliced = divided and shard == "all"
    return Footprint(
        parameters=parameters * of_model,
        history=round(kept * mine),
        optimizer=round(state * (mine if sliced else parameters)),
        gradients=0 if sliced else parameters * of_model,
        sums=sums,
        exchange=exchange,
        sent=sent,
    )


@functools.lru_cache(maxsize=64)
def history_bytes(
    strategy: Strategy,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    regenerate: bool = False,
) -> float:
    """Bytes that the stream of a strategy keeps of each parameter, once its buffers are full."""
    stream = noise_stream(
        strategy,
        steps=steps,
        like=[torch.empty(_PROBED)],
        seed=0,
        dtype=dtype,
        regenerate=regenerate,
    )
    return stream.buffer_bytes / _PROBED


def _longest_slice(parameters: int, ranks: int) -> int:
    like: Sequence[torch.Tensor] = [torch.empty(()).expand(parameters)]  # of no memory
    slices = [shard_pieces(like, rank=rank, world=ranks)[0] for rank in range(ranks)]
    return max(stop - start for start, stop in slices)


def _state_bytes(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
) -> float:
    """Bytes of an optimizer's state for each entry of a parameter."""
    probe = nn.Parameter(torch.zeros(_PROBED, dtype=dtype))
    made: Any = optimizer([probe]) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{checks.named('optimizer', optimizer)} must be a function that builds an optimizer "
            "from a list of parameters: torch.optim.AdamW, or lambda p: torch.optim.SGD(p, "
            "lr=1.0, momentum=0.9)"
        )
    probe.grad = torch.zeros_like(probe)
    made.step()
    held = [v for v in made.state[probe].values() if isinstance(v, torch.Tensor)]
    return sum(v.nbytes for v in held if v.shape == probe.shape) / _PROBED
