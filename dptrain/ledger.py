"""Which noisy updates have been released: the defence against releasing a step twice."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)


PERIOD = 2039  # a short row of sums takes up to four times as long, depending on where it lies
_SMALL = 1 << 18  # bytes of a tensor that is put together with others: calls cost more than copies


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Hex digest of the bits of ``tensors``, in order, computed where they live in one pass.

    Sums of 64-bit words by position modulo 2039, for every large tensor and for all small ones
    together, folded with odd weights: they detect any accidental difference (they are not meant to
    resist an adversary).
    """
    large: list[torch.Tensor] = []
    small: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        if len(raw) < _SMALL:
            small.setdefault(raw.device, []).append(raw)
        else:
            large.append(raw)
    sums = [_sums(raw).cpu() for raw in (*large, *map(torch.cat, small.values()))]
    if not sums:
        return ""
    table = torch.cat(sums).numpy()  # numpy's calls are the shorter ones; both wrap around
    weights = _weights(len(table))
    totals = np.dot(table, weights), np.dot(table ^ (table >> 31), weights)
    return "".join(f"{int(total) & (2**64 - 1):016x}" for total in totals)


@functools.lru_cache(maxsize=8)
def _weights(count: int) -> npt.NDArray[np.int64]:
    """Odd numbers of 64 bits, a different one for every sum."""
    return np.arange(1, 2 * count, 2) * np.int64(0x9E3779B97F4A7C1)


def _sums(raw: torch.Tensor) -> torch.Tensor:
    """int64 sums of 64-bit words of some bytes by position modulo PERIOD, shape (PERIOD,)."""
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words have to start at a multiple of their size
    words, rest = raw[: len(raw) // 8 * 8].view(torch.int64), raw[len(raw) // 8 * 8 :]
    whole = len(words) // PERIOD * PERIOD
    sums = words[:whole].view(-1, PERIOD).sum(0)
    sums[: len(words) - whole] += words[whole:]
    if len(rest):
        sums[: len(rest)] += rest
    return sums


class StepLedger:
    """The checksum of every released step, in memory and, if a path is given, on disk.

    Resuming from a checkpoint that is older than the last released step runs steps again. With
    the same noise and a bit-identical gradient nothing new is learned; with the same noise and
    anything else the difference of the two releases cancels the noise. So a repeated step must
    come out bit for bit, and is refused before the model is updated otherwise.

    Args:
        mechanism_hash: of the run this ledger belongs to.
        path: an append-only JSON-lines file, made if missing; ``None`` keeps it in memory.
        keeper: whether this process reads and writes the file. One of several processes of a run
            does; the others are told :attr:`digests` and refuse the same repeats.

    Raises:
        ValueError: if the file belongs to another mechanism or cannot be read.
    """

    def __init__(
        self, mechanism_hash: str, path: str | pathlib.Path | None = None, *, keeper: bool = True
    ) -> None:
        self.mechanism_hash = mechanism_hash
        self.path = None if path is None else pathlib.Path(path)
        self.digests: list[str] = []
        self._keeper = keeper
        if not keeper:
            return
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"ledger={self.path} is a folder: name a file")
        if self.path is not None and self.path.exists():
            self.digests = self._read(self.path)
        elif self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"mechanism_hash": mechanism_hash})

    def record(self, step: int, digest: str) -> None:
        """Enter the release of ``step`` (from 0).

        Raises:
            RuntimeError: if the step was released before with other bits.
        """
        if step < len(self.digests):
            if self.digests[step] != digest:
                raise RuntimeError(
                    f"step {step} was released before and does not come out the same again "
                    "(other code, data, settings or hardware, or another run's ledger). Releasing "
                    "both would let anyone cancel the noise. Resume from the latest checkpoint in "
                    "the environment that wrote it, or start a new run with its own ledger and "
                    "count its privacy loss on top"
                )
            return
        assert step == len(self.digests), "steps are recorded in order"
        self.digests.append(digest)
        self._append({"step": step, "digest": digest})

    def check(self, digests: Sequence[str]) -> None:
        """Refuse a checkpoint whose releases are not the first ones of this ledger.

        Raises:
            ValueError: with the remedy.
        """
        common = min(len(digests), len(self.digests))
        if list(digests[:common]) != self.digests[:common]:
            raise ValueError(
                "the checkpoint's released steps are not those of the ledger"
                + (f" {self.path}" if self.path else "")
                + ": they come from different runs; use the ledger of the checkpoint's run"
            )

    def resume(self, digests: Sequence[str]) -> None:
        """Go on from a checkpoint that had released ``digests``; says which steps are repeated.

        Raises:
            ValueError: as :meth:`check`.
        """
        self.check(digests)
        for step in range(len(self.digests), len(digests)):
            self.record(step, digests[step])
        if len(self.digests) > len(digests):
            logger.warning(
                "steps %d to %d were released after this checkpoint and are repeated: each must "
                "come out bit for bit the same, or the run stops",
                len(digests),
                len(self.digests) - 1,
            )

    def _append(self, line: dict[str, object]) -> None:
        if self.path is not None and self._keeper:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self, path: pathlib.Path) -> list[str]:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # cut off while being written: that step was never applied or released
            path.write_text(whole)
        lines = whole.splitlines()
        try:
            head, *entries = (json.loads(line) for line in lines)
            digests = [entry["digest"] for entry in entries]
            steps = [entry["step"] for entry in entries]
            owner = head["mechanism_hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"ledger {path} cannot be read ({error}); restore it") from error
        if owner != self.mechanism_hash:
            raise ValueError(
                f"ledger {path} belongs to mechanism {owner[:12]}…, not to "
                f"{self.mechanism_hash[:12]}…; give every run its own ledger"
            )
        if steps != list(range(len(steps))):
            raise ValueError(f"ledger {path} lacks steps; restore it")
        return digests
