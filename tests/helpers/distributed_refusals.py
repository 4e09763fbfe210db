"""What each of two processes is told where they differ or one of them fails."""

import copy

import torch
from torch.utils.data import TensorDataset

from dptrain import PrivacyEngine
from dptrain.individual import GDPOdometer
from tests.helpers.engine import everything_every_step, images, make, small_net, train

STEPS = 5
FULL = everything_every_step(24, STEPS)


def build(**options):
    return make(small_net(), images(), "hooks", **options)


def error_of(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(rank, folder):
    """What each rank is told where the ranks differ."""
    data = images()
    odd = {"scheme": everything_every_step(23, STEPS)}
    other = TensorDataset(data.tensors[0] + rank, data.tensors[1])
    found = {
        "R": error_of(lambda: build(scheme=FULL, max_grad_norm=1.0 + rank)),
        "sigma": error_of(lambda: build(scheme=FULL, noise_multiplier=1.0 + rank)),
        "seed": error_of(lambda: build(scheme=FULL, seed=123450 + rank)),
        "lr": error_of(lambda: build(scheme=FULL, lr=0.1 + rank)),
        "length": error_of(
            lambda: make(small_net(), images(24 - rank), **(odd if rank else {"scheme": FULL}))
        ),
        "contents": error_of(lambda: make(small_net(), other, scheme=FULL)),
        "one wrong": error_of(
            lambda: PrivacyEngine().make_private(
                module=(net := small_net()),
                optimizer=torch.optim.SGD(list(net.parameters())[rank:], lr=0.1),
                data=data,
                scheme=FULL,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
        ),
        "bad file": error_of(lambda: build(scheme=FULL, ledger=folder)),
    }

    def changes(private, change):
        train(private, batches=1)
        if rank == 1:
            change(private)
        train(private)

    def other_bound(private):
        private.optimizer.max_grad_norm = 0.5

    def other_rate(private):
        private.optimizer.param_groups[0]["lr"] = 0.5

    odometer = GDPOdometer(increments=(1.0, 1.0), target_delta=1e-3, max_steps=STEPS)
    found["bound"] = error_of(lambda: changes(build(scheme=FULL), other_bound))
    found["rate"] = error_of(lambda: changes(build(scheme=FULL), other_rate))
    found["round"] = error_of(
        lambda: changes(
            build(scheme=FULL, individual=odometer, max_grad_norm=0.1),
            lambda private: private.individual.open_round(),
        )
    )

    def older():
        private = build(scheme=FULL)
        start = copy.deepcopy(private.state_dict())
        changes(private, lambda private: private.load_state_dict(start))

    def another_run():
        states = []
        for seed in (1, 2):
            private = build(scheme=FULL, seed=seed)
            train(private, batches=1)
            states.append(private.state_dict())
        private = build(scheme=FULL)
        private.load_state_dict(states[rank])
        train(private)

    def elsewhere():
        private = build(scheme=FULL)
        if rank == 1:
            train(private)
        build(scheme=FULL)

    def noise_differs():
        private = build(scheme=FULL, shard="noise")
        private.optimizer.attach_step_hook(lambda opt: opt.params[0].grad.add_(rank * 1e-3))
        train(private)

    found["older"] = error_of(older)
    found["another run"] = error_of(another_run)
    found["elsewhere"] = error_of(elsewhere)
    found["noise"] = error_of(noise_differs)
    return found
