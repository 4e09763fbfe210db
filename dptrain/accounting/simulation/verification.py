"""The loop that draws the verifying samples of a declared grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tqdm.auto import tqdm

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation.chunk_sums import Sums, exact_sums, sums_of
from dptrain.accounting.simulation.declaration import VERIFY
from dptrain.accounting.simulation.partial_certificate import PartialCertificate, ranges_of
from dptrain.accounting.simulation.simulation import Simulation, loss_chunks

KEEP_SECONDS = 30.0  # how much work a crash may cost


def verify_chunks(
    simulation: Simulation,
    partial: PartialCertificate,
    todo: Sequence[int],
    *,
    threads: int,
    progress: bool,
    keep: Callable[[PartialCertificate], None] | None = None,
    share: str | None = None,
) -> PartialCertificate:
    """The chunks ``todo`` (ascending, none of them in ``partial``) of a declared verification.

    A σ that the chunks known here rule out before a chunk is left out of it; nothing more is drawn
    once every σ is.

    Args:
        simulation: the pair that was declared.
        partial: the declaration, and what is known already.
        todo: chunks to draw.
        threads: number of threads; does not change the result.
        progress: whether to show a progress bar (after two seconds).
        keep: called with the new chunks at the beginning, every half a minute and at the end,
            also when interrupted.
        share: ``"i/k"``, to be noted in the result.

    Returns:
        The new chunks alone.
    """
    declaration = partial.declaration
    epsilon = declaration.request["epsilon"] - declaration.slack
    verdicts, standing = declaration.verdicts(), list(declaration.sigmas)
    done: set[int] = set()
    sums: dict[int, Sums] = {}

    def snapshot() -> PartialCertificate:
        return PartialCertificate(
            declaration=declaration,
            done=frozenset(done),
            # An interruption may have come between a chunk's sums and its being done.
            sums={chunk: found for chunk, found in sums.items() if chunk in done},
            shares=(share,) if share else (),
        )

    def feed(chunk: int, found: Sums) -> None:
        del standing[: verdicts.feed(found, declaration.size(chunk))]

    kept, known = time.monotonic(), sorted(partial.done, reverse=True)
    if keep is not None:
        keep(snapshot())
    amount = sum(declaration.samples_in(*each) for each in ranges_of(todo))
    try:
        with tqdm(
            total=2 * (partial.samples + amount), initial=2 * partial.samples, desc="certify σ",
            unit="sample", unit_scale=True, disable=not progress, delay=2.0, leave=False,
        ) as bar:  # fmt: skip
            for first, end in ranges_of(todo):
                while known and known[-1] < first and standing:
                    chunk = known.pop()
                    feed(chunk, sums_of(chunk, partial.sums, len(standing)))
                if not standing:
                    break
                blocks = loss_chunks(
                    simulation, standing, "both", seed=[declaration.seed, VERIFY],
                    samples=declaration.samples_in(first, end), threads=threads, shrinking=True,
                    first_chunk=first,
                )  # fmt: skip
                for chunk, block in enumerate(blocks, first):
                    terms = hockey_stick(block[:, block.shape[1] - len(standing) :], epsilon)
                    found = exact_sums(terms)
                    if any(any(row) for row in found):
                        sums[chunk] = found
                    done.add(chunk)
                    feed(chunk, found)
                    bar.update(2 * block.shape[2])
                    if not standing:
                        break
                    if keep is not None and time.monotonic() - kept > KEEP_SECONDS:
                        keep(snapshot())
                        kept = time.monotonic()
    finally:
        if keep is not None:
            keep(snapshot())
    return snapshot()
