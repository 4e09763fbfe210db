"""The loader driven by an engine, and the states it refuses."""

from __future__ import annotations

import pytest

from dptrain.sampling import BallsInBins
from tests.helpers.loaders import SCHEME, N, make


def test_driven_protocol():
    with pytest.raises(RuntimeError, match="driven"):
        make().complete_step()
    loader = make(max_physical_batch_size=4, driven=True)
    with pytest.raises(RuntimeError, match="before taking a batch"):
        loader.report_microbatch()
    batches = 0
    for _ in loader:
        batches += 1
        position = loader.position
        assert position == loader.current.step
        with pytest.raises(RuntimeError, match="follows report_microbatch"):
            loader.complete_step()
        loader.report_microbatch()
        with pytest.raises(RuntimeError, match="twice"):
            loader.report_microbatch()
        if loader.current.last:
            loader.complete_step()
            assert loader.position == position + 1
            with pytest.raises(RuntimeError, match="completed already"):
                loader.complete_step()
        else:
            with pytest.raises(RuntimeError, match="follows report_microbatch"):
                loader.complete_step()
    assert batches > SCHEME.steps
    assert loader.position == SCHEME.steps


@pytest.mark.parametrize("workers", [0, 2])
def test_driven_refuses_a_batch_without_optimizer_step(workers):
    loader = make(num_workers=workers, driven=True)
    with pytest.raises(RuntimeError, match=r"Call it once for every"):
        for _ in loader:
            pass
    assert loader.position == 0
    batches = iter(loader)
    next(batches)
    loader.report_microbatch()
    with pytest.raises(RuntimeError, match="complete_step"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_driven_break_repeats_only_what_was_not_completed(workers):
    loader = make(num_workers=workers, max_physical_batch_size=3, driven=True)
    done = []
    for _ in range(3):
        for _ in loader:
            micro = loader.current
            loader.report_microbatch()
            if micro.last:
                loader.complete_step()
                done.append(micro.step)
                if len(done) % 4 == 0:
                    break
    assert done == list(range(SCHEME.steps))
    with pytest.raises(RuntimeError, match="all 12 planned"):
        iter(loader)


def test_state_of_something_else_is_refused():
    state = make().state_dict()
    other = BallsInBins(bins=6, epochs=2, dataset_size=N)
    with pytest.raises(ValueError, match="another scheme"):
        make(scheme=other).load_state_dict(state)
    with pytest.raises(ValueError, match="dataset of 59 examples"):
        make().load_state_dict({**state, "dataset_size": 59})
    with pytest.raises(ValueError, match="not a state"):
        make().load_state_dict({})


def test_loading_ends_a_running_iteration():
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    assert loader.current is None
    with pytest.raises(RuntimeError, match="state was loaded"):
        next(batches)
    assert loader.position == 0
