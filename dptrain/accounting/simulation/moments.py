"""Moments of the hockey-stick terms at one σ over a grid of ε, from a simulation that can go on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick_moments
from dptrain.accounting.simulation.certificate_cache import write_json
from dptrain.accounting.simulation.declaration import generator_versions, package_version
from dptrain.accounting.simulation.simulation import DIRECTIONS, Simulation, loss_chunks
from dptrain.accounting.simulation.verification import KEEP_SECONDS
from dptrain.core import Array, digest

WHAT = "unfinished simulation: it proves nothing"


class KeptMoments:
    """Where an interrupted simulation leaves its sums, and finds them again.

    One file for each question (law, σ, samples, grid, versions, what is asked); it carries the
    seed, so that whoever asks the same question goes on with the same draws instead of making
    another attempt.
    """

    def __init__(self, directory: Path, simulation: Simulation, question: dict[str, Any]) -> None:
        self.request = {
            "law": simulation.to_dict(),
            "lanes": simulation.lanes,
            "slack": simulation.slack,
            "versions": generator_versions(),
            "package": package_version(),
            **question,
        }
        self.path = directory / f"simulation-{digest(self.request)}.json"

    def load(self, shape: tuple[int, ...]) -> tuple[int, int, Array] | None:
        """(seed, chunks done, their sums), or ``None`` if there is nothing.

        Raises:
            ValueError: if the file is corrupt.
        """
        if not self.path.exists():
            return None
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
            if value.pop("digest") != digest(value) or value["request"] != self.request:
                raise ValueError("its digest or its request does not match its contents")
            sums = np.array(value["sums"], dtype=np.float64).reshape(shape)
            return int(value["seed"]), int(value["chunks"]), sums
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: corrupt file of an unfinished simulation ({error}); delete it to "
                "begin another attempt"
            ) from error

    def store(self, seed: int, chunks: int, sums: Array) -> None:
        """Write atomically."""
        value = {
            "what": WHAT,
            "request": self.request,
            "seed": str(seed),
            "chunks": chunks,
            "sums": sums.ravel().tolist(),
        }
        write_json(self.path, {**value, "digest": digest(value)})


def loss_moments(
    simulation: Simulation,
    sigma: float,
    grid: Array,
    *,
    seed: int,
    purpose: Sequence[int],
    samples: int,
    threads: int,
    progress: bool,
    kept: KeptMoments | None = None,
) -> tuple[int, Array]:
    """The seed, and means of (1 - e^{ε-L})_+ and its square: shape (direction, 2, len(grid)).

    With ``kept`` a simulation that was interrupted goes on where it was, with its own seed, to
    the same result bit for bit: sums are added in the order of the chunks.

    Raises:
        ValueError: if what was kept is corrupt.
        ArithmeticError: if a loss is not a number.
        KeyboardInterrupt: if interrupted; it says where the samples are kept, or that they are
            lost.
    """
    lanes, at = simulation.lanes, time.monotonic()
    state = (0, np.zeros((len(DIRECTIONS), 2, len(grid))))  # chunks done, and their sums
    if kept is not None and (found := kept.load(state[1].shape)) is not None:
        seed, state = found[0], found[1:]
    first = state[0]
    drawn = min(first * lanes, samples)
    try:
        with tqdm(
            total=2 * samples, initial=2 * drawn, desc="privacy losses", unit="sample",
            unit_scale=True, disable=not progress, delay=2.0, leave=False,
        ) as bar:  # fmt: skip
            for block in loss_chunks(
                simulation, [sigma], "both", seed=[seed, *purpose], samples=samples - drawn,
                threads=threads, first_chunk=first,
            ):  # fmt: skip
                if np.isnan(block).any():
                    raise ArithmeticError("a simulated privacy loss is not a number")
                new = np.stack([hockey_stick_moments(each[0], grid) for each in block])
                # Both at once: an interruption may come between any two statements.
                state = (state[0] + 1, state[1] + new)
                bar.update(2 * block.shape[2])
                if kept is not None and time.monotonic() - at > KEEP_SECONDS:
                    kept.store(seed, *state)
                    at = time.monotonic()
    except KeyboardInterrupt:
        count = f"{min(state[0] * lanes, samples):,} of {samples:,} samples a direction"
        if kept is None:
            raise KeyboardInterrupt(f"{count} are lost; set cache to keep them") from None
        kept.store(seed, *state)
        raise KeyboardInterrupt(
            f"{count} are kept in {kept.path}: the same call continues"
        ) from None
    if kept is not None:
        kept.path.unlink(missing_ok=True)
    return seed, state[1] / samples
