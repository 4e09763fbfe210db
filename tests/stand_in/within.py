"""Private training on a device that is neither the CPU nor CUDA; run by ``test_stand_in.py``."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import (
    BLT,
    BandMF,
    Gradients,
    Identity,
    Loading,
    NoiseOptions,
    Poisson,
    PrivacyEngine,
    Tree,
)
from dptrain.clipping.base import unknown_device
from dptrain.clipping.base.linear_norms import gram_squares, gram_stripes, outer_norms
from dptrain.clipping.bookkeeping.combine import norms_of_sum
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.core import global_state, restore_global_state, same_global_state
from dptrain.engine.release_ledger import checksum
from dptrain.individual import GDPFilter
from dptrain.noise import noise_stream
from tests.clipping.base.test_linear_norms import LOOSE, SHAPES, vectors
from tests.cuda.runs import Run
from tests.cuda.test_runs import resumes
from tests.helpers.engine import flat
from tests.stand_in.device import NAME, PLACE, module

EVERY = Poisson(probability=1.0, dataset_size=24, steps=4)
MODES = ["bookkeeping", "hooks"]


@pytest.fixture(autouse=True)
def unchanged():
    before = dict(vars(module))
    yield
    vars(module).update(before)
    unknown_device.check_products.cache_clear()


def test_the_device_is_one_of_its_own_and_has_no_float64():
    x = torch.ones(3, device=NAME)
    assert x.device == PLACE
    assert torch.accelerator.current_accelerator().type == NAME
    for wide in (x.double, lambda: torch.zeros(2, dtype=torch.float64, device=NAME)):
        with pytest.raises(TypeError, match="has no float64"):
            wide()
    with pytest.raises(TypeError, match="has no float64"):
        torch.ones(3, dtype=torch.float64).to(NAME)
    with pytest.raises(TypeError, match="has no float64"):
        x.sum(dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


# Runs.


def words():
    """An embedding and linear layers at eighty positions, whose norms come from Gram matrices."""
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), Mean())


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), 0),
    "cnn": (convolutions, 0),
    "words": (words, 7),
}


def released(name, device, micro=None, **options):
    """All releases of a run, one row a step."""
    build, vocabulary = MODELS[name]
    torch.manual_seed(0)
    net = build().to(device)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 1, 4, 4, generator=generator)
    if vocabulary:
        x = torch.randint(vocabulary, (24, 80), generator=generator)
    data = TensorDataset(x, torch.randint(3, (24,), generator=generator))
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        data=data,
        **{
            "scheme": EVERY,
            "strategy": BandMF(bands=3),
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.1,
            "seed": 5,
            "loading": Loading(max_physical_batch_size=micro),
            **options,
        },
    )
    rows = []
    for a, b in private.loader:
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.module(a.to(device)), b.to(device)).backward()
        private.optimizer.step()
        if private.optimizer.at_step_boundary:
            assert {p.grad.device.type for p in net.parameters()} == {device}
            rows.append(torch.cat([p.grad.cpu().flatten() for p in net.parameters()]))
    return torch.stack(rows)


def assert_close(there, here):
    """Up to the order of additions: 24 rows of norm 0.1 at most, over the batch of 24, in float32.

    The noise, which is the same, is as long as 0.1 / 24 an entry.
    """
    torch.testing.assert_close(there, here, rtol=0, atol=0.1 * 2.0**-18)
    assert not torch.allclose(there, torch.zeros_like(here), rtol=0, atol=0.1 / 24)


@pytest.mark.parametrize("mode", [*MODES, "functorch"])
@pytest.mark.parametrize("micro", [None, 7])
def test_releases_are_those_of_the_cpu(micro, mode):
    options = {"micro": micro, "gradients": Gradients(mode=mode)}
    assert_close(released("mlp", NAME, **options), released("mlp", "cpu", **options))
    assert "aten::threshold_backward" in module.operators


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "functorch"])
@pytest.mark.parametrize("micro", [None, 7])
def test_releases_of_convolutions_are_those_of_the_cpu(micro, mode):
    options = {"micro": micro, "gradients": Gradients(mode=mode)}
    assert_close(released("cnn", NAME, **options), released("cnn", "cpu", **options))


@pytest.mark.parametrize("micro", [None, 7])
def test_gram_matrices_clip_a_little_more(micro):
    """Sums over positions in float32 may be off by more, and norms are rounded up by that."""
    there, here = (released("words", d, micro, noise_multiplier=0.0) for d in (NAME, "cpu"))
    first, expected = there[0], here[0]  # at the same parameters
    assert first.norm() <= expected.norm() * (1 + 1e-6)
    torch.testing.assert_close(first, expected, rtol=0, atol=float(0.011 * expected.norm()))


def test_an_individual_filter_runs_there():
    options = {"individual": GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50)}
    options |= {"strategy": Identity(), "noise_multiplier": 1.2}
    assert_close(released("mlp", NAME, **options), released("mlp", "cpu", **options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [None, 3])
def test_a_resumed_run_is_bit_identical(mode, micro):
    """With dropout, whose masks come from the device's own generator, and within a step."""
    make = functools.partial(Run, NAME, mode=mode, micro=micro, dropout=0.3)
    resumes(functools.partial(make, strategy=BandMF(bands=3)), batches=5)


def test_a_small_run_resumes_within_a_step():
    make = functools.partial(Run, NAME, micro=12, dropout=0.3, scheme=EVERY)
    whole = make().train()
    state = make().train(batches=3).state()
    second = make()
    torch.manual_seed(4711)
    second.private.load_state_dict(state)
    assert torch.equal(second.train().end(), whole.end())


def test_dropout_comes_of_the_devices_generator():
    before = module.generator.get_state()
    Run(NAME, dropout=0.3).train(batches=2)
    assert not torch.equal(before, module.generator.get_state())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_autocast_of_the_device(mode):
    resumes(functools.partial(Run, NAME, mode=mode, autocast=torch.bfloat16), batches=4)


def test_a_run_goes_on_on_the_cpu():
    """The noise is drawn there anyway."""
    make = functools.partial(Run, strategy=BandMF(bands=3))
    whole = make("cpu").train()
    state = make(NAME).train(batches=4).state()
    second = make("cpu")
    second.private.load_state_dict(state)
    torch.testing.assert_close(second.train().end(), whole.end(), rtol=0, atol=1e-5)
    assert "stand_in" in str(second.private.guarantee(delta=1e-3))  # where it began
    assert "stand_in" not in str(whole.private.guarantee(delta=1e-3))


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"regenerate": True}])
def test_every_way_of_keeping_noise(options):
    noise = NoiseOptions(**options)
    there, here = (released("mlp", device, noise=noise) for device in (NAME, "cpu"))
    assert_close(there, here)


def test_the_cost_is_told_once_and_the_generator_named(caplog):
    with caplog.at_level(logging.WARNING, logger="dptrain"):
        run = Run(NAME).train()
    told = [r.getMessage() for r in caplog.records if "drawn and kept on the CPU" in r.getMessage()]
    assert len(told) == 1
    assert "stand_in:0" in told[0]
    assert run.private.optimizer.noise.generator.startswith("AES-256-CTR")
    stated = str(run.private.guarantee(delta=1e-3))
    assert "AES-256-CTR" in stated
    assert "computed on a device of the kind stand_in; the guarantee assumes" in stated
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dptrain"):
        Run("cpu").train()
    assert "drawn and kept" not in caplog.text


# Parts.


@pytest.mark.parametrize("strategy", [Identity(), BandMF(bands=3), BLT(buffers=2), Tree()])
def test_noise_is_that_of_the_cpu(strategy, tmp_path):
    sums = [torch.randn(40, 3), None, torch.randn(5)]
    like = [torch.zeros(40, 3), torch.zeros(7), torch.zeros(5)]

    def stream(device):
        return noise_stream(strategy, steps=3, like=[x.to(device) for x in like], seed=3)

    there, here = stream(NAME), stream("cpu")
    for _ in range(2):
        found = there.release([s if s is None else s.to(NAME) for s in sums], 0.7)
        expected = here.release([s if s is None else s.clone() for s in sums], 0.7)
        assert {x.device for x in found} == {PLACE}
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
    assert all(torch.equal(a, b) for a, b in zip(next(there), next(here), strict=True))


def test_past_noise_in_a_file(tmp_path):
    tmp_path.chmod(0o700)
    like = [torch.zeros(9, device=NAME)]
    kept = noise_stream(BandMF(bands=3), steps=4, like=like, seed=1, folder=tmp_path)
    free = noise_stream(BandMF(bands=3), steps=4, like=like, seed=1)
    for _ in range(4):
        assert torch.equal(next(kept)[0], next(free)[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "cancelling", "unequal", "positive"])
def test_norms_are_rounded_up(kind, shape):
    a, b = vectors(kind, *shape)
    found = outer_norms(b.to(NAME), a.to(NAME))
    assert found.device == PLACE
    found = found.cpu()
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).flatten(1).norm(dim=1)
    lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    assert (found >= exact).all()
    assert (found <= (LOOSE * exact**2 + 1.5e-6 * lengths**2).sqrt() * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "cancelling", "unequal", "positive"])
def test_squares_are_off_by_no_more_than_is_stated(kind, shape):
    sizes = shape[1:]
    a, b = (torch.round(side * 2**8 / side.abs().max()) for side in vectors(kind, *shape))
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).square().sum((1, 2))
    sides = (gram_stripes(side.to(NAME), torch.float32) for side in (b, a))
    found = gram_squares(*sides, tuple(reversed(sizes)))
    assert found.value.device.type == "cpu"
    assert found.value.dtype == torch.float64
    assert ((found.value - exact).abs() <= found.off).all()


def test_sums_that_add_one_after_the_other_are_within_what_is_stated():
    """The worst order: each of so many equal numbers is rounded the same way."""
    module.one_by_one = True
    a, b = torch.full((1, 3000, 1), 1.1), torch.full((1, 3000, 1), 0.7)
    exact = (3000 * a[0, 0].double() * b[0, 0].double()).square()
    sides = (gram_stripes(side.to(NAME), torch.float32) for side in (b, a))
    found = gram_squares(*sides, (1, 1))
    assert (found.value - exact).abs() <= found.off
    assert (found.value - exact).abs() > 5e-6 * exact  # more than the other errors together
    assert found.off < 3000 * 2.0**-23 * exact


def test_norms_of_weights_that_an_embedding_shares():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (6, 9), generator=generator)
    g, left, right = (torch.randn(6, 9, n, generator=generator) for n in (4, 11, 4))
    left[0], right[0] = left[0, :1] * 1000, right[0] - right[0].mean(0)  # positions that cancel

    def uses(device):
        table = Gathered(ids.to(device), g.to(device), 11)
        return [table, OuterProducts(left.to(device), right.to(device))]

    total = torch.einsum("ntk,ntj->nkj", left.double(), right.double())
    total += nn.functional.one_hot(ids, 11).double().transpose(1, 2) @ g.double()
    exact = total.flatten(1).norm(dim=1)
    found = norms_of_sum(uses(NAME))
    assert found.device == PLACE
    assert (found.cpu() >= exact).all()
    assert (found.cpu() <= norms_of_sum(uses("cpu")) * 1.01).all()


def test_products_of_fewer_bits_are_refused():
    module.product_dtype = torch.bfloat16
    with pytest.raises(RuntimeError, match=r"device=stand_in:0: products of float32 .* CPU"):
        Run(NAME)


def test_generators_are_kept_and_put_back():
    torch.manual_seed(3)
    state = global_state()
    drawn = torch.rand(4, device=NAME).cpu()
    assert not same_global_state(state, global_state())
    restore_global_state(state)
    assert same_global_state(state, global_state())
    assert torch.equal(torch.rand(4, device=NAME).cpu(), drawn)


def test_checksums_are_those_of_the_cpu():
    values = [torch.randn(3), torch.randn(100_000)]
    assert checksum([v.to(NAME) for v in values]) == checksum(values)


def test_a_copied_module_is_on_the_device():
    net = nn.Linear(3, 2).to(NAME)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        net.weight.zero_()
    assert {p.device for p in copied.parameters()} == {PLACE}
    assert bool(flat(copied).any())
