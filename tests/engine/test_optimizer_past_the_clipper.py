"""Whatever reaches ``p.grad`` beside the clipped sums: refused, or never part of a release."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, PrivacyEngine
from tests.helpers.engine import (
    everything_every_step,
    flat,
    images,
    make,
    reference_sum,
    released,
    small_net,
)

BOUND, SIZE = 0.5, 8
HUGE = 1e6


def started(mode, module=None, **options):
    """A run of one noiseless step over few examples, its batch, and the loss of it."""
    options = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "momentum": 0.0, **options}
    module = small_net() if module is None else module
    private = make(module, images(SIZE), mode, scheme=everything_every_step(SIZE, 1), **options)
    x, y = next(iter(private.loader))
    return private, x, y


def loss_of(private, x, y):
    return nn.functional.cross_entropy(private.module(x), y)


def written(private):
    for p in private.module.parameters():
        p.grad = torch.full_like(p, HUGE)


def added(private):
    for p in private.module.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.add_(HUGE)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("moment", ["before the backward pass", "before the step", "both"])
@pytest.mark.parametrize("write", [written, added])
def test_what_is_written_to_p_grad_is_not_released(mode, write, moment):
    """By construction: a release is the clipped sums and noise, which replace ``p.grad``."""
    expected = reference_sum(small_net(), images(SIZE), range(SIZE), BOUND)
    private, x, y = started(mode)
    loss = loss_of(private, x, y)
    if moment != "before the step":
        write(private)
    loss.backward()
    if moment != "before the backward pass":
        write(private)
    before = flat(private.module)
    private.optimizer.step()
    torch.testing.assert_close(released(private, SIZE), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        before - flat(private.module), 0.1 * expected / SIZE, rtol=1e-4, atol=1e-6
    )


def penalised(private, x, y):
    penalty = sum(p.square().sum() for p in private.module.parameters())
    (loss_of(private, x, y) + HUGE * penalty).backward()


def penalised_after(private, x, y):
    loss_of(private, x, y).backward()
    (HUGE * sum(p.square().sum() for p in private.module.parameters())).backward()


def penalised_before(private, x, y):
    loss = loss_of(private, x, y)
    (HUGE * sum(p.abs().sum() for p in private.module.parameters())).backward()
    loss.backward()


@pytest.mark.parametrize("how", [penalised, penalised_after, penalised_before])
def test_penalties_on_weights_are_refused_or_not_released(mode, how):
    """Bookkeeping refuses what the other modes, which only look at layers' calls, leave out."""
    expected = reference_sum(small_net(), images(SIZE), range(SIZE), BOUND)
    private, x, y = started(mode)
    if mode == "bookkeeping":
        with pytest.raises(RuntimeError, match="used outside the layer that owns it"):
            how(private, x, y)
        assert all(p.grad is None for p in private.module.parameters())
        return
    how(private, x, y)
    private.optimizer.step()
    torch.testing.assert_close(released(private, SIZE), expected, rtol=1e-5, atol=1e-6)


def another_pass(private, x, y):
    loss_of(private, x, y).backward()
    (HUGE * loss_of(private, x, y)).backward()


def the_same_graph(private, x, y):
    loss = loss_of(private, x, y)
    loss.backward(retain_graph=True)
    (HUGE * loss).backward()


def one_example_again(private, x, y):
    loss_of(private, x, y).backward()
    (HUGE * loss_of(private, x[2:3], y[2:3])).backward()


@pytest.mark.parametrize("how", [another_pass, the_same_graph, one_example_again])
def test_a_second_backward_pass_is_clipped_with_the_first_or_refused(mode, how):
    """In no mode does the release move past R an example: with one in the batch, its norm is R."""
    private, x, y = started(mode)
    if mode == "bookkeeping" and how is not one_example_again:
        how(private, x, y)  # gradients of both passes are added before they are clipped
        private.optimizer.step()
        factor = torch.tensor(1 + HUGE)
        expected = torch.zeros(flat(private.module).shape)
        for row in range(SIZE):
            one = reference_sum(small_net(), images(SIZE), [row], 1e9) * factor
            expected += one * min(1.0, BOUND / float(one.norm()))
        torch.testing.assert_close(released(private, SIZE), expected, rtol=1e-5, atol=1e-6)
        return

    def both():
        how(private, x, y)
        private.optimizer.step()

    with pytest.raises(
        RuntimeError, match=r"backward|(rows in|gradients for) a batch|to another example"
    ):
        both()
    assert private.steps_executed == 0


def test_freezing_half_way_is_refused_with_the_remedy(mode):
    module = small_net()
    private, x, y = started(mode, module)
    loss_of(private, x, y).backward()
    module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"1 parameter.*\(4, 1, 3, 3\).*requires_grad_\(True\)"):
        private.optimizer.step()
    module[0].weight.requires_grad_(True)
    private.optimizer.step()
    assert private.steps_executed == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["written", "unfrozen", "added to the optimizer"])
def test_parameters_that_the_run_does_not_know_are_not_updated(mode, when):
    """The wrapped optimizer would step with their plain gradients: neither clipped nor noised."""
    module = small_net()
    module[0].requires_grad_(False)
    private, x, y = started(mode, module)
    first = module[0].weight
    if when == "added to the optimizer":
        other = nn.Linear(3, 3)
        private.optimizer.original_optimizer.add_param_group({"params": list(other.parameters())})
        loss = nn.functional.cross_entropy(other(private.module(x)), y)
        first = other.weight
    else:
        first.requires_grad_(when == "unfrozen")
        loss = loss_of(private, x, y)
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match=r"not part of the run.*shape"):  # noqa: PT012
        loss.backward()
        if when == "written":
            first.grad = torch.ones_like(first)
        private.optimizer.step()
    assert torch.equal(first, before)
    assert private.steps_executed == 0


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(6, 4, **options), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def of_ids(module, mode):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 6, (SIZE, 5), generator=generator)
    data = TensorDataset(ids, torch.arange(SIZE) % 3)
    return data, PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0),
        data=data,
        scheme=everything_every_step(SIZE, 1),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        gradients=Gradients(mode=mode),
    )


def test_embeddings_scaled_by_counts_of_the_batch_are_refused(mode):
    with pytest.raises(ValueError, match=r"'embed'.*scale_grad_by_freq=True.*the whole batch"):
        of_ids(Bag(scale_grad_by_freq=True), mode)
    module = Bag(scale_grad_by_freq=True)
    module.embed.requires_grad_(False)  # then it scales nothing
    of_ids(module, mode)


def test_max_norm_is_refused_frozen_or_not(mode):
    for frozen in (False, True):
        module = Bag(max_norm=1.0)
        module.embed.requires_grad_(not frozen)
        with pytest.raises(ValueError, match=r"'embed'.*max_norm=1.0"):
            of_ids(module, mode)


def test_sparse_embeddings_release_dense_clipped_sums_or_are_refused(mode):
    if mode == "functorch":
        with pytest.raises(ValueError, match=r"'embed'.*sparse=True.*bookkeeping'\) or 'hooks'"):
            of_ids(Bag(sparse=True), mode)
        return
    data, private = of_ids(Bag(sparse=True), mode)
    expected = reference_sum(Bag(), data, range(SIZE), BOUND)
    for ids, y in private.loader:
        nn.functional.cross_entropy(private.module(ids), y).backward()
        private.optimizer.step()
    assert not any(p.grad.is_sparse for p in private.optimizer.params)
    torch.testing.assert_close(released(private, SIZE), expected, rtol=1e-5, atol=1e-6)
