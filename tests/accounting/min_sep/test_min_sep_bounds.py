"""b-min-sep without simulation, and importance sampling, against enumeration and known δ."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.accounting.min_sep import curve as curves
from dptrain.accounting.min_sep import law as laws
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.linear_loss import availability, best_linear_loss, linear_loss
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.certificate import METHOD, STEP
from dptrain.core.json_value import digest
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BSR, Identity
from dptrain.testing import AccountantContract
from tests.oracles import enumeration
from tests.oracles.edited_json import edited, leaves, others


def law_of(c, p, b, n, warm) -> MinSepLaw:
    return MinSepLaw(
        coefficients=np.asarray(c, float), probability=p, min_sep=b, steps=n, warm_start=warm
    )


def patterns(law: MinSepLaw) -> tuple[np.ndarray, np.ndarray]:
    """Every participation vector that can occur, with its probability."""
    walk = enumeration.min_sep_warm if law.warm_start else enumeration.min_sep_cold
    found = walk(law.steps, law.probability, law.min_sep)
    return found.patterns, found.probabilities


def strategy_matrix(law: MinSepLaw) -> np.ndarray:
    return enumeration.toeplitz(law.coefficients, law.steps)


LAWS = [
    law_of([1.0, 0.5, 0.3], 0.3, 3, 7, True),
    law_of([1.0, 0.5, 0.3], 0.3, 4, 7, False),
    law_of([1.0, 0.7], 1.0, 3, 7, True),
    law_of([0.8], 0.2, 1, 6, True),
    law_of([1.0, 0.4, 0.2, 0.1], 0.5, 4, 3, True),
]


@pytest.mark.parametrize("law", LAWS)
def test_participation_is_the_chance_of_any_pattern_but_none(law) -> None:
    found, probabilities = patterns(law)
    exact = math.fsum(probabilities[found.any(axis=1)])
    assert exact * (1 - 1e-12) <= law.participation <= min(exact * (1 + 1e-9), 1.0)


def test_who_hardly_ever_takes_part_loses_nothing() -> None:
    # δ(0) is at most the chance of taking part, n p: nothing need be simulated.
    scheme = MinSep(probability=1e-9, min_sep=4, dataset_size=1000, steps=16, warm_start=False)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BSR(bands=4), noise_multiplier=0.01)
    for accountant in (MinSepRenyi(), MinSepImportance(progress=False)):
        assert accountant.guarantee(mechanism, delta=1.7e-8).epsilon == 0.0
    curve = MinSepRenyi().curve(mechanism)
    assert curve.unamplified(0.01, np.array([0.0, 3.0])).max() <= 1.6e-8 * (1 + 1e-9)
    # Below that chance it is no excuse: who does take part is hardly protected.
    assert curve.unamplified(0.01, np.array([3.0]))[0] > 1.5e-8


@pytest.mark.parametrize("law", LAWS)
def test_linear_loss_is_never_below_the_loss(law) -> None:
    """Pointwise, for any other sampling rate: the inequality itself, not its expectation."""
    y = np.random.default_rng(2).standard_normal((law.steps, 500)) * 3.0
    loss = -log_ratio(law, 1.1, y)
    for rate in [law.probability] if law.probability == 1.0 else [0.05, 0.3, 0.9]:
        linear = linear_loss(law, 1.1, rate)
        assert (linear.nu - linear.direction @ y / 1.1 >= loss - 1e-9).all()


@pytest.mark.parametrize("law", LAWS)
def test_availability_by_enumeration(law) -> None:
    x, chance = patterns(law)
    taking = law.probability * availability(law, law.probability)
    np.testing.assert_allclose(taking, chance @ x, rtol=1e-12)


# δ by the Poisson PLD: b = 1 and one band is Poisson sampling.
KNOWN = MatrixMechanism(
    scheme=Poisson(probability=0.1, dataset_size=1000, steps=20),
    strategy=Identity(),
    noise_multiplier=1.2,
)
AS_MIN_SEP = law_of([1.0], 0.1, 1, 20, True)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 1.5])
def test_terms_average_to_a_known_delta_and_stay_below_their_ceiling(epsilon) -> None:
    profile = PoissonPLD().profile(KNOWN, [epsilon])
    tilted = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2)
    rng = np.random.default_rng(7)
    for terms, known in (
        (tilted.remove(epsilon), profile.remove[0]),
        (tilted.add(epsilon), profile.add[0]),
    ):
        drawn = np.concatenate([terms.draw(rng, 4096) for _ in range(10)])
        assert drawn.min() >= 0.0
        if terms.bounded:
            assert drawn.max() <= terms.ceiling * (1 + 1e-9)
        assert terms.ceiling >= known
        error = drawn.std() / math.sqrt(drawn.size)
        assert abs(drawn.mean() - known) <= 6 * error + 1e-5 * known  # 6 sigma and the PLD's grid


def test_deep_delta_is_seen_by_a_few_samples() -> None:
    """δ = 3e-8: plain terms would all be 0; the weighted mean is right within 6 sigma and 10 %."""
    epsilon = 6.0
    known = PoissonPLD().profile(KNOWN, [epsilon]).remove[0]
    assert known < 1e-6
    terms = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2).remove(epsilon)
    rng = np.random.default_rng(8)
    drawn = np.concatenate([terms.draw(rng, 4096) for _ in range(20)])
    error = drawn.std() / math.sqrt(drawn.size)
    assert error < 0.02 * known
    assert abs(drawn.mean() - known) < 6 * error + 1e-4 * known


def test_deterministic_bounds_are_above_a_known_profile() -> None:
    grid = np.array([0.2, 0.5, 1.0, 2.0, 4.0])
    known = PoissonPLD().profile(KNOWN, grid)
    remove, add = MinSepRenyiCurve(AS_MIN_SEP).delta(1.2, grid)
    assert (remove >= known.remove * (1 - 1e-5)).all()
    assert (add >= known.add * (1 - 1e-5)).all()
    assert (remove <= gaussian.delta(grid, math.sqrt(20) / 1.2)).all()


@pytest.mark.slow
def test_false_claims_are_rare() -> None:
    """A threshold rule at q = .2 on a mechanism that violates it: ≤ q of 100 seeds accept."""
    from dptrain.accounting.simulation.draws import SharedDraws
    from dptrain.accounting.simulation.verdicts import Rule, judge

    epsilon = 1.5
    known = float(PoissonPLD().profile(KNOWN, [epsilon]).remove[0])
    terms = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2).remove(epsilon)
    rule = Rule(known * 0.999, 0.2, 10**6, ample=256)
    accepted = sum(
        judge(terms, rule, draws=SharedDraws(seed, 1), stream=[], progress=lambda _: None)[
            "accepted"
        ]
        for seed in range(100)
    )
    assert accepted <= 100 * 0.2 + 6 * math.sqrt(100 * 0.2 * 0.8)


def mechanism(sigma=2.0):
    scheme = MinSep(probability=0.1, min_sep=4, dataset_size=500, steps=24)
    return MatrixMechanism(scheme=scheme, strategy=BSR(bands=3), noise_multiplier=sigma)


class TestMinSepRenyi(AccountantContract):
    def accountant(self):
        return MinSepRenyi()

    def mechanism(self):
        return mechanism()

    def refused_mechanism(self):
        return MatrixMechanism(
            scheme=self.mechanism().scheme, strategy=BSR(bands=5), noise_multiplier=1.0
        )


class TestMinSepImportance(AccountantContract):
    """Seeds are fixed: what passes once passes always."""

    simulated = True
    delta = 1e-6
    deepest_delta = 1e-9

    def accountant(self):
        return MinSepImportance(seed=11, progress=False)

    def mechanism(self):
        return mechanism()

    def refused_mechanism(self):
        return MatrixMechanism(
            scheme=self.mechanism().scheme, strategy=BSR(bands=5), noise_multiplier=1.0
        )


@pytest.mark.slow
def test_certified_values_lie_between_the_truth_and_the_deterministic_bound() -> None:
    scheme = MinSep(probability=0.1, min_sep=1, dataset_size=1000, steps=20)
    same = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.2)
    accountant = MinSepImportance(seed=3, progress=False)
    truth = PoissonPLD().guarantee(same, delta=1e-6).epsilon
    found = accountant.guarantee(same, delta=1e-6)
    assert truth <= found.epsilon <= MinSepRenyi().guarantee(same, delta=1e-6).epsilon
    assert found.epsilon <= 1.1 * truth
    needed = PoissonPLD().calibrate(same, epsilon=2.0, delta=1e-6).noise_multiplier
    certified = accountant.calibrate(same, epsilon=2.0, delta=1e-6)
    assert needed <= certified.noise_multiplier <= 1.1 * needed
    most = max(row["remove"]["samples"] for row in certified.certificate["grid"])
    assert most * 10 < 1.23e8  # plain terms need 123 million at this δ
    assert accountant.guarantee(same, delta=1e-6) == found


def test_bad_options() -> None:
    for option in ({"max_samples": 0}, {"threads": 0}, {"failure_probability": 1.0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(option))):
            MinSepImportance(**option)
    linear = best_linear_loss(AS_MIN_SEP, 1.2, 1.0)
    assert linear.xi > 0


@pytest.mark.slow
def test_a_certificate_is_made_once_and_checked_when_read(tmp_path) -> None:
    first = MinSepImportance(seed=1, progress=False, cache=tmp_path)
    found = first.calibrate(mechanism(), epsilon=1.0, delta=1e-5)
    again = MinSepImportance(seed=2, progress=False, cache=tmp_path)
    assert again.calibrate(mechanism(), epsilon=1.0, delta=1e-5) == found
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    for change in (
        {"noise_multiplier": kept["noise_multiplier"] / 2},
        {"violated": 0.5},
        {"grid": [], "ceiling": 0.1, "noise_multiplier": 0.1},
        {"grid": [{**kept["grid"][0], "remove": None}, *kept["grid"][1:]]},
        {"grid": [{**row, "remove": {**row["remove"], "mean": 0.1}} for row in kept["grid"]]},
        {"request": {**kept["request"], "epsilon": 0.1}},
    ):
        path.write_text(json.dumps({**kept, **change}))
        with pytest.raises(ValueError, match="corrupt certificate"):
            again.calibrate(mechanism(), epsilon=1.0, delta=1e-5)
    path.write_text("{")
    with pytest.raises(ValueError, match="corrupt certificate"):
        again.calibrate(mechanism(), epsilon=1.0, delta=1e-5)


def _forged(path, value) -> None:
    """A file with a digest that matches, as whoever edits it can write."""
    value = {key: item for key, item in value.items() if key != "digest"}
    path.write_text(json.dumps({**value, "digest": digest(value)}))


@pytest.mark.slow
def test_a_fresh_digest_forges_no_weighted_certificate(tmp_path) -> None:
    accountant = MinSepImportance(seed=1, progress=False, threads=1, cache=tmp_path)
    scheme = MinSep(probability=0.2, min_sep=2, dataset_size=100, steps=6)
    small = MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=1.0)

    def read(**options):
        who = dataclasses.replace(accountant, **options)
        return who.calibrate(small, epsilon=1.0, delta=1e-4)

    found = read()
    assert read(recheck=True) == found
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    last = [float(row["point"]) for row in kept["grid"] if row["accepted"]][-1]
    unsampled = {"ceiling": 1e-9, "samples": 0, "mean": None, "threshold": 1e-5, "accepted": True}
    shown = {**unsampled, "point": 1000}
    row = {"point": 1000, "accepted": True, "remove": unsampled, "add": shown}
    deep = [{**row, "point": depth} for depth in (998, 1000)]
    for change in (
        {"step": 1.1, "noise_multiplier": kept["ceiling"] / 1.1**last},
        {"grid": [], "ceiling": 0.009, "noise_multiplier": 0.009},
        {"grid": [{**row, "point": 1000}], "noise_multiplier": kept["ceiling"] / STEP**1000.0},
        {"grid": deep, "noise_multiplier": kept["ceiling"] / STEP**1000.0},
    ):
        _forged(path, {**kept, **change})
        with pytest.raises(ValueError, match="corrupt certificate"):
            read()
    tried = 0
    for place, leaf in leaves({key: kept[key] for key in kept if key != "digest"}):
        if place[0] == "grid" and place[1] not in (0, len(kept["grid"]) - 1):
            continue  # as the others: each reading computes its bounds anew
        # Only the samples can tell a mean.
        row = kept["grid"][place[1]] if place[0] == "grid" else {"accepted": True}
        if place in (("seed",), ("most",)) or (place[-1] == "mean" and leaf) or not row["accepted"]:
            continue
        for other in others(leaf):
            if place[-1] == "samples" and isinstance(other, int) and abs(other - leaf) == 1:
                continue  # another max_samples, and the same threshold but for its last digits
            if place[0] != "grid" and other == leaf:
                continue  # 1 for true, where nothing but a comparison reads it
            _forged(path, edited(kept, place, other))
            with pytest.raises(ValueError, match="corrupt certificate"):
                read()
            tried += 1
    assert tried > 60
    _forged(path, {**kept, "seed": "2"})
    assert read() != found  # the seed is a record, but not where it is asked for
    with pytest.raises(ValueError, match="its seed gives other verdicts"):
        read(recheck=True)


@pytest.mark.slow
def test_where_sampling_does_not_pay_the_deterministic_bound_stands() -> None:
    """Seven steps at δ = 1e-8: plain terms would take 1.3e8 samples at some probes."""
    scheme = MinSep(probability=0.5, min_sep=2, dataset_size=100, steps=7)
    for sigma in (0.3, 1.0, 3.0):
        few = MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=sigma)
        proven = MinSepRenyi().guarantee(few, delta=1e-8).epsilon
        found = MinSepImportance(seed=1, progress=False).guarantee(few, delta=1e-8)
        assert 0.0 < found.epsilon <= proven
    none = MinSepImportance(max_samples=10, seed=1, progress=False)
    assert none.guarantee(few, delta=1e-8).epsilon == proven
    needed = MinSepRenyi().calibrate(few, epsilon=1.0, delta=1e-8).noise_multiplier
    found = none.calibrate(few, epsilon=1.0, delta=1e-8)
    # The top of the grid shows less than δ, to a relative 1e-3 in σ.
    assert found.noise_multiplier == pytest.approx(needed, rel=5e-3)


@pytest.mark.slow
def test_who_asks_for_the_deterministic_bound_draws_no_sample(monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("a sample was drawn")

    monkeypatch.setattr(np.random, "SeedSequence", refuse)
    monkeypatch.setattr(np.random, "default_rng", refuse)
    found = MinSepRenyi().calibrate(mechanism(), epsilon=1.0, delta=1e-5)
    assert found.certificate is None
    assert MinSepRenyi().guarantee(mechanism(found.noise_multiplier), delta=1e-5).epsilon <= 1.0
    with pytest.raises(AssertionError, match="a sample was drawn"):
        MinSepImportance(progress=False).guarantee(mechanism(), delta=1e-5)


@pytest.mark.slow
def test_dear_orders_are_asked_where_samples_did_not_better_them(monkeypatch) -> None:
    """Order 2 alone is quick here and nothing may be drawn: all orders count in the end."""
    scheme = MinSep(probability=0.02, min_sep=4, dataset_size=1000, steps=40)
    few = MatrixMechanism(scheme=scheme, strategy=BSR(bands=3), noise_multiplier=1.0)
    monkeypatch.setattr(laws, "_QUICK_WORK", 40 * 4)
    monkeypatch.setattr(curves, "_NO_WORK", 0)  # large orders by two copies only
    asked = MinSepImportance(max_samples=1, seed=1, progress=False)
    found = asked.calibrate(few, epsilon=6.0, delta=1e-6)
    needed = MinSepRenyi().calibrate(few, epsilon=6.0, delta=1e-6).noise_multiplier
    bounds = asked.law(few)
    quick = bounds.least_sigma(6.0, 1e-6, progress=False)
    assert quick is not None
    assert needed < 0.9 * quick
    # The top shows less than δ, to a relative 1e-3 in σ.
    assert found.noise_multiplier == pytest.approx(needed, rel=5e-3)


@pytest.mark.slow
def test_a_certificate_of_a_former_name_is_refused(tmp_path) -> None:
    """Names of accountants were sentences once: their certificates still answer."""
    scheme = MinSep(probability=0.2, min_sep=2, dataset_size=100, steps=6)
    small = MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=1.0)
    new, old = tmp_path / "new", tmp_path / "old"
    accountant = MinSepImportance(seed=1, progress=False, threads=1)
    target = {"epsilon": 1.0, "delta": 1e-4}
    found = dataclasses.replace(accountant, cache=new).calibrate(small, **target)
    kept = found.certificate
    assert kept is not None
    method = {"name": "b-min-sep importance sampling", "version": METHOD}
    kept = {**kept, "method": method, "request": {**kept["request"], "method": method}}
    file = certificate_cache.store(old, kept["request"], kept)
    with pytest.raises(ValueError, match="method that dptrain no longer has") as error:
        dataclasses.replace(accountant, seed=2, cache=old).calibrate(small, **target)
    assert str(file) in str(error.value)
