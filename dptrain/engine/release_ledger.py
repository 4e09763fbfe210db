"""A record of the noisy updates that were released, so that no step is released twice."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import secrets
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import checks, exact_device

logger = logging.getLogger(__name__)

PERIOD = 2039  # a short row of sums takes up to four times as long, depending on where it lies
_SMALL = 1 << 18  # bytes of a tensor that is put together with others: calls cost more than copies


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Hex digest of the bits of ``tensors``, in order, computed where they live in one pass.

    Sums of 64-bit words by position modulo 2039, for every large tensor and for all small ones
    together, folded with odd weights: they detect any single difference. Several may cancel: words
    at equal positions modulo 2039 that change by amounts that add up to 0, for one (they are not
    meant to resist an adversary).
    """
    return digest_of(sums_of_words(tensors))


def sums_of_words(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What ``checksum`` makes a digest of, where the tensors live: no device is waited for."""
    large: list[torch.Tensor] = []
    small: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        if flat.stride(0) != 1:  # a single number that was expanded
            flat = flat.clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8)
        if len(raw) < _SMALL:
            small.setdefault(raw.device, []).append(raw)
        else:
            large.append(raw)
    sums = [_sums(raw) for raw in (*large, *map(torch.cat, small.values()))]
    if len({each.device for each in sums}) == 1:
        sums = [torch.cat(sums)]  # so that a device is waited for once, not for every tensor
    return sums


def digest_of(sums: Sequence[torch.Tensor]) -> str:
    """The digest of the tensors that ``sums_of_words`` was given; empty for none."""
    if not sums:
        return ""
    # numpy's calls are the shorter ones; both wrap around
    table = torch.cat([each.cpu() for each in sums]).numpy()
    weights = _weights(len(table))
    totals = np.dot(table, weights), np.dot(table ^ (table >> 31), weights)
    return "".join(f"{int(total) & (2**64 - 1):016x}" for total in totals)


@functools.lru_cache(maxsize=8)
def _weights(count: int) -> npt.NDArray[np.int64]:
    """Odd numbers of 64 bits, a different one for every sum."""
    return np.arange(1, 2 * count, 2) * np.int64(0x9E3779B97F4A7C1)


def _sums(raw: torch.Tensor) -> torch.Tensor:
    """int64 sums of 64-bit words of some bytes by position modulo PERIOD, shape (PERIOD,)."""
    raw = raw.to(exact_device(raw.device))  # sums of 64 bits
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words have to start at a multiple of their size
    words, rest = raw[: len(raw) // 8 * 8].view(torch.int64), raw[len(raw) // 8 * 8 :]
    whole = len(words) // PERIOD * PERIOD
    sums = words[:whole].view(-1, PERIOD).sum(0)
    sums[: len(words) - whole].add_(words[whole:])
    if len(rest):
        sums[: len(rest)].add_(rest)
    return sums


class StepLedger:
    """The checksum of every released step, in memory and, if a path is given, on disk.

    Resuming from a checkpoint that is older than the last released step runs steps again. With
    the same noise and a bit-identical gradient nothing new is learned; with the same noise and
    anything else the difference of the two releases cancels the noise. So a repeated step must
    come out bit for bit, and is refused before the model is updated otherwise
    (docs/theory/run.md#thm-repeat, #thm-ledger;
    ``test_ledger_allows_an_equal_repeat_and_refuses_a_different_one``).

    The file is only ever added to, one line a step, which is on the disk before the step is
    released. What a crash left of a line that it cut off was not released.

    Args:
        mechanism_hash: of the run this ledger belongs to.
        path: an append-only JSON-lines file, made if missing; ``None`` keeps it in memory.
        told: ``run`` and ``digests`` of the ledger of another process, which keeps the file. One
            of several processes of a run does; the others refuse the same repeats.

    Attributes:
        run: drawn when the ledger is begun. A checkpoint that names it knows which ledger has seen
            all of its run's releases; a file that was deleted and begun anew has another.
        digests: of the released steps, from 0.

    Raises:
        ValueError: if the file belongs to another mechanism or cannot be read.
    """

    def __init__(
        self,
        mechanism_hash: str,
        path: str | os.PathLike[str] | None = None,
        *,
        told: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        self.mechanism_hash = mechanism_hash
        self.path = None if path is None else pathlib.Path(path)
        self.run = secrets.token_hex(16) if told is None else told[0]
        self.digests: list[str] = [] if told is None else list(told[1])
        self._keeper = told is None
        self._size = 0  # bytes of the file's whole lines
        self._cut_off = False  # whether the file may go on with a piece of a line
        if not self._keeper or self.path is None:
            return
        if self.path.is_dir():
            raise ValueError(f"ledger={self.path} is a folder: must be a file")
        if self.path.exists():
            self._read(self.path)
        else:
            self._begin(self.path)

    def record(self, step: int, digest: str) -> None:
        """Enter the release of ``step`` (from 0).

        Raises:
            RuntimeError: if the step was released before with other bits, or the file is not as
                this run left it.
        """
        if step < len(self.digests):
            if self.digests[step] != digest:
                raise RuntimeError(
                    f"step {step} was released before and now has a different result (other code, "
                    "data, settings or hardware, or the ledger of another run); releasing both "
                    "would let anyone cancel the noise. Resume from the latest checkpoint in the "
                    "environment that wrote it, or start a new run with its own ledger and add "
                    "its privacy loss to this one's"
                )
            return
        checks.invariant(step == len(self.digests), "the ledger records steps in order")
        self._append({"step": step, "digest": digest})
        self.digests.append(digest)

    def check(
        self, digests: Sequence[str], *, run: str, kept: bool, accept_lost: bool = False
    ) -> None:
        """Refuse a checkpoint of which this ledger has not seen all releases that it should have.

        Args:
            digests: of the steps that the checkpoint's run had released by then.
            run: of the ledger that the checkpoint's run had.
            kept: whether that was a file.
            accept_lost: go on without that file, which is then said in the guarantee.

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
        if self.path is None or not kept or accept_lost or self.knows(digests, run=run):
            return
        if run == self.run:
            found = f"it was cut off after {len(self.digests)} steps"
        elif self.digests:
            found = f"it is the ledger {self.run[:8]}… and holds {len(self.digests)} steps"
        else:
            found = "it was missing, or begun anew, and holds no step"
        raise ValueError(
            f"ledger {self.path} does not match the checkpoint: {found}, but the run had released "
            f"{len(digests)} steps under the ledger {run[:8]}…. Without the run's own ledger, a "
            "step may be released in two versions, which cancels its noise. Restore the file, or "
            "accept the risk (accept_lost_ledger=True of load_state_dict, --accept-lost-ledger of "
            "a recipe), which the guarantee then states"
        )

    def knows(self, digests: Sequence[str], *, run: str) -> bool:
        """True if this is the ledger of ``run``, and whole at least up to ``digests``."""
        return run == self.run and len(self.digests) >= len(digests)

    def resume(self, digests: Sequence[str], *, run: str) -> None:
        """Go on from a checkpoint that had released ``digests``; says which steps are repeated.

        Call ``check`` before. Where the ledger was cut off below the checkpoint it gets another
        name: to an earlier one it would look whole again once it is filled up.
        """
        if run == self.run and len(self.digests) < len(digests):
            # The same on all ranks, each of which loads the checkpoint.
            lost = f"{self.run} after {len(self.digests)} steps"
            self.run = hashlib.sha256(lost.encode()).hexdigest()[: len(self.run)]
            self._append({"run": self.run})
        for step in range(len(self.digests), len(digests)):
            self.record(step, digests[step])
        if len(self.digests) > len(digests):
            logger.warning(
                "steps %d to %d were released after this checkpoint and are repeated: the run "
                "stops if one of them is not reproduced bit for bit",
                len(digests),
                len(self.digests) - 1,
            )

    def _begin(self, path: pathlib.Path) -> None:
        """A file with a head, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = _line({"mechanism_hash": self.mechanism_hash, "run": self.run})
        temporary = path.with_name(f"{path.name}.{self.run[:8]}.tmp")
        with temporary.open("wb") as file:
            _write(file, head)
        temporary.replace(path)
        with contextlib.suppress(OSError):  # not every system opens folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._size = len(head)

    def _append(self, entry: dict[str, object]) -> None:
        if self.path is None or not self._keeper:
            return
        line = _line(entry)
        try:
            file = self.path.open("r+b")
        except FileNotFoundError:
            raise self._changed("it is gone") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size < self._size or (size > self._size and not self._cut_off):
                raise self._changed(f"it has {size} bytes, not {self._size}")
            self._cut_off = True  # until all of the line is there
            file.truncate(self._size)
            file.seek(self._size)
            _write(file, line)
        self._size += len(line)
        self._cut_off = False

    def _changed(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"ledger {self.path} was changed while this run was using it ({how}), so it no longer "
            "shows what was released. Restore it, make sure that no other process uses it, and "
            "resume from the last checkpoint"
        )

    def _read(self, path: pathlib.Path) -> None:
        data = path.read_bytes()
        end = b"\n" if data.endswith(b"}") else b""  # all but the end: that step may be released
        data += end
        self._size = data.rfind(b"\n") + 1
        rest = data[self._size :]
        self._cut_off = bool(rest)
        try:
            if b"}" in rest:
                raise ValueError("its last line is damaged")
            head, *lines = (json.loads(line) for line in data[: self._size].splitlines())
            entries = [line for line in lines if "run" not in line]
            digests = [entry["digest"] for entry in entries]
            steps = [entry["step"] for entry in entries]
            owner = head["mechanism_hash"]
            self.run = [head["run"], *(line["run"] for line in lines if "run" in line)][-1]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"ledger {path} cannot be read ({error}): restore it from a backup"
            ) from error
        if owner != self.mechanism_hash:
            raise ValueError(
                f"ledger {path} belongs to mechanism {owner[:12]}…, not to "
                f"{self.mechanism_hash[:12]}…: give every run its own ledger"
            )
        if steps != list(range(len(steps))):
            raise ValueError(f"ledger {path} lacks steps: restore it from a backup")
        self.digests = digests
        if end:
            with path.open("ab") as file:
                _write(file, end)


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _write(file: BinaryIO, data: bytes) -> None:
    """Write the data and wait until they are on the disk."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
