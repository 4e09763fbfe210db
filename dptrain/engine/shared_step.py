"""What the ranks of a run do together in a logical step; a single process does it alone."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dptrain.core import Array
from dptrain.distributed import Ranks, is_divided, local_of
from dptrain.engine.release_ledger import StepLedger, checksum
from dptrain.engine.shards import rounded_sums
from dptrain.individual import IndividualRecord
from dptrain.sampling import MicroBatch

if TYPE_CHECKING:
    from dptrain.engine.optimizer import PrivateOptimizer

_ADMITTED = "what the individual filter admitted"
_BEGAN = "noise, parameters or released steps at the start"


class SharedStep:
    """Individual budgets, clipped sums and the record of a step, for all ranks alike.

    Args:
        ranks: the processes of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._nonfinite = 0  # examples found on all ranks until the last release
        self._admitted = 0  # checksum of what the individual filter let through in this step
        self._origin: str | None = None  # what the run began with, or went on from

    def restart(self, nonfinite_examples: int) -> None:
        """Go on from a checkpoint, which knows of so many examples on all ranks."""
        self._nonfinite = nonfinite_examples
        self._origin = None

    def admit(self, record: IndividualRecord, batch: MicroBatch, ratios: Array) -> Array:
        """Shares of this rank's examples; the record of every rank charges the examples of all.

        Args:
            record: this rank's.
            batch: this rank's part of the microbatch, m examples.
            ratios: their norm ratios, shape (m,).
        """
        columns = np.stack([batch.indices.astype(np.float64), ratios])  # exact up to 2^53
        (indices, everybody), own = self.ranks.gather(columns, batch.step, batch.part)
        shares = record.admit(
            step=batch.step, part=batch.part, indices=indices.astype(np.int64), ratios=everybody
        )
        self._admitted = zlib.crc32(shares.tobytes(), self._admitted if batch.part else 0)
        return shares[own]

    def add_up(
        self, optimizer: PrivateOptimizer, *, parts: int, bound: float, missing: Sequence[Any] = ()
    ) -> list[Any]:
        """Make ``p.summed_grad`` the sums of the whole logical batch, of all ranks' shares.

        Where the ranks have shards, ``optimizer.shards.sums`` get this rank's pieces of them
        instead, and ``p.summed_grad`` is ``None``.

        Args:
            optimizer: this rank's.
            parts: microbatches that it has added up.
            bound: R that they were clipped to.
            missing: parameters that no gradient came of on this rank, if they are to be told of.

        Returns:
            Those of ``missing`` that no other rank has a gradient of either.

        Raises:
            RuntimeError: on every rank, if their sums would not make one release.
        """
        clipper = optimizer.clipper
        found = clipper.nonfinite_examples - self._nonfinite
        counts = self.ranks.agree(
            "the end of a step",
            lambda: self._facts(optimizer, parts, bound),
            found,
            len(missing),
            secret=(_ADMITTED, _BEGAN),
        )
        self._nonfinite += sum(count for count, _ in counts)
        clipper.nonfinite_examples = self._nonfinite
        parameters = optimizer.params
        if optimizer.shards is not None:
            nowhere: list[Any] = []
            if any(number for _, number in counts):
                mine = [[_any(p.summed_grad) for p in parameters]]
                columns, _ = self.ranks.gather(np.array(mine, dtype=np.float64))
                reached = np.any(columns.reshape(self.ranks.world_size, -1), axis=0)
                elsewhere = dict(zip(parameters, reached.tolist(), strict=True))
                nowhere = [p for p in missing if not elsewhere[p]]
            optimizer.shards.add_up(parameters)
            return nowhere
        if self.ranks.world_size > 1:
            sums = self.ranks.sum(rounded_sums(parameters), parameters)
            for p, total in zip(parameters, sums, strict=True):
                p.summed_grad = total
        return [p for p in missing if not _any(p.summed_grad)]

    def digest_of(self, released: Sequence[torch.Tensor], *, ranks: Sequence[int] = ()) -> str:
        """Of the bits of a release, the same on all ranks.

        Args:
            released: the tensors, or this rank's pieces of them.
            ranks: that have all pieces between them, this one with them; the digest is then over
                those of these ranks, in order.
        """
        digest = checksum(released)
        if not ranks:
            return digest
        words = [int(digest[i : i + 8] or "0", 16) for i in range(0, 32, 8)]  # exact as floats
        columns, _ = self.ranks.gather(np.array([words], dtype=np.float64))
        each = columns.reshape(self.ranks.world_size, -1)[list(ranks)]
        return hashlib.sha256(each.tobytes()).hexdigest()[:32]

    def record(self, ledger: StepLedger, step: int, digest: str) -> None:
        """Enter a release before any rank's model is updated with it.

        Copies of a shard that differed would tell the difference of two sums without noise
        (docs/theory/noise.md#thm-copies).

        Raises:
            RuntimeError: on every rank, if it cannot be entered, or is not the same on all: noise
                on unlike devices, for instance.
        """
        with self.ranks.together():
            ledger.record(step, digest)
        self.ranks.agree("the release of a step", lambda: {"the noisy sum of the step": digest})

    def _facts(self, optimizer: PrivateOptimizer, parts: int, bound: float) -> dict[str, Any]:
        if self._origin is None:
            noise, released = optimizer.noise.normals.seed, optimizer.ledger.digests
            same = [p for p in optimizer.params if not is_divided(p)]
            began = f"{noise}/{checksum(same)}/{released}"
            # Shards are other numbers on every rank of a row, and the same in every row.
            if optimizer.shards is not None and len(same) < len(optimizer.params):
                own = [local_of(p) for p in optimizer.params if is_divided(p)]
                began += self.digest_of(own, ranks=optimizer.shards.with_all)
            self._origin = hashlib.sha256(began.encode()).hexdigest()[:16]
        return {
            "step": optimizer.steps_executed,
            "microbatches": parts,
            "max_grad_norm": bound,
            "optimizer.param_groups": settings_of(optimizer.original_optimizer),
            _ADMITTED: self._admitted,
            _BEGAN: self._origin,
        }


def _any(total: torch.Tensor | None) -> bool:
    """Whether a process found a gradient."""
    return total is not None and bool(total.any())


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimiser's groups without their parameters, with tensors as numbers."""
    return [
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
