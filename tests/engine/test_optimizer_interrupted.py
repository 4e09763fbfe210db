"""What is released stays as accounted when a step is disturbed on its way."""

import copy

import pytest
import torch

from dptrain import PrivacyEngine
from tests.helpers.engine import (
    everything_every_step,
    flat,
    images,
    make,
    separated,
    small_net,
    train,
)


def released(private):
    return torch.cat([p.grad.flatten() for p in private.optimizer.params])


def test_a_new_bound_waits_for_the_next_step(mode):
    """Sums clipped to R need noise of R: a smaller R in mid-step must not shrink the noise."""
    data = images(8)
    scheme = everything_every_step(8, 2)
    ends = []
    for change in (False, True):
        options = {"scheme": scheme, "max_physical_batch_size": 4, "max_grad_norm": 0.5}
        private = make(small_net(), data, mode, **options)

        def after(private=private, change=change):
            if change:
                private.optimizer.max_grad_norm = 0.01

        train(private, steps=1, after_step=after)
        ends.append(released(private))
    assert torch.equal(ends[0], ends[1])
    train(private, steps=2)
    # 8 rows of norm 0.01 and noise of 0.01 an entry
    assert released(private).norm() < (8 * 0.01 + 0.01 * 2 * flat(private.module).numel()) / 8


@pytest.mark.parametrize("name", ["noise_multiplier", "expected_batch_size"])
def test_noise_other_than_the_mechanisms_is_refused(name):
    private = make(small_net(), images(8), scheme=everything_every_step(8, 1))
    setattr(private.optimizer, name, 0.5)
    with pytest.raises(RuntimeError, match=name):
        train(private)


class Interrupted(torch.optim.SGD):
    armed = False

    def step(self, closure=None):
        super().step(closure)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def interruptible():
    net = small_net()
    return PrivacyEngine().make_private(
        module=net,
        optimizer=Interrupted(net.parameters(), lr=0.1),
        data=images(),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        seed=5,
        **separated(24, 10),
    )


@pytest.mark.parametrize("where", ["before the update", "after the update"])
def test_an_interrupted_release_cannot_be_repeated_or_saved(where):
    """It would take the next row of noise for the same step, or count an update as not made."""
    whole = interruptible()
    train(whole)
    private = interruptible()
    train(private, steps=4)
    state = copy.deepcopy(private.state_dict())  # as in torch, it refers to the live parameters
    if where == "after the update":
        private.optimizer.original_optimizer.armed = True
    else:

        def stop(optimizer):
            optimizer.step_hook = None
            raise KeyboardInterrupt

        private.optimizer.attach_step_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(private)
    with pytest.raises(RuntimeError, match="interrupted"):
        train(private)
    with pytest.raises(RuntimeError, match="interrupted"):
        private.state_dict()
    private.load_state_dict(state)
    train(private)
    assert private.steps_executed == 10
    assert torch.equal(flat(private.module), flat(whole.module))
