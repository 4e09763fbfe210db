"""The shared threads: all items, once each, and no waiting for oneself."""

import threading

import pytest
import torch

from dptrain.noise import noise_stream
from dptrain.noise.generators.threads import PARALLEL_FROM, for_each
from dptrain.strategies import BSR


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def within(seconds, action):
    """Run ``action`` in a thread that a failing test does not wait for."""
    result = []
    thread = threading.Thread(target=lambda: result.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return result[0]


def test_every_item_once(two_threads):
    done = []
    for_each(done.append, range(1000), entries=PARALLEL_FROM)
    assert sorted(done) == list(range(1000))


def test_a_task_may_call_it_again(two_threads):
    done = []

    def outer(_):
        for_each(done.append, range(3), entries=PARALLEL_FROM)

    within(60, lambda: for_each(outer, range(20), entries=PARALLEL_FROM))
    assert len(done) == 60


def test_an_error_in_a_task_is_raised(two_threads):
    def fail(item):
        if item == 7:
            raise ArithmeticError("seven")

    with pytest.raises(ArithmeticError, match="seven"):
        for_each(fail, range(20), entries=PARALLEL_FROM)


@pytest.mark.parametrize("secure", [False, True])
def test_large_streams_draw_inside_the_pool(two_threads, secure):
    def step():
        like = [torch.zeros(PARALLEL_FROM + 5)]
        stream = noise_stream(BSR(bands=2), steps=2, like=like, seed=1, secure=secure)
        return next(stream)[0].clone()

    parallel = within(120, step)
    torch.set_num_threads(1)
    assert torch.equal(parallel, step())
