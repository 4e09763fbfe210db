"""Same batches, same augmentations, and no trace in the global generators."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from tests.helpers.loaders import SCHEME, Augmented, Untouchable, logical, make, planned, record


def augmentations(loader):
    return [batch[1].clone() for batch in loader]


@pytest.mark.parametrize("cap", [None, 3])
def test_augmentations_do_not_depend_on_workers(cap):
    alone = augmentations(make(data=Augmented(), max_physical_batch_size=cap))
    pair = augmentations(make(data=Augmented(), max_physical_batch_size=cap, num_workers=2))
    other = augmentations(make(data=Augmented(), max_physical_batch_size=cap, seed=1))
    assert len(alone) == len(pair)
    assert all(torch.equal(a, b) for a, b in zip(alone, pair, strict=True))
    assert len(torch.cat(alone).unique()) == torch.cat(alone).numel()  # no step repeats another
    assert not np.isin(torch.cat(alone), torch.cat(other)).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bit_identical(workers):
    whole = augmentations(make(data=Augmented()))
    loader = make(data=Augmented(), num_workers=workers, persistent_workers=workers > 0)
    for _ in loader:
        if loader.current.step == 7:
            break
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    resumed = make(data=Augmented(), seed=3, num_workers=workers, persistent_workers=workers > 0)
    next(iter(resumed))  # workers that persist have seen the other seed
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.position == 7
    rest = augmentations(resumed)
    assert len(rest) == SCHEME.steps - 7
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[7:], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_left_alone(workers):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    loader = make(data=Augmented(), num_workers=workers)
    for _ in loader:
        assert states() == before
    assert states() == before


def test_generators_are_put_back_when_an_example_fails():
    before = torch.get_rng_state()
    with pytest.raises(AssertionError, match="touched"):
        next(iter(make(data=Untouchable())))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_spawned_workers():
    """Nothing in the loader depends on workers inheriting the memory of their parent."""
    loader = make(num_workers=1, multiprocessing_context="spawn", max_physical_batch_size=4)
    assert logical(record(loader)) == planned(SCHEME)
