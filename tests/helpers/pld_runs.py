"""PLD filters, and histories for their records."""

import numpy as np

from dptrain import MatrixMechanism, Poisson
from dptrain.individual import PLDFilter
from dptrain.strategies import Identity

DELTA = 1e-5


def pld(epsilon=4.0, delta=DELTA, max_steps=1000, **options):
    return PLDFilter(target_epsilon=epsilon, target_delta=delta, max_steps=max_steps, **options)


def poisson(q=0.3, size=24, steps=10, sigma=2.0):
    scheme = Poisson(probability=q, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def play(record, rng, q, steps, norms, reference=None):
    """Random draws; returns how often an example took part and did not."""
    seen = np.zeros(2, dtype=int)
    for step in range(steps):
        indices = np.flatnonzero(rng.random(record.size) < q)
        ratios = norms(rng, indices)
        shares = record.admit(step=step, part=0, indices=indices, ratios=ratios)
        record.commit(step, 1)
        seen += np.bincount((shares > 0).astype(int), minlength=2)
        if reference is not None:
            wanted = reference.step(dict(zip(indices.tolist(), ratios.tolist(), strict=True)))
            assert {i: float(s > 0) for i, s in zip(indices, shares, strict=True)} == wanted
            assert record._counts.tolist() == reference.counts.tolist()
    return seen


def lognormal(rng, indices):
    return np.minimum(rng.lognormal(-1.0, 1.0, indices.size), 1.0)


def growing(rng, indices):
    """Adversarial for bounds and credits: tiny, then suddenly the clip."""
    return np.where(rng.random(indices.size) < 0.7, 0.02 * rng.random(indices.size), 1.0)
