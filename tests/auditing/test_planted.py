"""Canaries among real data: what they release, what they leave alone, and what is found by them."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dptrain import PrivacyEngine, ScaledAdam, account, profile
from dptrain.auditing import (
    Marked,
    StatedCurve,
    audit_canaries,
    audit_final_model,
    plant_canaries,
    run_canaries,
)
from dptrain.auditing.planted import _LEVER, PlantedModule
from dptrain.clipping.base import Automatic
from dptrain.engine import Gradients, Loading
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BandMF, Identity
from tests.helpers.power import power_of_counting

REAL, WIDTH, CLASSES = 40, 6, 3
QUIET = 1e-6  # σ below the roundings of float32
OPTIMIZER = "dptrain.engine.optimizer.PrivateOptimizer"


def people(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(REAL, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (REAL,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def strangers(count: int) -> list:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(9))
    return [(row, torch.tensor(j % CLASSES)) for j, row in enumerate(x)]


def coin_flips(steps: int, size: int, probability: float = 0.5, sigma: float = QUIET):
    scheme = Poisson(probability=probability, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def train(planted, mechanism, *, rate: float = 0.1, seed: int = 5, heard: bool = True, **options):
    """An ordinary loop; returns the run and who was drawn, shape (examples, steps)."""
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.SGD(planted.module.parameters(), lr=rate),
        mechanism=mechanism,
        seed=seed,
        **{"data": planted.data, "max_grad_norm": 2.0} | options,
    )
    if heard:
        planted.listen(private)
    drawn = np.zeros((len(planted.data), mechanism.steps))
    module, optimizer, loader = private
    for x, y in loader:
        drawn[loader.current.indices, loader.current.step] = 1
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
    return private, drawn


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
@pytest.mark.parametrize("loading", [Loading(), Loading(max_physical_batch_size=16)])
def test_what_is_released_is_who_took_part(mode, loading):
    planted = plant_canaries(
        network(), people(), canaries=50, inputs=strangers(10), spare=20, seed=3
    )
    mechanism = coin_flips(5, len(planted.data))
    private, drawn = train(planted, mechanism, gradients=Gradients(mode=mode), loading=loading)
    found = planted.heard()
    expected = drawn[REAL : REAL + 50] * found.included[:, None]
    assert 40 < expected.sum() < 90
    assert np.abs(found.released - expected).max() < 2e-5
    assert np.abs(found.spare).max() < 2e-5
    assert (found.others, private.nonfinite_examples) == (REAL + 10, 0)


def test_a_data_loader_of_the_planted_data_will_do():
    planted = plant_canaries(network(), people(), canaries=20, spare=5)
    mechanism = coin_flips(2, len(planted.data))
    _, drawn = train(planted, mechanism, data=DataLoader(planted.data, batch_size=7))
    found = planted.heard()
    assert np.abs(found.released - drawn[REAL:] * found.included[:, None]).max() < 2e-5


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_several_views_of_an_example_are_one_canary(mode):
    planted = plant_canaries(network(), people(), canaries=30, spare=5)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.AdamW(planted.module.parameters()),
        data=planted.data,
        mechanism=coin_flips(3, len(planted.data)),
        max_grad_norm=1.0,
        gradients=Gradients(mode=mode, views=2),
        seed=1,
    )
    planted.listen(private)
    drawn = np.zeros((len(planted.data), 3))
    for batch, y in private.loader:
        drawn[private.loader.current.indices, private.loader.current.step] = 1
        x, number = (part.repeat_interleave(2, 0) for part in batch)
        private.optimizer.zero_grad()
        output = private.module(Marked(x + torch.randn_like(x), number))
        cross_entropy(output, y.repeat_interleave(2)).backward()
        private.optimizer.step()
    found = planted.heard()
    assert np.abs(found.released - drawn[REAL:] * found.included[:, None]).max() < 2e-5


def test_a_loss_that_is_a_sum():
    planted = plant_canaries(network(), people(), canaries=30, spare=5)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.SGD(planted.module.parameters(), lr=0.01),
        data=planted.data,
        mechanism=coin_flips(3, len(planted.data)),
        max_grad_norm=1.0,
        gradients=Gradients(loss="sum"),
        seed=1,
    )
    planted.listen(private)
    drawn = np.zeros((len(planted.data), 3))
    for x, y in private.loader:
        drawn[private.loader.current.indices, private.loader.current.step] = 1
        private.optimizer.zero_grad()
        cross_entropy(private.module(x), y, reduction="sum").backward()
        private.optimizer.step()
    found = planted.heard()
    assert np.abs(found.released - drawn[REAL:] * found.included[:, None]).max() < 2e-5


def test_in_half_precision_with_a_scaled_loss():
    planted = plant_canaries(network(), people(), canaries=30, spare=5)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.SGD(planted.module.parameters(), lr=0.1),
        data=planted.data,
        mechanism=coin_flips(3, len(planted.data)),
        max_grad_norm=1.0,
        gradients=Gradients(clipping=Automatic(gamma=1e-4)),
        seed=1,
    )
    planted.listen(private)
    drawn = np.zeros((len(planted.data), 3))
    scaler = torch.amp.GradScaler("cpu")
    for x, y in private.loader:
        drawn[private.loader.current.indices, private.loader.current.step] = 1
        private.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = private.module(x)
        scaler.scale(cross_entropy(output.float(), y)).backward()
        scaler.step(private.optimizer)
        scaler.update()
    found = planted.heard()
    assert np.abs(found.released - drawn[REAL:] * found.included[:, None]).max() < 2e-5


class ByName(nn.Module):
    """As a model of transformers: keywords in, a mapping out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(features)}


def test_items_may_be_mappings():
    data = [{"features": x, "labels": int(y)} for x, y in people()]
    planted = plant_canaries(ByName(), data, canaries=30, spare=5)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.SGD(planted.module.parameters(), lr=0.1),
        data=planted.data,
        mechanism=coin_flips(3, len(planted.data)),
        max_grad_norm=1.0,
        seed=1,
    )
    planted.listen(private)
    drawn = np.zeros((len(planted.data), 3))
    for batch in private.loader:
        drawn[private.loader.current.indices, private.loader.current.step] = 1
        labels = batch.pop("labels")
        private.optimizer.zero_grad()
        cross_entropy(private.module(**batch)["logits"], labels).backward()
        private.optimizer.step()
    found = planted.heard()
    assert np.abs(found.released - drawn[REAL:] * found.included[:, None]).max() < 2e-5


def test_gradients_of_the_module_are_those_of_the_others_alone():
    """By autograd, in float64: canaries of either kind that are out, and gradient canaries."""
    inner = network().double()
    module = PlantedModule(inner, rows=4).double()
    x = torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    number = torch.tensor([0, 3, -1, 0, 1, 0, -1])
    cross_entropy(module(Marked(x, number)), y, reduction="sum").backward()
    found = [p.grad for p in inner.parameters()]
    real = number == 0
    alone = cross_entropy(inner(x[real]), y[real], reduction="sum")
    expected = torch.autograd.grad(alone, list(inner.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    # By three equal logits the loss has the gradient (1/3, 1/3, 1/3) - e_y.
    own = _LEVER * np.sqrt(2 / 3)
    assert np.allclose(module.coordinates.weight.grad.flatten(), [0, own, 0, own, 0], rtol=1e-12)
    assert torch.equal(module(Marked(x, number))[number < 1], inner(x)[number < 1])


def test_the_real_examples_are_clipped_as_if_alone():
    """One step, against the sum of clipped gradients that autograd forms one by one."""
    inputs = strangers(12)
    planted = plant_canaries(network(), people(), canaries=30, inputs=inputs, spare=5, seed=4)
    inner = planted.module.module
    before = [p.detach().clone() for p in inner.parameters()]
    mechanism = coin_flips(1, len(planted.data))
    private, drawn = train(planted, mechanism, rate=1.0, max_grad_norm=1.5)
    private.detach()
    after = [p.detach().clone() for p in inner.parameters()]
    with torch.no_grad():
        for p, start in zip(inner.parameters(), before, strict=True):
            p.copy_(start)
    taken = [people()[i] for i in np.flatnonzero(drawn[:REAL, 0])]
    inside = planted.inputs_included & (drawn[REAL + 30 :, 0] > 0)
    taken += [inputs[i] for i in np.flatnonzero(inside)]
    assert 10 < len(taken) < REAL
    assert 0 < inside.sum() < planted.inputs_included.sum() < 12
    total, clipped = [torch.zeros_like(p) for p in before], 0
    for x, y in taken:
        loss = cross_entropy(inner(x[None]), y[None])
        grads = torch.autograd.grad(loss, list(inner.parameters()))
        length = torch.cat([g.flatten() for g in grads]).norm()
        clipped += int(length > 1.5)
        for s, g in zip(total, grads, strict=True):
            s += g * min(1.0, 1.5 / float(length))
    assert 0 < clipped < len(taken)
    for p, q, s in zip(before, after, total, strict=True):
        assert torch.allclose(p - q, s / mechanism.scheme.expected_batch_size, atol=1e-6)


def test_coins_of_gradient_canaries_move_nothing_else():
    """Bit for bit: the same run, with all of them in, and with all of them out."""
    ends = []
    for inside in (True, False):
        planted = plant_canaries(network(), people(), canaries=30, spare=5)
        rows = planted._places[:30].tolist()
        planted.data.rows[:] = rows if inside else [-1] * 30
        train(planted, coin_flips(6, len(planted.data), sigma=0.5), heard=False)
        ends.append([p.detach().clone() for p in planted.module.module.parameters()])
    start = list(network().parameters())
    assert not torch.equal(ends[0][0], start[0])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


EVERYBODY = 800  # canaries that take part in every step: the game of a Gaussian of μ = 1


def judged(planted, mechanism, confidence: float):
    epsilon = account(mechanism, delta=1e-6).epsilon
    stated = profile(mechanism, np.linspace(0.0, 1.5 * epsilon, 13))
    curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    return audit_canaries(
        mechanism,
        planted.heard(),
        epsilon=epsilon,
        delta=1e-6,
        curve=curve,
        confidence=confidence,
    )


def audited(seed: int, confidence: float = 1 - 1e-10):
    planted = plant_canaries(network(), people(), canaries=EVERYBODY, spare=1000, seed=seed)
    mechanism = coin_flips(4, len(planted.data), probability=1.0, sigma=2.0)
    train(planted, mechanism, seed=seed)
    return judged(planted, mechanism, confidence)


@pytest.mark.slow
def test_the_engine_passes():
    """Seeds that are right fail with probability 1e-10 each."""
    for seed in range(4):
        audit = audited(seed)
        assert audit.passed, audit.violations
    assert (audit.canaries, audit.others, audit.spare) == (EVERYBODY, REAL, 1000)
    assert f"among {REAL} other examples" in str(audit)
    value = json.loads(audit.to_json())
    assert (value["others"], value["passed"]) == (REAL, True)
    lenient = audited(0, confidence=0.99)
    assert 0 < lenient.one_run.epsilon_lower < lenient.epsilon


def test_canaries_alone_are_said_to_be_alone():
    mechanism = coin_flips(2, 50, probability=1.0, sigma=2.0)
    found = run_canaries(mechanism, spare=50, progress=False)
    audit = audit_canaries(mechanism, found, epsilon=3.0, delta=1e-6)
    assert audit.others == 0
    assert "no gradients but theirs" in str(audit)


def _attribute(name: str):
    from dptrain.engine.optimizer import PrivateOptimizer

    return getattr(PrivateOptimizer, name)


def test_half_of_the_noise_is_found(monkeypatch):
    """The sum of 4,000 squares is then a quarter of what it should be: 33 standard deviations.

    Without a look at the noise: a Gaussian of μ = 2 where one of μ = 1 is stated.
    """
    power = power_of_counting(
        hit_rate=norm.cdf(1.0),
        false_rate=norm.sf(1.0),
        runs=150,  # half of those that are in, or fewer with probability below 1e-12
        epsilon=0.0,
        delta=norm.cdf(0.5) - norm.cdf(-0.5),
        alpha=0.1 / 4,
    )
    assert power > 0.99
    whole = _attribute("add_noise")

    def halved(optimizer):
        planned, optimizer.noise_multiplier = optimizer.noise_multiplier, 1.0
        try:
            whole(optimizer)
        finally:
            optimizer.noise_multiplier = planned

    monkeypatch.setattr(f"{OPTIMIZER}.add_noise", halved)
    audit = audited(1, confidence=0.9)
    assert not audit.passed
    assert min(each.p_value for each in audit.noise) < 1e-100
    assert audit.counted.violated


def test_gradients_that_are_not_clipped_are_found(monkeypatch):
    """Every canary that is in then stands out, and none that is out does."""
    right = _attribute("bounds")
    monkeypatch.setattr(
        f"{OPTIMIZER}.bounds", lambda optimizer: (1e20, right(optimizer)[1]), raising=True
    )
    audit = audited(1)
    assert not audit.passed
    assert audit.counted.violated


@pytest.mark.slow
def test_the_matched_filter_has_the_power_of_theory():
    """Of correlated noise in a real run, beside two scores that know C less (Theorem 19.8).

    Participations are known to the reader. Coordinates are independent, so hits are a sum of
    independent coins of known probabilities; six standard deviations.
    """
    m, bands, sigma = 6000, 4, 1.2
    planted = plant_canaries(network(), people(), canaries=m, spare=2, seed=8)
    scheme = MinSep(probability=0.4, min_sep=bands, dataset_size=len(planted.data), steps=12)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=bands), noise_multiplier=sigma)
    _, drawn = train(planted, mechanism, seed=8)
    found = planted.heard()
    c = np.asarray(mechanism.strategy.columns(12, np.arange(12)))
    inverse = np.linalg.inv(c)
    x = drawn[REAL:]
    took = x.sum(axis=1) > 0
    x, y, inside = x[took], found.released[took], found.included[took]
    # Score <a, y> of a release y = x + σ C^-1 z: its law is N(<a, x>, σ² |C^-T a|²).
    scores = {
        "matched": x @ c.T @ c,
        "sum": x,
        "final": np.ones_like(x),
    }
    level = 0.05
    z = norm.isf(level)
    powers = {}
    for name, a in scores.items():
        deviation = sigma * np.linalg.norm(a @ inverse, axis=1)
        mu = (a * x).sum(axis=1) / deviation
        hits = (a * y).sum(axis=1) / deviation > z
        chance = norm.cdf(mu - z)[inside]
        spread = 6 * np.sqrt((chance * (1 - chance)).sum())
        assert abs(hits[inside].sum() - chance.sum()) < spread, name
        outside = int((~inside).sum())
        false = 6 * np.sqrt(outside * level * (1 - level))
        assert abs(hits[~inside].sum() - outside * level) < false, name
        powers[name] = chance.sum(), spread
    best = np.linalg.norm(x @ c.T, axis=1) / sigma
    assert np.isclose(powers["matched"][0], norm.cdf(best - z)[inside].sum())
    for other in ("sum", "final"):  # too far apart to be taken for each other
        gap = powers["matched"][0] - powers[other][0]
        assert gap > powers["matched"][1] + powers[other][1]


def test_losses_of_input_canaries_leave_the_module_alone():
    inputs = strangers(6)
    planted = plant_canaries(network(), people(), canaries=0, inputs=inputs)
    inner = planted.module.module
    inner[1].eval()
    losses = planted.input_losses(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    expected = [cross_entropy(inner(x[None]), y[None]).item() for x, y in inputs]
    assert np.allclose(losses, expected)
    assert [part.training for part in inner] == [True, False, True]


def memorized(sigma: float):
    """A run that has learnt by heart who was in: every canary has a feature to itself."""
    count = 200
    x = torch.eye(count + 1)
    inputs = [(x[j], torch.tensor(j % CLASSES)) for j in range(count)]
    data = TensorDataset(x[-1:].repeat(REAL, 1), torch.zeros(REAL, dtype=torch.long))
    torch.manual_seed(0)
    planted = plant_canaries(
        nn.Linear(count + 1, CLASSES, bias=False), data, canaries=0, inputs=inputs
    )

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    before = planted.input_losses(loss)
    mechanism = coin_flips(3, len(planted.data), probability=1.0, sigma=sigma)
    train(planted, mechanism, rate=100.0, heard=False, max_grad_norm=1.0)
    return before - planted.input_losses(loss), planted


def test_a_final_model_that_knows_who_was_in_is_found():
    scores, planted = memorized(QUIET)
    audit = audit_final_model(
        scores, planted.inputs_included, epsilon=1.0, delta=1e-6, others=planted.real
    )
    # Those that are out have scores of about 0; as many are guessed to be in as to be out.
    unequal = abs(int(planted.inputs_included.sum()) - 100)
    assert (audit.one_run.guesses, audit.one_run.correct) == (200, 200 - unequal)
    assert audit.one_run.epsilon_lower > 2
    assert not audit.passed
    assert "VIOLATED" in str(audit)
    value = json.loads(audit.to_json())
    assert (value["canaries"], value["others"], value["passed"]) == (200, REAL, False)


def test_a_final_model_of_much_noise_passes():
    scores, planted = memorized(30.0)
    included = planted.inputs_included
    audit = audit_final_model(scores, included, epsilon=1.0, delta=1e-6, confidence=1 - 1e-10)
    assert audit.passed
    assert "by its loss" in str(audit)


def loss_of(module, optimizer=None, canaries=20, **options):
    planted = plant_canaries(module, people(), canaries=canaries, spare=5)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=(optimizer or torch.optim.SGD)(planted.module.parameters(), lr=0.1),
        mechanism=options.pop("mechanism", coin_flips(2, REAL + canaries, sigma=1.0)),
        **{"data": planted.data, "max_grad_norm": 1.0} | options,
    )
    return planted, private


class WithLoss(nn.Module):
    """The loss is made within."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_what_cannot_be_planted_is_refused():
    with pytest.raises(TypeError, match="must be the map-style data set"):
        plant_canaries(network(), DataLoader(people()), canaries=3)
    with pytest.raises(ValueError, match="there is no canary to plant"):
        plant_canaries(network(), people(), canaries=0)
    with pytest.raises(ValueError, match=r"data is empty: use run_canaries\(\)"):
        plant_canaries(network(), [], canaries=3)
    with pytest.raises(TypeError, match="an item is a Tensor"):
        plant_canaries(network(), torch.zeros(3, 4), canaries=3)
    with pytest.raises(TypeError, match="for which there is no blank value: pass template="):
        plant_canaries(network(), [(object(), 1)], canaries=3)
    with pytest.raises(ValueError, match="has canaries already"):
        plant_canaries(PlantedModule(network(), 3), people(), canaries=3)
    with pytest.raises(ValueError, match="already has a key 'canary'"):
        plant_canaries(network(), [{"canary": 1}], canaries=3)


def test_a_scheme_without_the_canaries_is_refused():
    with pytest.raises(ValueError, match=r"make the scheme with dataset_size=60"):
        loss_of(network(), mechanism=coin_flips(2, REAL))


def test_runs_that_cannot_be_heard_are_refused():
    planted, private = loss_of(network())
    with pytest.raises(ValueError, match="recorded 0 of 0 steps"):
        planted.heard()
    other, _ = loss_of(network())
    with pytest.raises(ValueError, match="not a run of these canaries"):
        other.listen(private)
    with pytest.raises(TypeError, match="what make_private returns"):
        planted.listen(private.optimizer)
    x, y = next(iter(private.loader))
    cross_entropy(private.module(x), y).backward()
    private.optimizer.step()
    with pytest.raises(ValueError, match="1 steps have run before"):
        planted.listen(private)
    scaled = functools.partial(ScaledAdam, eps_scale=0.1)
    planted, private = loss_of(network(), scaled, gradients=Gradients(mode="hooks"))
    with pytest.raises(ValueError, match="rescales gradients before they are clipped"):
        planted.listen(private)
    scheme = Poisson(probability=0.5, dataset_size=60, steps=2, max_batch_size=40)
    cut = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    planted, private = loss_of(network(), mechanism=cut)
    with pytest.raises(ValueError, match="audit it with max_batch_size=None"):
        planted.listen(private)
    planted, _ = loss_of(network())
    with pytest.raises(ValueError, match="a batch that does not say which rows are canaries"):
        planted.module(torch.zeros(3, WIDTH))
    planted.module.eval()
    assert planted.module(torch.zeros(3, WIDTH)).shape == (3, CLASSES)  # as test data come


def test_a_loss_within_the_module_is_refused():
    planted, private = loss_of(WithLoss())
    planted.listen(private)
    x, _ = next(iter(private.loader))
    with pytest.raises(ValueError, match="compute the loss outside"):
        planted.module(x)


def test_canaries_that_clipping_leaves_alone_are_refused():
    """The target is what their rows hold: no gradient."""
    x = people().tensors[0]
    data = TensorDataset(x, torch.zeros(REAL, CLASSES))
    template = (x[0], torch.full((CLASSES,), 0.5))
    planted = plant_canaries(network(), data, canaries=30, spare=5, template=template)
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=planted.module,
        optimizer=torch.optim.SGD(planted.module.parameters(), lr=0.1),
        data=planted.data,
        mechanism=coin_flips(2, len(planted.data), sigma=1.0),
        max_grad_norm=1.0,
    )
    planted.listen(private)
    x, y = next(iter(private.loader))
    (private.module(x) - y).square().mean().backward()
    with pytest.raises(RuntimeError, match="almost no gradient at its row"):
        private.optimizer.step()
