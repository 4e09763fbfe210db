"""Schemes whose number of examples may be private, as add-or-remove adjacency has it."""

from __future__ import annotations

import dataclasses
from abc import ABC
from typing import Any, ClassVar

from dptrain.sampling import fields
from dptrain.sampling.scheme import ExchangeableScheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnySizeScheme(ExchangeableScheme, ABC):
    """An example's law is its own, however many there are: one more or less can be hidden.

    Under add-or-remove adjacency N is private: a divisor N·p, a probability B̄/N or a printed N
    would tell two neighboring data sets apart without a look at the noise. With ``nominal_size``
    everything that is public is worked out with that number instead: the divisor
    ``expected_batch_size``, p where the batch size is stated, ``population``, and what
    statements print (``published``). Batches are drawn from all N examples.

    Args:
        nominal_size: a public number in place of N, chosen without it, such as last year's or a
            round one; ``None``: N itself is public. A scheme that cuts large batches behaves
            otherwise with more examples, so there N must not exceed it.
    """

    nominal_size: int | None = None

    _later_fields: ClassVar[tuple[str, ...]] = ("nominal_size",)

    def _settle_size(self) -> None:
        """Check the nominal size, after the other fields."""
        if self.nominal_size is None:
            return
        fields.settle(self, integers=("nominal_size",))
        if self.max_batch_size is not None and self.dataset_size > self.nominal_size:
            raise ValueError(
                f"{type(self).__name__}: nominal_size={self.nominal_size} with "
                f"max_batch_size={self.max_batch_size} and dataset_size={self.dataset_size}: if "
                "batches are truncated, nominal_size must be a public upper bound on the number "
                "of examples. Raise it, or leave max_batch_size out"
            )

    @property
    def expected_batch_size(self) -> float:
        """B̄, a public constant: as if there were ``nominal_size`` examples, where that is given."""
        if self.nominal_size is None:
            return super().expected_batch_size
        changes: dict[str, Any] = {"dataset_size": self.nominal_size, "nominal_size": None}
        return dataclasses.replace(self, **changes).expected_batch_size

    @property
    def population(self) -> int:
        """N, or the number that is public in its place."""
        return self.dataset_size if self.nominal_size is None else self.nominal_size

    def published(self) -> dict[str, Any]:
        """The scheme's fields, without N where a nominal size stands for it."""
        value = self.to_dict()
        if self.nominal_size is not None:
            del value["dataset_size"]
        return value
