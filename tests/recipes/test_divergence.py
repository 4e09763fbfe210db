"""What is said when a run goes wrong, from released values that are made up here."""

import logging

import pytest
import torch

from dptrain import BandMF, Identity, MatrixMechanism, MinSep, Poisson
from recipes.divergence import WINDOW, Divergence
from recipes.runfolder import read_metrics
from tests.helpers.tiny_vision import PLAIN, SEED, TINY, run

STEPS, WIDTH, BOUND, BATCH = 120, 4000, 0.5, 100.0
BANDED = MinSep.for_batch_size(batch_size=BATCH, dataset_size=5000, min_sep=4, steps=STEPS)
PLAIN_SCHEME = Poisson.for_batch_size(batch_size=BATCH, dataset_size=5000, steps=STEPS)


def releases(mechanism, length):
    """Means of clipped gradients of this norm, with the noise of C⁻¹ by definition."""
    generator = torch.Generator().manual_seed(5)
    scale = mechanism.noise_multiplier * BOUND / BATCH
    z = torch.randn(STEPS, WIDTH, generator=generator, dtype=torch.float64) * scale
    noise = torch.from_numpy(mechanism.strategy.solve(z.numpy()))
    signal = torch.full((WIDTH,), length / WIDTH**0.5, dtype=torch.float64)
    return [signal + each for each in noise]


@pytest.mark.parametrize(
    ("scheme", "strategy"), [(PLAIN_SCHEME, Identity()), (BANDED, BandMF(bands=4))]
)
@pytest.mark.parametrize(("share", "warned"), [(0.97, True), (0.8, False)])
def test_a_signal_at_its_bound_is_said_once(scheme, strategy, share, warned, caplog):
    # The noise's norm is about σR√d/B̄ = .3 of R; the mean of 50 squares tells .94 R² and .64 R²
    # from .81 R² by many standard deviations (a step's is .03 R² at most).
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=0.5)
    watch = Divergence(mechanism, max_grad_norm=BOUND, parameters=WIDTH)
    with caplog.at_level(logging.WARNING):
        for step, gradient in enumerate(releases(mechanism, share * BOUND), 1):
            watch.released(step, [gradient, None])
            assert (len(caplog.records) > 0) == (warned and step >= WINDOW)
    assert len(caplog.records) == warned


def test_noise_that_hides_the_signal_says_nothing(caplog):
    mechanism = MatrixMechanism(scheme=PLAIN_SCHEME, strategy=Identity(), noise_multiplier=50.0)
    watch = Divergence(mechanism, max_grad_norm=BOUND, parameters=WIDTH)
    for step, gradient in enumerate(releases(mechanism, BOUND), 1):
        watch.released(step, [gradient])
    assert not caplog.records


@pytest.mark.parametrize("loss", [2.4, float("nan"), float("inf")])
def test_a_loss_above_its_start_is_said_once(loss, caplog):
    mechanism = MatrixMechanism(scheme=PLAIN_SCHEME, strategy=Identity(), noise_multiplier=1.0)
    watch = Divergence(mechanism, max_grad_norm=BOUND, parameters=None, start=2.3)
    watch.tested(10, 2.2)
    assert not caplog.records
    watch.tested(20, loss)
    watch.tested(30, loss)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step 20" in caplog.text


@pytest.mark.slow
def test_a_run_that_diverges_says_so(config, tmp_path, caplog):
    output = tmp_path / "run"
    with caplog.at_level(logging.WARNING, logger="recipes.divergence"):
        assert run(config, output, *TINY, *PLAIN, "optimizer.lr=1000", f"seed={SEED}") == 0
    assert "above its start" in caplog.text or "other examples is" in caplog.text
    first = read_metrics(output / "metrics.jsonl")[0]
    assert (first["step"], first["split"]) == (0, "test")
