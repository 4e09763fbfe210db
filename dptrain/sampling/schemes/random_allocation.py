"""Random allocation: every example picks so many steps of each epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import ExchangeableScheme, Indices, SampledRun, Scheme
from dptrain.sampling.schemes.drawing import move_last, successes
from dptrain.sampling.stream import SeededStream, index_dtype


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocation(ExchangeableScheme):
    """Each example takes part in k of the t steps of an epoch, a uniformly random k-subset.

    Examples and epochs are independent of each other (Feldman & Shenfeld 2025, arXiv 2502.08202).
    With k = 1 and a single epoch this is balls-in-bins; over several epochs it is not, as the step
    is picked anew.

    >>> RandomAllocation(steps_per_epoch=10, participations=2, epochs=3, dataset_size=100).rate
    0.2

    Args:
        steps_per_epoch: t ≥ 1.
        participations: k in 1..t, the same for every example and epoch.
        epochs: E ≥ 1; n = t·E.
        dataset_size: N ≥ 1.

    Raises:
        ValueError: if a field is of another type or out of range, or k > t.
    """

    steps_per_epoch: int
    participations: int
    epochs: int
    dataset_size: int

    def __post_init__(self) -> None:
        fields.settle(
            self, integers=("steps_per_epoch", "participations", "epochs", "dataset_size")
        )
        fields.check_steps(self, "steps_per_epoch", "epochs")
        if self.participations > self.steps_per_epoch:
            raise ValueError(
                f"RandomAllocation: participations={self.participations} do not fit into "
                f"steps_per_epoch={self.steps_per_epoch}; lower participations"
            )

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        participations: int = 1,
    ) -> Self:
        """The scheme with t = round(N·k / batch size), so B̄ = N·k/t is near ``batch_size``.

        Its length is stated in epochs or in steps, which are a multiple of t.

        Raises:
            ValueError: if the batch size is not in (0, N], or the steps are no whole epochs.
        """
        k = checks.integer("participations", participations, owner="RandomAllocation")
        size, n_examples = fields.batch_of_dataset("RandomAllocation", batch_size, dataset_size)
        epoch = round(n_examples * k / size)
        return cls(
            steps_per_epoch=epoch,
            participations=k,
            epochs=fields.whole_epochs("RandomAllocation", epoch, epochs=epochs, steps=steps),
            dataset_size=n_examples,
        )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """One pick an epoch, and two."""
        bins = round(run.epoch_length)
        one = cls(
            steps_per_epoch=bins,
            participations=1,
            epochs=run.steps // bins,
            dataset_size=run.dataset_size,
        )
        return {"": one, "participations > 1": dataclasses.replace(one, participations=2)}

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """Proposals for independent noise: one pick an epoch, and as many picks of all n steps."""
        picks = round(run.steps / run.epoch_length)
        if run.separation != 1:
            return []
        whole = picks > 1 and round(picks * run.epoch_length) == run.steps
        return [{}, *([{"participations": picks}] if whole else [])]

    @property
    def steps(self) -> int:
        """n = t·E."""
        return self.steps_per_epoch * self.epochs

    @property
    def rate(self) -> float:
        """p0 = k/t."""
        return self.participations / self.steps_per_epoch

    @property
    def min_sep(self) -> int:
        """1: two picks may be neighbors; n if there is a single pick in all."""
        return self.steps if self.max_participations == 1 else 1

    @property
    def max_participations(self) -> int:
        """k·E, of every example."""
        return self.participations * self.epochs

    def prefix(self, steps: int) -> Self:
        """The scheme of as many epochs as have so many steps, each drawn by itself."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        return dataclasses.replace(self, epochs=-(-steps // self.steps_per_epoch))

    def stream(self, seed: int) -> RandomAllocationStream:
        """Batches in O(B̄ + k) work a step; 4 bytes an example (8 from 2^31 examples on)."""
        return RandomAllocationStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        first = np.arange(self.steps_per_epoch) < self.participations
        epochs = np.tile(first, (size * self.epochs, 1))
        return rng.permuted(epochs, axis=1, out=epochs).reshape(size, self.steps)


class RandomAllocationStream(SeededStream):
    """Batches of ``RandomAllocation``.

    At step s of an epoch (from 0) an example with r picks left takes part with probability
    r/(t-s), independently of all else: its steps are then a uniform k-subset
    (docs/theory/sampling.md#thm-allocation-draws; ``test_runs_against_enumeration``).

    All examples with the same r share their chance. ``_entries`` lists those with r = k picks left
    first, then r = k-1, and so on down to 0; ``_ends[r]`` is where the r's end (``_ends[k + 1]``
    is 0). An example that takes part moves to the end of its part, and the border moves over it.
    """

    _kept = ("entries", "ends")

    def __init__(self, scheme: RandomAllocation, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        n_examples = scheme.dataset_size
        self._entries = np.arange(n_examples, dtype=index_dtype(n_examples))
        self._ends = np.zeros(scheme.participations + 2, dtype=np.int64)

    def _draw(self) -> Indices:
        k, t = self._scheme.participations, self._scheme.steps_per_epoch
        done = self.step % t
        if done == 0:
            self._ends[: k + 1] = self._scheme.dataset_size  # all have k picks left again
        drawn = []
        # From the smallest r up, so that an example that moves down is not seen a second time.
        for left in range(max(1, k - done), min(k, t - done) + 1):
            part = self._entries[self._ends[left + 1] : self._ends[left]]
            positions = successes(self._rng, len(part), left / (t - done))
            drawn.append(move_last(part, positions))
            self._ends[left] -= len(positions)
        return np.sort(np.concatenate(drawn)).astype(np.int64)
