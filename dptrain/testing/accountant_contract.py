"""The properties that every accountant owes its users, as test cases."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import numpy as np
import pytest

from dptrain.accounting import Accountant
from dptrain.core import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.testing.requiring import require


class AccountantContract(ABC):
    """Subclass, name it ``Test…``, and say which accountant and mechanism to test.

    The mechanism should have ε between 0.1 and 20 at ``delta``. ``tolerance`` is the relative
    distance allowed between an answer and its inverse; 0 is the safe side of it. Set ``simulated``
    for an accountant that states bounds by simulation: its guarantee, its calibration and its
    profile keep margins of different size, so only their safe sides are compared.
    """

    simulated: bool = False

    delta: float = 1e-5
    tolerance: float = 1e-3
    deepest_delta: float = 1e-12
    _shown: Guarantee | None = None

    @abstractmethod
    def accountant(self) -> Accountant:
        """The accountant under test."""

    @abstractmethod
    def mechanism(self) -> MatrixMechanism:
        """A mechanism that it covers, σ > 0."""

    def refused_mechanism(self) -> MatrixMechanism | None:
        """A mechanism that it does not cover, or ``None`` if it covers all."""
        return None

    @pytest.fixture
    def shown(self) -> Guarantee:
        """The guarantee of the mechanism, computed once a class."""
        cls = type(self)
        if "_shown" not in vars(cls):
            cls._shown = self.accountant().guarantee(self.mechanism(), delta=self.delta)
        assert cls._shown is not None
        return cls._shown

    def test_covers_its_mechanism(self) -> None:
        require(self.accountant().refusal(self.mechanism()) is None)
        require(self.accountant().name)
        require(isinstance(self.accountant().kind, Kind))

    def test_is_about_one_of_the_adjacencies_that_it_knows(self) -> None:
        accountant = self.accountant()
        require(accountant.adjacency in accountant.adjacencies)
        # What its options are has to survive when it is made for another relation.
        require(accountant.under(accountant.adjacency) == accountant)

    def test_guarantee_is_complete(self, shown: Guarantee) -> None:
        mechanism = self.mechanism()
        require(0.0 < shown.epsilon < np.inf)
        require(shown.delta == self.delta)
        require(shown.noise_multiplier == mechanism.noise_multiplier)
        require(shown.scheme == mechanism.scheme.published())
        require(shown.strategy == mechanism.strategy.to_dict())
        require(shown.strategy_hash == mechanism.strategy.coefficient_hash)
        require(shown.mechanism_hash == mechanism.hash)
        require(shown.steps_planned == mechanism.steps)
        require(shown.steps_executed is None)
        require(shown.accountant in self.accountant().name)  # "best of …" may name one of them
        require(shown.kind is not Kind.ESTIMATE)

    def test_guarantee_survives_json(self, shown: Guarantee) -> None:
        require(Guarantee.from_json(shown.to_json()) == shown)

    def test_what_it_stated_it_states_again(self, shown: Guarantee) -> None:
        again = self.accountant().restate(self.mechanism(), shown)
        require(again.epsilon <= shown.epsilon * (1.0 + 1e-9))
        for field in ("delta", "kind", "accountant", "unit", "adjacency", "mechanism_hash"):
            require(getattr(again, field) == getattr(shown, field), field)

    def test_profile_falls_and_stays_in_range(self, shown: Guarantee) -> None:
        grid = np.concatenate(([0.0], shown.epsilon * np.linspace(0.05, 1.5, 12)))
        found = self.accountant().profile(self.mechanism(), grid)
        np.testing.assert_array_equal(found.epsilon, grid)
        for direction in (found.remove, found.add):
            require(direction.shape == grid.shape)
            require((direction >= 0.0).all())
            require((direction <= 1.0).all())
            require((np.diff(direction) <= 1e-9 * direction[:-1]).all())
        np.testing.assert_array_equal(found.delta, np.maximum(found.remove, found.add))
        require(found.kind is self.accountant().kind_of(self.mechanism()))
        require(found.accountant == self.accountant().name)

    def test_epsilon_and_delta_are_inverse(self, shown: Guarantee) -> None:
        # The ε stated at δ must suffice by the profile, and a little less must not.
        if self.simulated:
            top = self.accountant().profile(self.mechanism(), [1.5 * shown.epsilon]).delta[0]
            require(top <= self.delta)
            return
        grid = np.array([shown.epsilon * (1.0 - self.tolerance), shown.epsilon])
        found = self.accountant().profile(self.mechanism(), grid).delta
        require(found[1] <= self.delta * (1.0 + self.tolerance))
        require(found[0] >= self.delta * (1.0 - self.tolerance))

    def test_more_noise_is_more_private(self, shown: Guarantee) -> None:
        quieter = self.mechanism().with_noise(1.3 * self.mechanism().noise_multiplier)
        require(self.accountant().guarantee(quieter, delta=self.delta).epsilon < shown.epsilon)
        grid = shown.epsilon * np.array([0.3, 1.0])
        before = self.accountant().profile(self.mechanism(), grid)
        after = self.accountant().profile(quieter, grid)
        require((after.remove < before.remove).all())
        require((after.add <= before.add).all())

    def test_smaller_delta_costs_epsilon(self, shown: Guarantee) -> None:
        deep = self.accountant().guarantee(self.mechanism(), delta=self.deepest_delta)
        require(shown.epsilon < deep.epsilon < np.inf)

    def test_calibration_meets_its_target_tightly(self, shown: Guarantee) -> None:
        target = 0.8 * shown.epsilon
        found = self.accountant().calibrate(self.mechanism(), epsilon=target, delta=self.delta)
        require(found.delta == self.delta)
        require(found.epsilon <= target)
        require(found.noise_multiplier > self.mechanism().noise_multiplier)
        if self.simulated:
            require(found.kind is Kind.VERIFIED)
            certified = self.mechanism().with_noise(found.noise_multiplier)
            require(self.accountant().restate(certified, found) == found)
            return
        again = self.accountant().guarantee(
            self.mechanism().with_noise(found.noise_multiplier), delta=self.delta
        )
        require(again.epsilon <= target * (1.0 + 1e-12))
        louder = self.mechanism().with_noise(found.noise_multiplier * (1.0 - 5e-4))
        require(self.accountant().guarantee(louder, delta=self.delta).epsilon > target)

    def test_no_noise_is_no_privacy(self) -> None:
        silent = self.mechanism().with_noise(0.0)
        shown = self.accountant().guarantee(silent, delta=self.delta)
        require(shown.epsilon == np.inf)
        require(Guarantee.from_json(shown.to_json()) == shown)
        found = self.accountant().profile(silent, [0.0, 1.0])
        np.testing.assert_array_equal(found.delta, [1.0, 1.0])

    def test_refuses_with_a_reason(self) -> None:
        mechanism = self.refused_mechanism()
        if mechanism is None:
            return
        reason = self.accountant().refusal(mechanism)
        require(reason)
        for attempt in (
            lambda: self.accountant().guarantee(mechanism, delta=self.delta),
            lambda: self.accountant().profile(mechanism, [1.0]),
            lambda: self.accountant().calibrate(mechanism, epsilon=1.0, delta=self.delta),
        ):
            with pytest.raises(ValueError, match="does not cover"):
                attempt()

    @pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, float("nan")])
    def test_refuses_a_delta_out_of_range(self, delta: float) -> None:
        with pytest.raises(ValueError, match="delta"):
            self.accountant().guarantee(self.mechanism(), delta=delta)

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
    def test_refuses_a_target_out_of_range(self, epsilon: float) -> None:
        with pytest.raises(ValueError, match="epsilon"):
            self.accountant().calibrate(self.mechanism(), epsilon=epsilon, delta=self.delta)

    @pytest.mark.parametrize("grid", [[], [-1.0, 0.0], [1.0, 0.5], [float("inf")]])
    def test_refuses_a_bad_grid(self, grid: list[float]) -> None:
        with pytest.raises(ValueError, match="epsilon"):
            self.accountant().profile(self.mechanism(), grid)

    def test_warns_of_a_useless_delta(self) -> None:
        size = self.mechanism().scheme.population
        with pytest.warns(UserWarning, match=r"1/N|1/\(number of users\)"):
            self.accountant().guarantee(self.mechanism(), delta=1.0 / size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.accountant().guarantee(self.mechanism(), delta=0.5 / size)
