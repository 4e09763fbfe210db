"""A sampling scheme: the distribution of who takes part, and the stream that draws from it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import JsonValue, Unit

Indices = npt.NDArray[np.int64]


class BatchStream(ABC):
    """Draws the batches of one run, in order: the examples of each optimizer step.

    ``step`` is the index (from 0) of the batch that the next call draws. Two streams of the same
    scheme and seed draw the same batches; a stream restored by ``load_state_dict`` continues
    bit for bit.
    """

    steps: int
    step: int

    def __iter__(self) -> BatchStream:
        return self

    @abstractmethod
    def __next__(self) -> Indices:
        """Ascending int64 indices of the next batch; ``StopIteration`` after ``steps`` batches."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue (RNG, position, availability); private data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            ValueError: if the state belongs to another scheme.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRun:
    """A run as it is known before a scheme is chosen for it.

    Attributes:
        dataset_size: N.
        steps: n.
        epoch_length: N/B̄, the steps of an epoch.
        separation: steps that are wanted between two participations of an example: as many as the
            strategy has bands. 1: none, the noise is independent; 0: the strategy is dense.
        largest_batch: gives B, the ``max_batch_size`` that costs no privacy that shows where so
            many parts of the data set take turns.
    """

    dataset_size: int
    steps: int
    epoch_length: float
    separation: int
    largest_batch: Callable[[int], int]

    @property
    def batch_size(self) -> float:
        """B̄."""
        return self.dataset_size / self.epoch_length


class Scheme(JsonValue, ABC, family="scheme", joined_by="dptrain.sampling.users"):
    """Immutable description of how examples take part in the steps of a run.

    A scheme is a distribution over sequences of batches that does not depend on what the examples
    contain. Loaders draw from it (``stream``), optimizers divide by its ``expected_batch_size``,
    and accountants state the guarantee of exactly this distribution.

    Subclasses are frozen, keyword-only dataclasses whose fields are JSON values. They check their
    fields when they are made, with an error that names the field, the value and the remedy, and
    become known by ``register_scheme``. They are final: accountants know a scheme by its class, and
    would state the guarantee of a parent for whatever a child draws.

    Attributes:
        nominal_size: ``None``: N is public. A number: N is private, as add-or-remove has it, and
            this takes its place (``AnySizeScheme``).
        max_batch_size: ``None``: everyone who is drawn takes part. A number B: of more than B
            drawn examples, B are kept, each subset being as likely, and every batch is padded to B
            rows of weight 0. Whether an example is kept then depends on who else was drawn, so an
            accountant answers for such a scheme only if it says so (``Accountant.truncation``).
        group_size: ``None``: every row of a batch is clipped by itself. A number G: the rows of a
            unit in one batch, at most G of them, are averaged and clipped as one (``grouped``), and
            batch sizes and ``rate`` count units.
        unamplified: whether the Gaussian accountant, which makes no use of the draws, answers for
            the scheme by itself: where nothing else is proven of it, or may be looser. Other
            schemes are accounted for so only when it is asked for by name.
    """

    nominal_size: int | None = None
    max_batch_size: int | None = None
    group_size: int | None = None
    unamplified: ClassVar[bool] = False

    former_names: ClassVar[Mapping[str, str]] = {
        "TruncatedPoisson": "Poisson with max_batch_size, which draws the same batches",
        "TruncatedMinSep": "MinSep with max_batch_size, which draws the same batches",
    }

    # Fields that the first files did not have: left out of ``to_dict`` while they are ``None``, so
    # that hashes and digests of what has none are what they were.
    _later_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """The values that the support table asks the accountants about; none unless it says so.

        The keys are what the table writes after the name of the class: ``""`` for the plain one.
        """
        return {}

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """The settings with which ``dptrain plan`` tries the scheme; none unless it says so.

        Each holds arguments of ``for_batch_size`` beyond those that every run has (the batch size,
        N, n or epochs, a graph): ``[{}]`` where there are none to choose.
        """
        return ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for base in cls.__mro__[1:]:
            if issubclass(base, Scheme) and ABC not in base.__bases__:
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} cannot be subclassed, since the accountants "
                    "that cover it would also be applied to other sampling: write a scheme of its "
                    "own"
                )
        super().__init_subclass__(**kwargs)

    # A scheme may declare these as a field (Poisson.steps) or derive them (BallsInBins.steps).
    # A property here at run time would become the default of such a field, so the base only
    # declares them read-only to the type checker; SchemeContract checks that they exist.
    if TYPE_CHECKING:

        @property
        @abstractmethod
        def dataset_size(self) -> int:
            """N: rows of the data set."""

        @property
        @abstractmethod
        def steps(self) -> int:
            """Number n of batches drawn in a run."""

        @property
        @abstractmethod
        def min_sep(self) -> int:
            """b ≥ 1: no unit takes part twice within b consecutive steps."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """p0 = B̄/N: an example's chance of inclusion in one step, in the stationary regime.

        With ``group_size`` a unit's: B̄/``population``.
        """

    @property
    def expected_batch_size(self) -> float:
        """B̄ = N·p0, a public constant (in the stationary regime where the law starts cold)."""
        return self.dataset_size * self.rate

    @property
    def max_participations(self) -> int:
        """Most steps that one unit can take part in, whatever is drawn: ceil(n/b) at most."""
        return -(-self.steps // self.min_sep)

    @property
    def period(self) -> int | None:
        """Steps between two participations where they are exactly that apart, which is worth more
        than ``min_sep``; a divisor of ``steps``. ``None``: they need not be."""
        return None

    @property
    def unit(self) -> Unit:
        """The protected unit: one example, unless the scheme knows users."""
        return Unit()

    @property
    def population(self) -> int:
        """Number of units that are protected: N, or the number of users; a public number."""
        return self.dataset_size

    def to_dict(self) -> dict[str, Any]:
        """``{"type": class name, field: value, ...}``, JSON-ready; ``from_dict`` reads it back."""
        value = super().to_dict()
        for name in self._later_fields:
            if value[name] is None:
                del value[name]
        return value

    def published(self) -> dict[str, Any]:
        """The fields that statements print: ``to_dict``, without N where N is private."""
        return self.to_dict()

    @property
    def max_per_batch(self) -> int:
        """Most examples of one unit in one batch: the sum moves by at most so many R."""
        return 1

    @property
    def participants(self) -> Scheme:
        """The scheme by which units take part, if its units stand for these; itself otherwise.

        Accountants are asked about that one. It may be another only where, whatever is drawn and
        whatever the data, one unit adds one vector of norm R to the sums of the steps that it takes
        part in there, and to no other sum, and where what is drawn besides is independent of who
        takes part (docs/theory/users.md#thm-users-averaged).
        """
        return self

    def grouped(self, batch: Indices) -> tuple[Indices, Indices | None]:
        """The rows of a batch unit by unit, and how many each unit has.

        Args:
            batch: as the stream draws it.

        Returns:
            The same rows, and ``None`` where every row is clipped by itself.
        """
        return batch, None

    @property
    def physical_batch_size(self) -> int | None:
        """Constant number of rows that every batch is padded to; ``None``: no padding."""
        return self.max_batch_size

    def shortfall(self, seed: int) -> str | None:
        """A message on batches that this seed cannot fill, or ``None``.

        For the trainer's eyes: the seed decides it.
        """
        return None

    def prefix(self, steps: int) -> Self | None:
        """A shorter scheme that begins as this one does, or ``None`` if none is known.

        Its first ``steps`` batches have the joint law of this one's. It may have more steps than
        that, where it consists of whole epochs: what is released of the first ``steps`` is then a
        part of what it releases.

        Args:
            steps: in 1..n.
        """
        return None

    @abstractmethod
    def stream(self, seed: int) -> BatchStream:
        """A stream of batches drawn from this law; ``seed`` is any non-negative integer."""


class ExchangeableScheme(Scheme, ABC):
    """A scheme under which all examples follow the same law."""

    @abstractmethod
    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent draws of one example's participation vector, shape (size, steps)."""
