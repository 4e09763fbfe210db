"""The properties that every sampling scheme owes its users, as test cases."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dptrain.core import Array, Unit
from dptrain.sampling import BatchStream, ExchangeableScheme, Scheme
from dptrain.testing.requiring import require

# A comparison of frequencies fails by chance with probability at most 2·exp(-21) < 2e-9, that of
# 6 standard deviations, by Bernstein's inequality (no normal approximation). A scheme with n steps
# makes about 3n² comparisons: below 1e-5 in all for n ≤ 25, and the seeds are fixed.
LOG_ERROR = 21.0

Bools = npt.NDArray[np.bool_]


def bernstein_tolerance(variance: npt.ArrayLike) -> Array:
    """t with P(|S - E S| > t) ≤ 2·exp(-LOG_ERROR) for a sum S of terms within 1 of their mean."""
    third = LOG_ERROR / 3
    return third + np.sqrt(third**2 + 2 * LOG_ERROR * np.asarray(variance, dtype=np.float64))


def participation(stream: BatchStream, dataset_size: int) -> Bools:
    """Every example's participation vector, shape (dataset_size, steps)."""
    taken = np.zeros((dataset_size, stream.steps), dtype=bool)
    for step, batch in enumerate(stream):
        taken[batch, step] = True
    return taken


def joint_counts(taken: Bools) -> Array:
    """Number of examples that take part in both of every two steps, shape (steps, steps)."""
    floats = taken.astype(np.float64)
    return floats.T @ floats


class SchemeContract(ABC):
    """Subclass, name it ``Test…`` and say what ``scheme`` to test: some 20 checks follow."""

    examples = 20_000  # size of the dataset of the checks that want a large one
    seed = 20_261_120

    @abstractmethod
    def scheme(self) -> Scheme:
        """The scheme under test: at most 25 steps, and a batch or two of about ten examples."""

    def large_scheme(self) -> Scheme:
        """The same law over ``examples`` examples."""
        return dataclasses.replace(self.scheme(), dataset_size=self.examples)  # type: ignore[type-var]

    def test_json_round_trip(self) -> None:
        scheme = self.scheme()
        again = Scheme.from_dict(json.loads(json.dumps(scheme.to_dict(), allow_nan=False)))
        require(type(again) is type(scheme))
        require(again == scheme)
        require(hash(again) == hash(scheme))
        require(again.to_dict() == scheme.to_dict())

    def test_differs_from_another(self) -> None:
        require(self.scheme() != self.large_scheme())
        require(self.scheme().to_dict() != self.large_scheme().to_dict())

    def test_unknown_field_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no field"):
            Scheme.from_dict({**self.scheme().to_dict(), "typo": 1})

    def test_a_prefix_begins_with_the_same_batches(self) -> None:
        scheme = self.scheme()
        for steps in range(1, scheme.steps + 1):
            prefix = scheme.prefix(steps)
            if prefix is None:
                continue
            require(steps <= prefix.steps <= scheme.steps)
            require(prefix.expected_batch_size == scheme.expected_batch_size)
            for seed in range(self.seed, self.seed + 5):
                # Of one seed, so that the laws are equal too.
                pairs = zip(prefix.stream(seed), scheme.stream(seed), strict=False)
                for batch, same in itertools.islice(pairs, steps):
                    np.testing.assert_array_equal(batch, same)

    def test_immutable(self) -> None:
        scheme = self.scheme()
        for field in dataclasses.fields(scheme):  # type: ignore[arg-type]
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(scheme, field.name, getattr(scheme, field.name))

    def test_keyword_only(self) -> None:
        scheme = self.scheme()
        values = [getattr(scheme, field.name) for field in dataclasses.fields(scheme)]  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            type(scheme)(*values)

    def test_public_constants(self) -> None:
        scheme = self.scheme()
        values = (scheme.steps, scheme.min_sep, scheme.max_participations, scheme.max_per_batch)
        for value in (*values, scheme.population):
            require(type(value) is int)
            require(value >= 1)
        require(0 < scheme.rate <= 1)
        counted = scheme.dataset_size if scheme.group_size is None else scheme.population
        require(scheme.expected_batch_size == pytest.approx(scheme.rate * counted))
        fit = -(-scheme.steps // scheme.min_sep)  # more cannot be min_sep apart
        require(scheme.max_participations <= fit)
        if scheme.unit == Unit():  # one example
            require(scheme.max_per_batch == 1)
            require(scheme.population == scheme.dataset_size)

    @pytest.mark.parametrize("value", [0, -1, True, "7", math.nan, None])
    def test_bad_number_is_refused(self, value: object) -> None:
        scheme = self.scheme()
        numbers = [key for key, v in scheme.to_dict().items() if type(v) in (int, float)]
        require(numbers)
        if value is None:  # an optional number may be left out
            fields = dataclasses.fields(scheme)  # type: ignore[arg-type]
            optional = {field.name for field in fields if field.default is None}
            numbers = [name for name in numbers if name not in optional]
        for name in numbers:
            with pytest.raises((TypeError, ValueError), match=name):
                dataclasses.replace(scheme, **{name: value})  # type: ignore[type-var]

    def test_batches_are_ascending_rows(self) -> None:
        scheme = self.scheme()
        drawn = 0
        for batch in scheme.stream(self.seed):
            require(batch.dtype == np.int64)
            require(batch.ndim == 1)
            require((np.diff(batch) > 0).all())  # ascending and no example twice
            require(((batch >= 0) & (batch < scheme.dataset_size)).all())
            require(len(batch) <= (scheme.physical_batch_size or scheme.dataset_size))
            rows, sizes = scheme.grouped(batch)
            np.testing.assert_array_equal(np.sort(rows), batch)
            require((sizes is None) is (scheme.group_size is None))
            if sizes is not None and scheme.group_size is not None:
                require(sizes.sum() == len(batch))
                require(((sizes >= 1) & (sizes <= scheme.group_size)).all())
            drawn += len(batch)
        require(drawn > 0)

    def test_ends_after_the_planned_steps(self) -> None:
        scheme = self.scheme()
        stream = scheme.stream(self.seed)
        require(stream.steps == scheme.steps)
        for step in range(scheme.steps):
            require(stream.step == step)
            next(stream)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)
        require(stream.step == scheme.steps)

    def test_same_seed_same_batches(self) -> None:
        scheme = self.scheme()
        for seed in (0, self.seed, 2**128 - 1):
            first = participation(scheme.stream(seed), scheme.dataset_size)
            again = participation(scheme.stream(seed), scheme.dataset_size)
            np.testing.assert_array_equal(first, again)

    def test_other_seed_other_batches(self) -> None:
        scheme = self.large_scheme()
        seeds = (0, 1, 2**64, 2**127)  # 64 bits are not enough: 2**64 must not act like 0
        drawn = [participation(scheme.stream(seed), scheme.dataset_size) for seed in seeds]
        for one, other in itertools.combinations(drawn, 2):
            require((one != other).any())

    @pytest.mark.parametrize("seed", [-1, 1.5, True, None])
    def test_bad_seed_is_refused(self, seed: object) -> None:
        with pytest.raises((TypeError, ValueError), match="seed"):
            self.scheme().stream(seed)  # type: ignore[arg-type]

    def test_restores_bit_for_bit(self) -> None:
        scheme = self.scheme()
        whole = list(scheme.stream(self.seed))
        for position in sorted({0, 1, scheme.steps // 2, scheme.steps - 1, scheme.steps}):
            stream = scheme.stream(self.seed)
            for _ in range(position):
                next(stream)
            file = io.BytesIO()
            torch.save(stream.state_dict(), file)
            file.seek(0)
            restored = scheme.stream(self.seed + 1)  # everything has to come from the state
            next(restored)
            restored.load_state_dict(torch.load(file, weights_only=True))
            require(restored.step == position)
            rest = list(restored)
            require(len(rest) == scheme.steps - position)
            for batch, expected in zip(rest, whole[position:], strict=True):
                np.testing.assert_array_equal(batch, expected)

    def test_state_is_a_snapshot(self) -> None:
        """Neither the stream that gave a state nor the one that took it writes into it."""
        scheme = self.scheme()
        stream = scheme.stream(self.seed)
        next(stream)
        state = stream.state_dict()
        untouched = copy.deepcopy(state)
        taker = scheme.stream(self.seed)
        taker.load_state_dict(state)
        require(len(list(stream)) == len(list(taker)) == scheme.steps - 1)
        require(state.keys() == untouched.keys())
        for key, value in untouched.items():
            if isinstance(value, torch.Tensor):
                require(torch.equal(state[key], value))
            else:
                require(state[key] == value)

    def test_copy_runs_ahead_alone(self) -> None:
        scheme = self.scheme()
        stream = scheme.stream(self.seed)
        next(stream)
        ahead = list(copy.deepcopy(stream))
        require(stream.step == 1)
        for batch, expected in zip(stream, ahead, strict=True):
            np.testing.assert_array_equal(batch, expected)

    def test_state_of_another_scheme_is_refused(self) -> None:
        state = self.large_scheme().stream(self.seed).state_dict()
        with pytest.raises(ValueError, match="another scheme"):
            self.scheme().stream(self.seed).load_state_dict(state)
        with pytest.raises(ValueError, match="not a state"):
            self.scheme().stream(self.seed).load_state_dict({"step": 0})


class ExchangeableSchemeContract(SchemeContract):
    """The same for an ``ExchangeableScheme``, with its law checked by frequencies.

    The frequency checks of a stream hold at their stated error probability if its examples are
    independent of each other, or negatively associated (truncation, fixed batch sizes): Bernstein's
    inequality holds for both.
    """

    @abstractmethod
    def scheme(self) -> ExchangeableScheme:
        """As in ``SchemeContract``."""

    def large_scheme(self) -> ExchangeableScheme:
        """As in ``SchemeContract``."""
        return dataclasses.replace(self.scheme(), dataset_size=self.examples)  # type: ignore[type-var]

    def stationary_scheme(self) -> ExchangeableScheme:
        """A large scheme whose *last* step is in the stationary regime (see a cold start)."""
        return self.large_scheme()

    def joint_probabilities(self) -> Array | None:
        """Closed form of P(in step t and in step u), shape (steps, steps); ``None`` if unknown."""
        return None

    def test_gaps_and_participations(self) -> None:
        scheme = self.large_scheme()
        taken = participation(scheme.stream(self.seed), scheme.dataset_size)
        sampled = scheme.sample_participation(np.random.default_rng(self.seed), self.examples)
        for vectors in (taken, sampled):
            require(vectors.sum(axis=1).max() <= scheme.max_participations)
            for gap in range(1, min(scheme.min_sep, scheme.steps)):
                require(not (vectors[:, gap:] & vectors[:, :-gap]).any())
            if scheme.period is not None:
                require(scheme.steps % scheme.period == 0)
                for gap in range(1, scheme.steps):
                    if gap % scheme.period:
                        require(not (vectors[:, gap:] & vectors[:, :-gap]).any())

    def test_frequencies_match_the_sampled_law(self) -> None:
        """Inclusion per step and joint inclusion per pair of steps: stream against sampler."""
        scheme = self.large_scheme()
        size = scheme.dataset_size
        stream = joint_counts(participation(scheme.stream(self.seed), size))
        vectors = scheme.sample_participation(np.random.default_rng(self.seed + 1), size)
        require(vectors.shape == (size, scheme.steps))
        require(vectors.dtype == np.bool_)
        sampled = joint_counts(vectors)
        # Given the total K of both counts, each is hypergeometric: mean K/2, variance below
        # K/4·(1 - K/2N), and Bernstein's inequality holds for draws without replacement.
        total = stream + sampled
        tolerance = bernstein_tolerance(total / 4 * (1 - total / (2 * size)))
        require((np.abs(stream - total / 2) <= tolerance).all())

    def test_frequencies_match_the_closed_form(self) -> None:
        expected = self.joint_probabilities()
        if expected is None:
            pytest.skip("no closed form given")
        scheme = self.large_scheme()
        size = scheme.dataset_size
        tolerance = bernstein_tolerance(size * expected * (1 - expected))
        vectors = scheme.sample_participation(np.random.default_rng(self.seed + 2), size)
        for taken in (participation(scheme.stream(self.seed + 3), size), vectors):
            require((np.abs(joint_counts(taken) - size * expected) <= tolerance).all())

    def test_expected_batch_size(self) -> None:
        scheme = self.stationary_scheme()
        p0 = scheme.rate
        *_, last = scheme.stream(self.seed)
        tolerance = bernstein_tolerance(scheme.dataset_size * p0 * (1 - p0))
        require(abs(len(last) - scheme.expected_batch_size) <= tolerance)
