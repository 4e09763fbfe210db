"""Runs in several threads of one process, as a search of hyperparameters makes them."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dptrain.clipping.base import precision
from dptrain.clipping.base.precision import exact_products, full_products
from dptrain.clipping.base.stand_in import untapped
from tests.helpers.engine import everything_every_step, make

ROWS, STEPS = 6, 8


class Scaled(nn.Module):
    """A layer without a rule."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 5))

    def forward(self, x):
        return x * self.scale


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 5), Scaled(), nn.Linear(5, 2)
        ).double()
        for p in self.parameters():
            with torch.no_grad():
                p.normal_(generator=generator)

    def forward(self, ids):
        return self.layers(ids).mean(1)


def trained(seed, wait=lambda: None, mode="bookkeeping"):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, (ROWS, 3), generator=generator)
    data, net = TensorDataset(ids, torch.arange(ROWS) % 2), Net(seed)
    private = make(net, data, mode, scheme=everything_every_step(ROWS, STEPS), seed=seed)
    for x, y in private.loader:
        wait()
        private.optimizer.zero_grad()
        loss = F.cross_entropy(private.module(x), y)
        wait()
        loss.backward()
        private.optimizer.step()
    private.detach()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def in_threads(*calls):
    """What the calls return, each in a thread of its own."""
    found = [None] * len(calls)

    def call(k):
        try:
            found[k] = calls[k]()
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("together", [True, False])
def test_two_threads_train_as_one_after_the_other(mode, together):
    wanted = [trained(seed, mode=mode) for seed in (1, 2)]
    wait = threading.Barrier(2, timeout=60).wait if together else lambda: None
    found = in_threads(*(lambda s=s: trained(s, wait, mode) for s in (1, 2)))
    for each, right in zip(found, wanted, strict=True):
        assert torch.equal(each, right)


def test_a_run_reports_while_another_thread_runs_its_layers_untapped():
    wanted = trained(3)
    with untapped():
        (found,) = in_threads(lambda: trained(3))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("full", [full_products, exact_products])
def test_the_precision_of_products_is_put_back_by_the_last_thread(full):
    before = torch.get_float32_matmul_precision()
    inside, leave = threading.Event(), threading.Event()
    kinds = precision._of_products()
    kinds += precision._of_cudnn() if full is exact_products else []

    def read():
        return [kind.fp32_precision for kind in kinds]

    def other():
        with full():
            inside.set()
            assert leave.wait(60)
            return read()

    def this():
        with full():
            thread.start()
            assert inside.wait(60)
        leave.set()
        thread.join()

    found = []
    thread = threading.Thread(target=lambda: found.append(other()))
    try:
        torch.set_float32_matmul_precision("medium")
        coarse = read()
        this()
        assert set(found[0]) == {"ieee"} != set(coarse)
        assert read() == coarse
    finally:
        torch.set_float32_matmul_precision(before)
