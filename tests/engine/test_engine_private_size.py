"""Add-or-remove: what a run releases, or is configured by, neither tells N nor depends on it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import CyclicPoisson, MinSep, Poisson
from dptrain.accounting import account, accountants_for, calibrate, profile
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.core.guarantee import Adjacency
from dptrain.individual import GDPFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.report import plot_privacy, privacy_report, statement
from dptrain.strategies import BSR, Identity
from tests.helpers.engine import flat, images, make, train

NOMINAL, STEPS = 60, 4
SCHEMES = {
    "Poisson": (Poisson, {}, Identity()),
    "Poisson, cut": (Poisson, {"max_batch_size": 9}, Identity()),
    "CyclicPoisson": (CyclicPoisson, {"cycle": 2, "assignment": "independent"}, BSR(bands=2)),
    "CyclicPoisson, cut": (
        CyclicPoisson,
        {"cycle": 2, "assignment": "independent", "max_batch_size": 9},
        BSR(bands=2),
    ),
}


def scheme_of(kind, size):
    make_scheme, options, _ = SCHEMES[kind]
    return make_scheme.for_batch_size(
        batch_size=6, dataset_size=size, steps=STEPS, nominal_size=NOMINAL, **options
    )


def private_run(kind, size, **options):
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    options = {"noise_multiplier": 2.0, "strategy": SCHEMES[kind][2], "seed": None, **options}
    options.setdefault("loss_reduction", "sum")
    return make(module, images(size), scheme=scheme_of(kind, size), target_delta=1e-3, **options)


def everything_public(kind, size, folder, **options):
    """Every byte that may be published of a run on so many examples, but for what noise decides."""
    run = private_run(kind, size, **options)
    train(run)
    shown = run.guarantee()
    curve = profile(run.mechanism, np.linspace(0, 2 * shown.epsilon, 5))
    privacy_report(shown, folder / "statement", profile=curve)
    plot_privacy(curve, shown, folder / "privacy.png")
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return {
        **files,
        "said": str(shown),
        "hash": run.mechanism.hash,
        "sigma": run.mechanism.noise_multiplier,
        "divisor": run.optimizer.expected_batch_size,
        "steps": run.steps_executed,
        "parameters": {name: tuple(p.shape) for name, p in run.module.state_dict().items()},
        "optimizer": [len(run.optimizer.param_groups), run.optimizer.loss_reduction],
    }


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", list(SCHEMES))
@pytest.mark.parametrize("target", [{}, {"noise_multiplier": None, "target_epsilon": 3.0}])
def test_neighbors_publish_the_same_bytes(kind, target, tmp_path):
    found = []
    for size in (53, 54):
        folder = tmp_path / str(size)
        folder.mkdir()
        found.append(everything_public(kind, size, folder, **target))
    assert len(found[0]) >= 9
    for name, value in found[0].items():
        assert value == found[1][name], name
    text = json.dumps([str(value) for value in found[0].values()])
    assert '"dataset_size"' not in text
    assert str(NOMINAL) in found[0]["statement.md"].decode()


def test_with_an_individual_filter_too(tmp_path):
    filtered = {
        "individual": GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=STEPS),
        "strategy": Identity(),
    }
    texts = set()
    for size in (53, 54):
        data = TensorDataset(torch.randn(size, 16), torch.zeros(size, dtype=torch.long))
        scheme = Poisson(probability=1.0, dataset_size=size, steps=STEPS, nominal_size=NOMINAL)
        run = make(
            nn.Linear(16, 3), data, scheme=scheme, target_delta=1e-3, seed=None,
            noise_multiplier=0.5, loss_reduction="sum", **filtered,
        )  # fmt: skip
        train(run)
        shown = run.guarantee()
        assert shown.accountant == filtered["individual"].name
        assert shown.adjacency is Adjacency.ADD_REMOVE
        texts.add(json.dumps(statement(shown)))
    assert len(texts) == 1
    assert "every setting stays" in texts.pop()


def test_an_example_of_no_gradient_changes_nothing():
    """All take part in every step: nothing tells 20 examples from 21."""
    weights = []
    for size in (20, 21):
        data = images(20)
        if size == 21:  # an image of zeros has no gradient without a bias
            x, y = data.tensors
            data = TensorDataset(torch.cat([x, 0 * x[:1]]), torch.cat([y, y[:1]]))
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
        scheme = Poisson(probability=1.0, dataset_size=size, steps=5, nominal_size=40)
        run = make(
            module, data, scheme=scheme, noise_multiplier=0.1, lr=1 / 40, loss_reduction="sum"
        )
        assert run.optimizer.expected_batch_size == 40.0
        train(run)
        weights.append(flat(module).double())
    # Sums of float32 in another order.
    assert (weights[0] - weights[1]).norm() <= 1e-5 * weights[0].norm()


def test_settings_come_from_the_nominal_size():
    found = scheme_of("Poisson", 53)
    assert found.probability == 6 / NOMINAL
    assert found.expected_batch_size == pytest.approx(6.0)
    assert found.population == NOMINAL
    assert scheme_of("CyclicPoisson", 53).probability == 2 * 6 / NOMINAL
    with pytest.warns(UserWarning, match=f"N = {NOMINAL}"):
        calibrate(scheme=found, strategy=Identity(), epsilon=5.0, delta=1 / 55)
    cut = scheme_of("Poisson, cut", 53)
    other = dataclasses.replace(cut, dataset_size=60)
    assert cut.expected_batch_size == other.expected_batch_size
    # E[min(Bin(60, 1/10), 9)], by its definition.
    law = [
        np.exp(
            sum(np.log((60 - i) / (i + 1)) for i in range(k)) + k * np.log(0.1)
            + (60 - k) * np.log(0.9)
        )
        for k in range(61)
    ]  # fmt: skip
    mean = sum(min(k, 9) * chance for k, chance in enumerate(law))
    assert cut.expected_batch_size == pytest.approx(mean, rel=1e-9)


def mechanism(scheme, strategy=None):
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=2.0)


def test_nothing_is_stated_where_the_run_reads_the_number_of_examples():
    public = Poisson(probability=0.1, dataset_size=50, steps=4)
    for scheme in (public, MinSep(probability=0.1, min_sep=1, dataset_size=50, steps=4)):
        plain = mechanism(scheme)
        for ask in (
            lambda m: account(m, delta=1e-3, adjacency=Adjacency.ADD_REMOVE),
            lambda m: profile(m, [1.0], adjacency=Adjacency.ADD_REMOVE),
            lambda m: calibrate(
                scheme=m.scheme, strategy=m.strategy, epsilon=1.0, delta=1e-3,
                adjacency=Adjacency.ADD_REMOVE,
            ),
            lambda m: account(
                m, delta=1e-3, adjacency=Adjacency.ADD_REMOVE, accountant="poisson-pld"
            ),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"divides by its expected batch.*nominal_size="):
                ask(plain)


class Careless(PoissonPLD):
    """An accountant from elsewhere that does not ask."""

    def check_covers(self, mechanism):
        pass


def test_accountants_that_do_not_ask_state_nothing_either():
    public = mechanism(Poisson(probability=0.1, dataset_size=50, steps=4))
    with pytest.raises(ValueError, match=r"states nothing: .*nominal_size="):
        Careless(adjacency=Adjacency.ADD_REMOVE).guarantee(public, delta=1e-3)
    assert (
        Careless(adjacency=Adjacency.ADD_REMOVE)
        .guarantee(mechanism(scheme_of("Poisson", 53)), delta=1e-3)
        .epsilon
        > 0
    )


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_a_private_size_is_no_public_one(adjacency):
    hidden = mechanism(scheme_of("Poisson", 53))
    with pytest.raises(ValueError, match=r"nominal_size=60 .*public under"):
        account(hidden, delta=1e-3, adjacency=adjacency)
    assert all(each.reason for each in accountants_for(hidden, adjacency=adjacency))
    assert account(hidden, delta=1e-3).adjacency is Adjacency.ADD_REMOVE


def test_a_report_that_tells_the_number_is_refused(tmp_path):
    shown = account(mechanism(scheme_of("Poisson", 53)), delta=1e-3)
    for scheme in (
        {"type": "Poisson", "probability": 0.1, "dataset_size": 53, "steps": 4},
        {**shown.scheme, "dataset_size": 53},
        {"type": "Poisson", "probability": 0.1, "steps": 4},
    ):
        with pytest.raises(ValueError, match="nominal_size="):
            privacy_report(dataclasses.replace(shown, scheme=scheme), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", list(SCHEMES))
def test_where_batches_are_cut_the_statement_says_how_many_examples_it_covers(kind):
    for cap in (9, NOMINAL + 5):  # which cuts, and which cuts only beyond the nominal size
        found = scheme_of(kind, 53)
        capped = "max_batch_size" in SCHEMES[kind][1]
        if capped:
            found = dataclasses.replace(found, max_batch_size=cap)
        shown = account(mechanism(found, SCHEMES[kind][2]), delta=1e-3)
        assert any(f"at most {NOMINAL} examples" in note for note in shown.notes) == capped


def test_batches_that_are_cut_need_an_upper_bound():
    with pytest.raises(ValueError, match=r"nominal_size=60 .*dataset_size=61.*upper bound"):
        scheme_of("Poisson, cut", 61)
    assert scheme_of("Poisson", 61).expected_batch_size == pytest.approx(6.0)
    for wrong in (0, 2.5, True, "60"):
        with pytest.raises(ValueError if wrong == 0 else TypeError, match="nominal_size"):
            Poisson(probability=0.1, dataset_size=5, steps=2, nominal_size=wrong)


def test_without_one_nothing_changes():
    """What was written before there were nominal sizes is read, and has the same hash."""
    written = {"type": "Poisson", "probability": 0.1, "dataset_size": 50, "steps": 4}
    assert Poisson.from_dict(written).to_dict() == written
    hidden = scheme_of("Poisson, cut", 53)
    assert type(hidden).from_dict(hidden.to_dict()) == hidden


def test_a_run_goes_on_from_its_checkpoint():
    run = private_run("Poisson", 53, seed=3)
    train(run, steps=2)
    run.guarantee()
    state = run.state_dict()
    again = private_run("Poisson", 53, seed=4)
    again.load_state_dict(state)
    train(run)
    train(again)
    assert torch.equal(flat(run.module), flat(again.module))
    other = private_run("Poisson", 54, seed=4)
    with pytest.raises(ValueError, match="data"):
        other.load_state_dict(state)


class HalfHead(nn.Module):
    """A frozen layer in bfloat16 after trained ones, as the base of an adapter is."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.bfloat16().requires_grad_(False)

    def forward(self, x):
        return self.layer(x.bfloat16()).float()


def unnoised_sum(size, half, shift):
    """Of equal images; the rows of the last layer have a shift in common, which softmax ignores."""
    torch.manual_seed(0)
    first, last = nn.Linear(16, 128, bias=False), nn.Linear(128, 64, bias=False)
    with torch.no_grad():
        first.weight.mul_(1e-3)
        last.weight.add_(shift)
    net = nn.Sequential(first, nn.Tanh(), HalfHead(last) if half == "frozen layer" else last)
    x = 4 * torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).repeat(size, 1)
    run = make(
        net.bfloat16() if half == "parameters" else net,
        TensorDataset(x, torch.full((size,), 3)),
        scheme=Poisson(probability=1.0, dataset_size=size, nominal_size=NOMINAL, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        loss_reduction="sum",
    )
    sums, add_noise = [], run.optimizer.add_noise

    def watched():  # before the release is rounded to the parameters' dtype
        sums.append(torch.cat([p.summed_grad.double().flatten() for p in run.optimizer.params]))
        add_noise()

    run.optimizer.add_noise = watched
    for images_, labels in run.loader:
        run.optimizer.zero_grad()
        if half == "parameters":
            images_ = images_.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
            out = run.module(images_)
        if half == "loss":
            out = out.bfloat16()
        nn.functional.cross_entropy(out.float(), labels, reduction="sum").backward()
        run.optimizer.step()
    return sums[0]


@pytest.mark.parametrize("shift", [0.0, 16.0])
@pytest.mark.parametrize("half", ["nowhere", "autocast", "frozen layer", "loss", "parameters"])
def test_one_example_more_moves_a_sum_by_no_more_than_the_bound(half, shift):
    """Of a mean, whose 1/n is rounded as the private n has it, it was up to 260 R at a shift of 16
    in bfloat16, and 22 R at one of 10^6 in float32."""
    moved = (unnoised_sum(513, half, shift) - unnoised_sum(512, half, shift)).norm()
    # 513 gradients of norm 1 add up in float32.
    assert float(moved) <= 1 + 513 * 2**-20


def test_a_mean_over_a_private_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"nominal_size=60, .*loss='sum'.*divided by .*\(6\)"):
        private_run("Poisson", 53, loss_reduction="mean")
    assert private_run("Poisson", 53).optimizer.loss_reduction == "sum"
