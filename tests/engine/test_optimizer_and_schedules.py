"""Optimizers, schedules and averages: each is given the release and nothing else, and resumes."""

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from dptrain import JoinedOptimizer, ScaledAdam
from tests.helpers.engine import everything_every_step, flat, images, separated, train, wire

STEPS, STOP = 6, 3  # every run below; the resumed ones are saved in between


def net():
    """With a matrix, a convolution, vectors, and a layer to freeze."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def matrices():
    """Of matrices alone, which is what Muon takes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    )


def groups(kind, module, **options):
    """A group each for the body and the head, with rates and decays of their own."""
    body, head = module[0], module[6]
    rest = [p for layer in (module[1], module[4]) for p in layer.parameters()]
    return kind(
        [
            {"params": body.parameters(), "lr": 0.01, "weight_decay": 0.0},
            {"params": rest},
            {"params": head.parameters(), "lr": 0.2},
        ],
        lr=0.05,
        weight_decay=0.1,
        **options,
    )


def with_frozen(module):
    """Two groups, of which one holds parameters that are not trained, and decays weights."""
    module[4].requires_grad_(False)
    frozen = list(module[4].parameters())
    rest = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": rest}, {"params": frozen, "weight_decay": 0.5}], lr=0.05)


def half_frozen(module):
    """A group in which some are trained and some are not."""
    module[0].weight.requires_grad_(False)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def of_all(kind, **options):
    return lambda module: kind(module.parameters(), **options)


optim = torch.optim
OPTIMIZERS = {
    "SGD": of_all(optim.SGD, lr=0.1),
    "SGD momentum": of_all(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": of_all(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": of_all(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": of_all(optim.Adam, lr=0.05),
    "Adam amsgrad": of_all(optim.Adam, lr=0.05, amsgrad=True),
    "Adam foreach": of_all(optim.Adam, lr=0.05, foreach=True),
    "Adam fused": of_all(optim.Adam, lr=0.05, fused=True),
    "Adam, lr a tensor": of_all(optim.Adam, lr=torch.tensor(0.05)),
    "AdamW": of_all(optim.AdamW, lr=0.05, weight_decay=0.1),
    "AdamW foreach": of_all(optim.AdamW, lr=0.05, weight_decay=0.1, foreach=True),
    "AdamW fused": of_all(optim.AdamW, lr=0.05, weight_decay=0.1, fused=True),
    "NAdam": of_all(optim.NAdam, lr=0.05),
    "RAdam": of_all(optim.RAdam, lr=0.05),
    "Adamax": of_all(optim.Adamax, lr=0.05),
    "Adagrad": of_all(optim.Adagrad, lr=0.05),
    "Adadelta": of_all(optim.Adadelta, lr=1.0),
    "RMSprop": of_all(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": of_all(optim.Rprop, lr=0.01),
    "ASGD": of_all(optim.ASGD, lr=0.1),
    "Adafactor": of_all(optim.Adafactor, lr=0.05),
    "groups, SGD": functools.partial(groups, optim.SGD, momentum=0.9),
    "groups, AdamW": functools.partial(groups, optim.AdamW, foreach=True),
    "a frozen group": with_frozen,
    "half a group frozen": half_frozen,
}


def private_run(build, optimizer_of, scheduler_of=None, **options):
    """A module, its run and its scheduler; in microbatches, so that a step has several parts."""
    module = build()
    optimizer = optimizer_of(module)
    options = {"max_physical_batch_size": 3, **separated(24, STEPS), **options}
    private = wire(
        module=module,
        optimizer=optimizer,
        data=images(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=5,
        **options,
    )
    scheduler = None if scheduler_of is None else scheduler_of(private.optimizer)
    if scheduler is not None:
        private.register_scheduler(scheduler)
    return module, private, scheduler


def released_gradients(private, steps=None, after=lambda: None):
    """Train on; what the wrapped optimizer found in ``p.grad``, step by step."""
    found = []
    handle = private.optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.clone() for p in private.optimizer.params])
    )
    train(private, steps=steps, after_step=after)
    handle.remove()
    return found


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_fused_steps_on_weights_in_another_order_of_memory(kind):
    """torch's fused kernels go through memory in order, whatever the strides say."""
    options = {"lr": 0.1, "momentum": 0.9} if kind is optim.SGD else {"lr": 0.05}
    ends = []
    for fused in (False, True):
        module = net().to(memory_format=torch.channels_last)
        module[4].weight.data = module[4].weight.data.t().contiguous().t()
        assert not module[4].weight.is_contiguous()
        _, private, _ = private_run(
            lambda module=module: module, of_all(kind, fused=fused, **options)
        )
        train(private)
        ends.append(flat(module))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def replayed(build, optimizer_of, gradients, scheduler_of=None):
    """The optimizer by itself, without any wrapper, given those gradients."""
    module = build()
    optimizer = optimizer_of(module)
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for step in gradients:
        for p, gradient in zip(held, step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return module


def check(build, optimizer_of, scheduler_of=None):
    """The run is the plain optimizer on its releases, and a resumed run is the whole one."""

    def ticks(scheduler):
        return (lambda: None) if scheduler is None else scheduler.step

    whole, private, scheduler = private_run(build, optimizer_of, scheduler_of)
    gradients = released_gradients(private, after=ticks(scheduler))
    assert len(gradients) == STEPS
    assert not torch.equal(flat(whole), flat(build()))
    plain = replayed(build, optimizer_of, gradients, scheduler_of)
    assert torch.equal(flat(whole), flat(plain))

    _, first, scheduler = private_run(build, optimizer_of, scheduler_of)
    train(first, steps=STOP, after_step=ticks(scheduler))
    state = through_disk(first.state_dict())
    torch.manual_seed(4711)  # whatever a new process's generator holds
    resumed, second, scheduler = private_run(build, optimizer_of, scheduler_of)
    second.load_state_dict(state)
    train(second, after_step=ticks(scheduler))
    assert second.steps_executed == STEPS
    assert torch.equal(flat(resumed), flat(whole))
    return private, second


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_with_the_releases_what_it_does_by_itself_and_resumes(name):
    private, second = check(net, OPTIMIZERS[name])
    for one, other in zip(
        private.optimizer.param_groups, second.optimizer.param_groups, strict=True
    ):
        assert {k: v for k, v in one.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }


muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@muon
def test_muon():
    check(matrices, of_all(torch.optim.Muon, lr=0.05, weight_decay=0.1))


def by_dimension(matrix_kind):
    """An optimizer for the matrices and AdamW for the rest, in two groups."""

    def build(module):
        of_2, rest = [], []
        for p in module.parameters():
            (of_2 if p.ndim == 2 else rest).append(p)
        adamw = torch.optim.AdamW([{"params": rest[:2], "lr": 0.1}, {"params": rest[2:]}], lr=0.05)
        return JoinedOptimizer(matrix_kind(of_2, lr=0.05), adamw)

    return build


def decay(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


@muon
def test_muon_for_the_matrices_and_adamw_for_the_rest():
    check(net, by_dimension(torch.optim.Muon), decay)


class TestJoined:
    """Against the same optimizers, each by itself."""

    build = staticmethod(by_dimension(functools.partial(torch.optim.SGD, momentum=0.9)))

    def test_every_part_does_what_it_does_by_itself(self):
        whole, private, _ = private_run(net, self.build)
        gradients = released_gradients(private)
        # The run's parameters come in the order of the groups.
        module = net()
        parts = self.build(module).parts
        held = [p for part in parts for group in part.param_groups for p in group["params"]]
        for step in gradients:
            for p, gradient in zip(held, step, strict=True):
                p.grad = gradient
            for part in parts:
                part.step()
        assert torch.equal(flat(whole), flat(module))
        check(net, self.build, decay)

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_scheduler_of_one_part_leaves_the_others_alone(self, which):
        module = net()
        optimizer = self.build(module)
        _, private, _ = private_run(lambda: module, lambda _: optimizer)
        scheduler = private.register_scheduler(decay(optimizer.parts[which]))
        train(private, steps=2, after_step=scheduler.step)
        rates = [[group["lr"] for group in part.param_groups] for part in optimizer.parts]
        expected = [[0.05], [0.1, 0.05]]
        expected[which] = [rate * 0.8 * 0.8 for rate in expected[which]]
        assert rates == expected
        assert [group["lr"] for group in private.optimizer.param_groups] == [
            *expected[0],
            *expected[1],
        ]

    def test_its_groups_are_those_of_the_parts_after_loading_and_copying_too(self):
        optimizer = self.build(net())
        copied = copy.deepcopy(optimizer)
        optimizer.load_state_dict(through_disk(optimizer.state_dict()))
        for one in (optimizer, copied):
            own = [group for part in one.parts for group in part.param_groups]
            assert len(own) == 3
            assert all(a is b for a, b in zip(one.param_groups, own, strict=True))

    def test_what_cannot_be_joined_is_refused(self):
        module = net()
        first, second = module[0].parameters(), module[4].parameters()
        sgd = torch.optim.SGD(first, lr=0.1)
        with pytest.raises(ValueError, match="at least one"):
            JoinedOptimizer()
        with pytest.raises(TypeError, match="optimizer 1"):
            JoinedOptimizer(sgd, [second])
        with pytest.raises(
            ValueError, match=r"optimizer 1 holds .*\(4, 1, 3, 3\).* an earlier one"
        ):
            JoinedOptimizer(sgd, torch.optim.SGD([module[0].weight], lr=0.1))
        with pytest.raises(ValueError, match="ScaledAdam, which rescales"):
            JoinedOptimizer(sgd, ScaledAdam(second, eps_scale=0.1))
        joined = JoinedOptimizer(sgd)
        with pytest.raises(ValueError, match="before joining them"):
            joined.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="from 2 joined optimizers, and there are 1 here"):
            joined.load_state_dict({"parts": [{}, {}]})
        with pytest.raises(ValueError, match="from no joined optimizers"):
            joined.load_state_dict(sgd.state_dict())

    @pytest.mark.parametrize(
        ("kind", "why"), [(torch.optim.LBFGS, "several times"), (torch.optim.SparseAdam, "sparse")]
    )
    def test_a_part_that_a_run_cannot_have_is_refused(self, kind, why):
        module = net()
        parameters = list(module.parameters())
        joined = JoinedOptimizer(
            torch.optim.SGD(parameters[:2], lr=0.1), JoinedOptimizer(kind(parameters[2:]))
        )
        with pytest.raises(ValueError, match=f"optimizer is a {kind.__name__}, .*{why}"):
            private_run(lambda: module, lambda _: joined)

    def test_a_closure_is_evaluated_once(self):
        module, calls = net(), []
        before = flat(module)
        joined = self.build(module)

        def loss():
            calls.append(torch.is_grad_enabled())
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            return 7.0

        with torch.no_grad():
            assert joined.step(loss) == 7.0
        assert calls == [True]
        assert (flat(module) != before).all()


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=STEPS + 1),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), decay(o)], [2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), decay(o)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_ticks_once_a_logical_step_and_resumes(name):
    """The loop calls it once a microbatch; the last two also set momentum."""
    check(net, OPTIMIZERS["SGD momentum"], SCHEDULERS[name])


def public_images():
    return torch.randn(7, 1, 4, 4, generator=torch.Generator().manual_seed(1))


class Watched:
    """A run with an average of its parameters and a rate that follows a figure of public data.

    Args:
        averaging: of ``AveragedModel``.
        state: to go on from.
        stop: after so many steps.
        averaged: whether there is an average.
    """

    def __init__(self, averaging=None, state=None, stop=None, averaged=True):
        self.module, self.private, self.scheduler = private_run(
            net,
            OPTIMIZERS["AdamW"],
            lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
        )
        self.average = None
        if averaged:
            self.average = swa_utils.AveragedModel(self.private.module, multi_avg_fn=averaging)
        if state is not None:
            self.private.load_state_dict(state[0])
            self.average.load_state_dict(state[1])
        self.seen = self.private.steps_executed
        self.passed, self.rates, self.figures = [], [], []
        train(self.private, steps=stop, after_step=self.after)

    def after(self):
        if self.private.steps_executed == self.seen:
            return  # in the middle of a step
        self.seen += 1
        self.passed.append(flat(self.module))
        if self.average is not None:
            self.average.update_parameters(self.private.module)
        self.module.eval()
        with torch.no_grad():
            self.figures.append(float(self.module(public_images()).square().mean()))
            if self.average is not None:
                self.average(public_images())
        self.module.train()
        self.scheduler.step(self.figures[-1])
        self.rates.append(self.private.optimizer.param_groups[0]["lr"])

    def state(self):
        return through_disk([self.private.state_dict(), self.average.state_dict()])


AVERAGES = {
    "SWA": (None, lambda past: torch.stack(past).double().mean(0)),
    "EMA": (
        swa_utils.get_ema_multi_avg_fn(0.7),
        lambda past: functools.reduce(
            lambda mean, new: 0.7 * mean + 0.3 * new.double(), past[1:], past[0].double()
        ),
    ),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_are_those_of_the_released_parameters_and_resume(kind):
    averaging, expected = AVERAGES[kind]
    whole = Watched(averaging)
    assert len(whole.passed) == STEPS
    # One rounding of a float32 for each of the steps, of numbers of order 1.
    torch.testing.assert_close(
        flat(whole.average).double(), expected(whole.passed), rtol=0, atol=STEPS * 2.0**-23
    )
    resumed = Watched(averaging, state=Watched(averaging, stop=STOP).state())
    assert torch.equal(flat(resumed.module), flat(whole.module))
    assert torch.equal(flat(resumed.average), flat(whole.average))
    assert resumed.rates == whole.rates[STOP:]


def test_an_average_leaves_the_run_as_it_is():
    """Its forward passes, too, which are those of a copy of the private module."""
    assert torch.equal(flat(Watched().module), flat(Watched(averaged=False).module))


def test_a_rate_that_follows_a_figure_falls_as_it_does_without_a_run():
    """Against torch's scheduler by itself, given the same figures."""
    run = Watched()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = lr_scheduler.ReduceLROnPlateau(plain, factor=0.5, patience=0)
    rates = []
    for figure in run.figures:
        scheduler.step(figure)
        rates.append(plain.param_groups[0]["lr"])
    assert run.rates == rates
    assert rates[-1] < 0.05


@pytest.mark.parametrize(
    ("kind", "noted"), [(lr_scheduler.ReduceLROnPlateau, True), (decay, False)]
)
def test_the_guarantee_says_that_a_rate_followed_a_figure(kind, noted):
    """Of whose data, no one but the loop knows."""
    options = {"scheme": everything_every_step(24, 2), "strategy": None}
    _, private, _ = private_run(net, OPTIMIZERS["AdamW"], kind, **options)
    assert ("ReduceLROnPlateau" in str(private.guarantee(1e-3))) is noted
    assert ("ReduceLROnPlateau" in str(private.state_dict()["notes"])) is noted


def test_update_bn_has_nothing_to_do_without_batch_norm():
    run = Watched(stop=STOP)
    before = flat(run.average)
    swa_utils.update_bn(run.private.loader, run.average)
    assert torch.equal(flat(run.average), before)
    train(run.private)
    assert run.private.steps_executed == STEPS


@pytest.mark.parametrize("of_average", [True, False])
def test_update_bn_of_frozen_statistics_is_refused(of_average):
    """They would become statistics of private examples, without noise."""

    def with_frozen_statistics():
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4).eval().requires_grad_(False)
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, nn.Flatten(), nn.Linear(64, 3))

    _, private, _ = private_run(with_frozen_statistics, OPTIMIZERS["AdamW"])
    train(private, steps=STOP)
    average = swa_utils.AveragedModel(private.module)
    # By the layer; or by the loader, whose next batch needs a step first.
    with pytest.raises(RuntimeError, match=r"BatchNorm2d|once for every batch"):
        swa_utils.update_bn(private.loader, average if of_average else private.module)
