"""How many examples are worked on at a time."""

from __future__ import annotations

import pytest
import torch

from dptrain.clipping.bookkeeping import cache


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("numbers", [0, 1, 300, 8_000, 40_000, 400_000, 10**8])
def test_products_have_enough_examples_or_fill_the_shared_cache(threads, numbers, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensor = torch.zeros(1)
    found, most = cache.product_size(tensor, numbers), cache.chunk_size(tensor, numbers)
    assert 1 <= found <= most
    if found < most:  # not fewer than the threads can share, nor more than their own caches hold
        each = found / threads
        assert each >= 32
        assert each == 32 or each * 4 * numbers <= 2**20
