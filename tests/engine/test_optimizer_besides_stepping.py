"""What a user does with the optimizer besides stepping: right, or refused with the remedy."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, SequentialLR

from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train, wire


def engine(net, optimizer, **options):
    return wire(
        module=net,
        optimizer=optimizer,
        data=images(),
        scheme=everything_every_step(24, options.pop("steps", 2)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=1,
        **options,
    )


class Closures(torch.optim.SGD):
    """As LBFGS, of a user's own."""

    def step(self, closure):
        closure()
        return super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Closures])
def test_optimizers_that_evaluate_the_loss_are_refused_before_anything_is_drawn(kind, tmp_path):
    """They failed in their step(), after the noise was drawn and the release was recorded."""
    net = small_net()
    with pytest.raises(ValueError, match=rf"optimizer is a {kind.__name__}, .*SGD or Adam"):
        engine(net, kind(net.parameters(), lr=0.1), ledger=tmp_path / "ledger.jsonl")
    assert list(tmp_path.iterdir()) == []
    assert all("forward" not in vars(m) for m in net.modules())


def test_an_optimizer_of_sparse_gradients_is_refused():
    net = small_net()
    with pytest.raises(ValueError, match=r"SparseAdam, .*Adam"):
        engine(net, torch.optim.SparseAdam(list(net.parameters())))


OWN = {
    "plain": lambda o: ExponentialLR(o, 0.5),
    "sequence": lambda o: SequentialLR(
        o, [ExponentialLR(o, 0.5), ExponentialLR(o, 0.9)], milestones=[1]
    ),
    "chain": lambda o: ChainedScheduler([ExponentialLR(o, 0.5), ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("given", ["after", "private"])
def test_schedulers_of_another_optimizer_are_refused(kind, given):
    """They would leave the run's learning rate alone, silently."""
    net, other = small_net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    private = engine(net, optimizer)
    with pytest.raises(ValueError, match="of another optimizer"):
        private.register_scheduler(OWN[kind](other))
    own = private.optimizer if given == "private" else optimizer
    scheduler = private.register_scheduler(OWN[kind](own))
    train(private, after_step=scheduler.step)
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_a_scheduler_without_an_optimizer_is_taken():
    class Counts:
        ticks = 0

        def step(self):
            self.ticks += 1

        def state_dict(self):
            return {"ticks": self.ticks}

        def load_state_dict(self, state):
            self.ticks = state["ticks"]

    private = make(small_net(), images(), scheme=everything_every_step(24, 2))
    counts = private.register_scheduler(Counts())
    train(private, after_step=counts.step)
    assert counts.ticks == 2


def test_schedulers_of_the_loaded_optimizer_are_the_runs():
    """load_state_dict gives an optimizer new groups."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    private = engine(net, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 0.5))
    train(private, steps=1)
    other = small_net()
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    second = engine(other, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 0.5))
    second.load_state_dict(private.state_dict())
    with pytest.raises(ValueError, match="scheduler"):
        second.register_scheduler(ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0.5))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("where", ["before", "private"])
def test_step_hooks_see_the_release_once_a_logical_step(mode, where):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, after = [], []

    def register(target):
        target.register_step_pre_hook(lambda o, *_: seen.append(norm(o)))
        target.register_step_post_hook(lambda *_: after.append(private.steps_executed))

    def norm(found):
        assert found is optimizer
        return torch.cat([p.grad.flatten() for p in net.parameters()]).norm()

    if where == "before":
        register(optimizer)
    private = engine(net, optimizer, grad_sample_mode=mode, max_physical_batch_size=7)
    if where == "private":
        register(private.optimizer)
    train(private)
    assert len(seen) == 2
    assert after == [0, 1]  # the count moves after the update
    deviation = 1.0 / 24  # σR / B̄; χ with 300 degrees of freedom and more
    size = sum(p.numel() for p in net.parameters())
    assert all(0.5 < float(n) / (deviation * size**0.5) < 2 for n in seen)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_on_states_are_the_wrapped_optimizers(when):
    private = make(small_net(), images(), scheme=everything_every_step(24, 1))
    calls = []
    for kind in ("state_dict", "load_state_dict"):
        register = getattr(private.optimizer, f"register_{kind}_{when}_hook")
        register(lambda *_, kind=kind: calls.append(kind))
    private.optimizer.load_state_dict(private.optimizer.state_dict())
    assert calls == ["state_dict", "load_state_dict"]


@pytest.mark.parametrize("how", ["freeze", "unfreeze"])
def test_freezing_half_way_is_refused_before_the_release(mode, how):
    """The noise is for the parameters that the run was made with."""
    net = small_net()
    net[0].bias.requires_grad_(False)
    before = flat(net).clone()
    private = make(net, images(), mode, scheme=everything_every_step(24, 3))
    train(private, steps=1)
    before, noise = flat(net).clone(), private.optimizer.noise.state_dict()
    parameter = net[0].weight if how == "freeze" else net[0].bias
    parameter.requires_grad_(how == "unfreeze")
    with pytest.raises(RuntimeError, match=r"requires_grad_\((True|False)\).*start a new run"):
        train(private)
    assert private.steps_executed == 1
    assert torch.equal(flat(net), before)
    assert repr(private.optimizer.noise.state_dict()) == repr(noise)
    parameter.requires_grad_(how == "freeze")
    parameter.grad = None
    train(private)
    assert private.steps_executed == 3
