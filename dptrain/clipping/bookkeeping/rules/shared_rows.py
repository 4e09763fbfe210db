"""Embeddings that are looked up once for all examples of a batch, as positions are."""

from __future__ import annotations

import torch

from dptrain.clipping.base.rows import UnclearRows

_REMEDY = (
    "give what all examples share the shape (1, positions), and ids of the examples' own the shape "
    "(rows, 1)"
)


_FEW = 4  # ids of one an example that follow one another by chance are not rare below


class SharedRows:
    """Gives the output of one embedding layer a row for each example, where all share one.

    What follows broadcasts it to the batch: the gradient of the shared row would be the batch's, of
    no example in particular. Ids of shape (1, T) are shared. Ids of shape (T,) may be positions, or
    one id an example if there are T of those: passes over a few rows show whether their number
    follows that of the rows (``watch``). Without such, what the layer was used for before
    decides, and until that is known, ids that look like positions are refused rather than guessed
    at.

    What other layers make of a single row stays as it is, and is refused when its gradient is
    counted: more often than something shared it is the batch, with the examples elsewhere.
    """

    def __init__(self) -> None:
        self._one_an_example: bool | None = None  # how the layer takes ids of one dimension
        self._seen: list[tuple[int, int]] | None = None  # while watching: rows, and ids

    def watch(self) -> None:
        """From now on, note how many ids of one dimension there are for how many rows."""
        self._seen = []

    def settle(self) -> None:
        """Tell from what was noted, for several numbers of rows, how the layer takes such ids."""
        seen, self._seen = self._seen, None
        if seen and all(rows == ids for rows, ids in seen):
            self._one_an_example = True
        elif seen and len({ids for _, ids in seen}) == 1:
            self._one_an_example = False

    def one_row_each(
        self, ids: torch.Tensor, output: torch.Tensor, rows: int | None
    ) -> torch.Tensor:
        """The output, of shape (rows, ...).

        Args:
            ids: that were looked up.
            output: the layer's.
            rows: that the model sees; ``None`` if that is not known.

        Raises:
            UnclearRows: for ids that may be shared or one an example.
        """
        if rows is None:
            return output
        if ids.dim() == 1:
            return self._flat(ids, output, rows)
        if len(output) != 1 or rows == 1:
            return output
        if not _like_positions(ids):
            raise UnclearRows(
                f"an embedding looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows: "
                "they are neither consecutive, as positions are, nor all the same, and may be the "
                "examples' own; put the examples in the first dimension, and give what they share "
                "a row for each of them (ids.expand(rows, -1))"
            )
        return output.expand(rows, *output.shape[1:])

    def _flat(self, ids: torch.Tensor, output: torch.Tensor, rows: int) -> torch.Tensor:
        """For ids of one dimension."""
        if len(ids) == 1 != rows:  # the output may be meant for (rows, width) or (rows, 1, width)
            raise UnclearRows(
                f"an embedding looks up ids of shape (1,) in a batch of {rows} rows: {_REMEDY}"
            )
        if self._seen is not None:
            self._seen.append((rows, len(ids)))
            return output if len(ids) == rows else output.expand(rows, *output.shape)
        found = self._one_an_example
        if len(ids) != rows:
            found = False
        elif found is None:
            if rows >= _FEW and bool((ids.diff() == 1).all()):
                raise UnclearRows(
                    f"an embedding looks up consecutive ids of shape ({rows},) in a batch of "
                    f"{rows} rows, which may be positions that all examples share or one id an "
                    f"example: {_REMEDY}"
                )
            found = True if rows >= _FEW else None
        if None not in (found, self._one_an_example) and found != self._one_an_example:
            raise UnclearRows(
                f"an embedding looks up ids of shape ({len(ids)},) in a batch of {rows} rows, and "
                f"looked up one id an example before: {_REMEDY}"
            )
        if found is not None:
            self._one_an_example = found
        return output.expand(rows, *output.shape) if found is False else output


def _like_positions(ids: torch.Tensor) -> bool:
    """Whether ids follow one another, either way, or are all the same."""
    steps = ids.flatten().diff()
    return bool(((steps == steps[:1]) & (steps.abs() <= 1)).all())
