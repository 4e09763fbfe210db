"""Nothing but the release leaves a private step: what a forward pass leaves behind is refused."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from dptrain import PrivacyEngine
from dptrain.clipping.probe import untouched
from dptrain.engine import state_watch
from tests.helpers.engine import (
    everything_every_step,
    flat,
    images,
    make,
    reference_sum,
    released,
    small_net,
    train,
)


class Leaves(nn.Module):
    """Has a bit of everything, and leaves something in it when ``leave`` says what."""

    def __init__(self, leave=None):
        super().__init__()
        self.net = small_net()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.plain = torch.zeros(2)
        self.array = np.zeros(3)
        self.several = {"list": [torch.zeros(1), (torch.zeros(1), 2.0)], "last": deque([0.0])}
        self.seen = {0}
        self.calls = 0
        self.meter = Meter()
        self.unlisted = [nn.Linear(1, 1).requires_grad_(False)]
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.tensors, self.bytes = {torch.zeros(1)}, bytearray(3)
        self.learned = torch.zeros(2, requires_grad=True)
        self.drawn = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.legacy = np.random.RandomState(0)
        self.leave = Switch(leave)

    def forward(self, x):
        y = self.frozen(self.net(x))
        with torch.no_grad():
            self.leave(self, x.mean() + 1)
        return y


class Switch:
    """What to leave; a callable is not looked into."""

    def __init__(self, what=None):
        self.what = what

    def __call__(self, *arguments):
        if self.what is not None:
            self.what(*arguments)


class Meter:
    def __init__(self):
        self.total, self.tensor = 0.0, torch.zeros(1)


def _spoil(name, by):
    """``by(what, value)``, where ``what`` is the attribute at the name."""

    def leave(module, value):
        by(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)

    return leave


def _add(owner, name, value):
    getattr(owner, name).add_(value)


def _data(owner, name, value):
    getattr(owner, name).data.add_(value)


def _numpy(owner, name, value):
    getattr(owner, name).detach().numpy().flat[0] += float(value)


def _assign(owner, name, value):
    setattr(owner, name, value.detach().expand(2))


def _memory(owner, name, value):
    getattr(owner, name).data = getattr(owner, name).data + value


LEAVES = {
    "buffer written": ("mean", _spoil("mean", _add)),
    "buffer past its version": ("mean", _spoil("mean", _data)),
    "buffer by numpy": ("mean", _spoil("mean", _numpy)),
    "buffer assigned": ("mean", _spoil("mean", _assign)),
    "buffer that is not saved": ("hidden", _spoil("hidden", _add)),
    "buffer's memory exchanged": ("mean", _spoil("mean", _memory)),
    "buffer added": ("more", lambda m, v: m.register_buffer("more", v.clone())),
    "sparse buffer": ("adjacency", lambda m, v: m.adjacency._values().data.add_(v)),
    "frozen bias": ("bias", _spoil("frozen.bias", _add)),
    "frozen weight past its version": ("weight", _spoil("frozen.weight", _data)),
    "trained bias": ("bias", _spoil("net.5.bias", _add)),
    "trained weight past its version": ("weight", _spoil("net.5.weight", _data)),
    "tensor attribute": ("plain", _spoil("plain", _add)),
    "tensor attribute past its version": ("plain", _spoil("plain", _data)),
    "tensor attribute assigned": ("plain", _spoil("plain", _assign)),
    "new attribute": ("last", _spoil("last", _assign)),
    "array": ("array", lambda m, v: m.array.__setitem__(1, float(v))),
    "in a list": ("several", lambda m, v: m.several["list"][0].add_(v)),
    "in a tuple": ("several", lambda m, v: m.several["list"][1][0].data.add_(v)),
    "list element": ("several", lambda m, v: m.several["list"].append(v)),
    "dict element": ("several", lambda m, v: m.several.update(more=float(v))),
    "deque": ("several", lambda m, v: m.several["last"].append(float(v))),
    "set": ("seen", lambda m, v: m.seen.add(float(v))),
    "number": ("calls", lambda m, v: setattr(m, "calls", m.calls + float(v))),
    "number in an object": ("meter", lambda m, v: setattr(m.meter, "total", float(v))),
    "tensor in an object": ("meter", lambda m, v: m.meter.tensor.add_(v)),
    "on a parameter": ("sum", lambda m, v: setattr(m.frozen.weight, "sum", float(v))),
    "on a trained one": ("sum", lambda m, v: setattr(m.net[5].weight, "sum", v.clone())),
    "on a buffer": ("sum", lambda m, v: setattr(m.mean, "sum", [float(v)])),
    "tensor in a set": ("tensors", lambda m, v: next(iter(m.tensors)).data.add_(v)),
    "another tensor in a set": ("tensors", lambda m, v: m.tensors.add(v)),
    "byte array": ("bytes", lambda m, v: m.bytes.__setitem__(0, 7)),
    "gradient of an attribute": ("grad", lambda m, v: setattr(m.learned, "grad", v.expand(2))),
    "gradient of a buffer": ("grad", lambda m, v: setattr(m.mean, "grad", v.expand(1))),
    "generator": ("drawn", lambda m, v: torch.rand(int(v.abs()) + 1, generator=m.drawn[0])),
    "numpy's generator": ("drawn", lambda m, v: m.drawn[1].random()),
    "Python's generator": ("drawn", lambda m, v: m.drawn[2].random()),
    "generator of another kind": ("legacy", lambda m, v: m.legacy.rand()),
    "evaluation mode of a layer": ("frozen", lambda m, v: m.frozen.eval()),
    "module in a list": ("unlisted", lambda m, v: m.unlisted[0].weight.add_(v)),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.usefixtures("_unfollowed")  # which would name another fault of these
def test_what_a_forward_pass_leaves_is_refused_and_named(mode, kind):
    """Before anything is released: neither noise nor ledger have moved, and no weight."""
    name, leave = LEAVES[kind]
    model = Leaves(leave)
    private = make(model, images(), mode, scheme=everything_every_step(24, 2))
    with pytest.raises(
        RuntimeError, match=rf"'{name}' .*without noise; this step released nothing.* Remedy"
    ):
        train(private)
    assert private.steps_executed == 0
    assert private.optimizer.ledger.digests == []
    assert "trained" in kind or torch.equal(flat(model.net), flat(small_net()))
    with pytest.raises(RuntimeError, match="without noise"):  # it stays so
        private.state_dict()
    with pytest.raises(RuntimeError, match="without noise"):
        train(private)


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if "weight" not in kind])
def test_a_probe_puts_back_whatever_the_watch_compares(kind):
    """One walk for both: what a pass leaves in any of these places is gone after ``untouched``."""
    torch.manual_seed(0)
    model = Leaves(LEAVES[kind][1])
    if kind.endswith("bias") or kind in ("module in a list", "on a parameter"):
        pytest.skip("parameters themselves are not put back")
    before = [state_watch._Look.at(model, lambda _: False, ()) for _ in range(2)]
    assert not before[0].changes(before[1])
    gradients = [p.grad for p in model.parameters()]
    values = {path: m.clone() for path, m in before[0].memory().items()}
    with untouched(model):
        model(torch.randn(3, 1, 4, 4)).sum().backward()
    after = state_watch._Look.at(model, lambda _: False, ())
    assert not before[0].changes(after)
    assert before[0].modes == after.modes
    assert all(torch.equal(m, values[path]) for path, m in after.memory().items())
    assert list(after.entries) == list(before[0].entries)
    assert [p.grad for p in model.parameters()] == gradients


class KeepsFrozen(nn.Module):
    """Has a part that stays in evaluation mode when the whole trains, as frozen norms do."""

    def __init__(self):
        super().__init__()
        self.net, self.frozen = small_net(), nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        return self.frozen(self.net(x))


def test_the_whole_may_be_put_into_training_mode_after_a_batch_was_taken():
    """As trainers do, which evaluate between steps."""
    private = make(KeepsFrozen(), images(), scheme=everything_every_step(24, 3))
    _evaluating_between(private)
    assert private.steps_executed == 3


def _evaluating_between(private, within=lambda step: None):
    private.module.eval()
    for step, (x, y) in enumerate(private.loader):
        private.module.train()
        loss = nn.functional.cross_entropy(private.module(x), y)
        within(step)
        loss.backward()
        private.optimizer.step()
        private.module.eval()


def test_a_mode_that_a_forward_pass_leaves_after_train_is_refused():
    """Modes of the step before say what train() of the whole makes of the parts."""
    private = make(KeepsFrozen(), images(), scheme=everything_every_step(24, 3), probe="off")
    with pytest.raises(RuntimeError, match=r"the mode of layer 'net\.2' .*to evaluation"):
        _evaluating_between(private, lambda step: private.module.net[2].train(step != 1))
    assert private.steps_executed == 1


def test_a_module_that_leaves_nothing_trains(mode):
    """As the same net does with none of it."""
    data, scheme = images(), everything_every_step(24, 2)
    with_state = make(Leaves(), data, mode, scheme=scheme, noise_multiplier=0.0)
    train(with_state)
    assert with_state.steps_executed == 2
    without = make(small_net(), data, mode, scheme=scheme, noise_multiplier=0.0)
    train(without)
    assert with_state.guarantee(1e-5).notes == without.guarantee(1e-5).notes


@pytest.mark.parametrize("part", [0, 1, 2])
def test_every_microbatch_is_watched(mode, part):
    count = iter(range(100))

    def leave(module, value):
        if next(count) == part:
            module.mean.add_(value)

    private = make(
        Leaves(leave),
        images(),
        mode,
        scheme=everything_every_step(24, 1),
        max_physical_batch_size=8,
        probe="off",  # which would be counted too
    )
    batches = []
    with pytest.raises(RuntimeError, match="'mean' of"):
        train(private, after_step=lambda: batches.append(1))
    assert len(batches) == part


def test_what_an_abandoned_batch_left_is_found_with_the_next():
    model = Leaves(LEAVES["buffer past its version"][1])
    private = make(model, images(), scheme=everything_every_step(24, 2))
    for x, _ in private.loader:
        private.module(x)
        break
    model.leave.what = None
    with pytest.raises(RuntimeError, match="'mean' of"):
        train(private)


def test_a_second_attempt_at_a_step_is_watched():
    """The first one is refused for want of gradients, when nothing has been left yet."""
    model = Leaves()
    private = make(model, images(), scheme=everything_every_step(24, 2))
    x, y = next(iter(private.loader))
    with pytest.raises(RuntimeError, match="no per-example gradients"):
        private.optimizer.step()
    model.leave.what = LEAVES["buffer written"][1]
    nn.functional.cross_entropy(private.module(x), y).backward()
    with pytest.raises(RuntimeError, match="'mean' of"):
        private.optimizer.step()


def test_calls_of_a_part_of_the_module_are_watched():
    private = make(Leaves(), images(), "bookkeeping", scheme=everything_every_step(24, 2))
    model = private.module
    x, y = next(iter(private.loader))
    nn.functional.cross_entropy(model.net(x), y).backward()
    model.mean.data += x.mean()
    with pytest.raises(RuntimeError, match="'mean' of"):
        private.optimizer.step()


def test_values_that_are_written_again_are_no_change():
    """As a probe that puts a buffer back, or a cache that is filled with what it had, does."""
    model = Leaves(lambda module, _: module.mean.copy_(module.mean.clone()))
    private = make(model, images(), scheme=everything_every_step(24, 2))
    train(private)
    assert private.steps_executed == 2


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("public", ["public", ["mean", "calls"], ("m*", "c*")])
def test_what_is_declared_public_may_change_and_the_guarantee_says_so(mode, public):
    def leave(module, _):
        module.mean.add_(1)
        module.calls += 1

    model = Leaves(leave)
    private = make(model, images(), mode, scheme=everything_every_step(24, 3), buffers=public)
    train(private)
    assert (private.steps_executed, model.calls) == (3, 3)
    notes = " ".join(private.guarantee(1e-5).notes)
    assert "declared public (Gradients(buffers=...))" in notes
    state = copy.deepcopy(private.state_dict())
    other = make(Leaves(leave), images(), mode, scheme=everything_every_step(24, 3))
    with pytest.raises(ValueError, match=r"buffers=\["):
        other.load_state_dict(state)


@pytest.mark.parametrize("kind", ["frozen bias", "trained bias", "tensor attribute"])
def test_declaring_all_public_leaves_parameters_watched(kind):
    model = Leaves(LEAVES[kind][1])
    private = make(model, images(), scheme=everything_every_step(24, 1), buffers="public")
    if kind == "tensor attribute":
        train(private)
        return
    with pytest.raises(RuntimeError, match=r"parameter 'bias' of .*private optimizer"):
        train(private)


@pytest.mark.parametrize(
    ("buffers", "kind", "match"),
    [
        ("mean", ValueError, r"buffers=\['mean'\]"),
        (3, TypeError, "buffers=3"),
        (b"mean", TypeError, "buffers=b'mean'"),
        ([1], TypeError, r"buffers=\[1\]"),
        ([""], TypeError, r"buffers=\[''\]"),
        (["frozen.weight"], ValueError, "are parameters"),
    ],
)
def test_other_values_of_buffers_are_refused(buffers, kind, match):
    with pytest.raises(kind, match=match):
        make(Leaves(), images(), scheme=everything_every_step(24, 1), buffers=buffers)


def test_between_step_and_batch_the_model_is_the_users(mode):
    """Evaluation, schedules of attributes, clamped weights: no part of a private step."""
    model = Leaves()
    private = make(model, images(), mode, scheme=everything_every_step(24, 3))
    public = torch.randn(4, 1, 4, 4)

    def after_step():
        model.leave.what = LEAVES["buffer written"][1]
        model.eval()
        with torch.no_grad():
            private.module(public)
            model.frozen.weight.data.mul_(0.5)
            model.net[5].weight.clamp_(-1, 1)
        model.train()
        model.leave.what, model.calls = None, model.calls + 1

    train(private, after_step=after_step)
    assert private.steps_executed == 3
    private.state_dict()


def test_a_resumed_run_goes_on_and_is_watched(mode):
    scheme, data = everything_every_step(24, 4), images()
    first = make(Leaves(), data, mode, scheme=scheme)
    train(first, steps=2)
    state = first.state_dict()
    model = Leaves()
    second = make(model, data, mode, scheme=scheme)
    second.load_state_dict(state)
    train(second, steps=3)
    model.leave.what = LEAVES["buffer past its version"][1]
    with pytest.raises(RuntimeError, match="'mean' of"):
        train(second)
    with pytest.raises(RuntimeError, match="'mean' of"):  # plain attributes are in no state
        second.load_state_dict(state)


def test_a_state_with_what_was_left_is_not_saved():
    model = Leaves()
    private = make(model, images(), scheme=everything_every_step(24, 2))
    for x, _ in private.loader:
        private.state_dict()
        model.leave.what = LEAVES["frozen weight past its version"][1]
        private.module(x)
        break
    with pytest.raises(RuntimeError, match="'weight' of"):
        private.state_dict()


class Counts(nn.Module):
    """Its extra state is what it counts, kept where nothing else is looked for."""

    def __init__(self):
        super().__init__()
        self.net = small_net()
        self.count = lambda: None  # a function's attributes

    def get_extra_state(self):
        return {"count": torch.tensor(getattr(self.count, "value", 0.0))}

    def set_extra_state(self, state):
        self.count.value = float(state["count"])

    def forward(self, x):
        self.count.value = float(x.sum())
        return self.net(x)


def test_extra_state_is_watched():
    private = make(Counts(), images(), scheme=everything_every_step(24, 1))
    with pytest.raises(RuntimeError, match="'_extra_state' of"):
        train(private)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
@pytest.mark.parametrize("affine", [False, True])
def test_running_statistics_of_instance_norms_are_refused_at_once(mode, kind, affine):
    """At σ = 1000 one example moved such a mean, and so model.pt, from .012 to 1.26."""
    norm = kind(3, track_running_stats=True, affine=affine).requires_grad_(False)
    net = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match=r"layer '1' .*track_running_stats=False.*freeze_batch"):
        make(net, images(), mode, scheme=everything_every_step(24, 1))


def normalized(norm):
    torch.manual_seed(3)
    norm = norm.requires_grad_(False).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3))


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without affine": lambda: nn.BatchNorm2d(4, affine=False),
    "synchronised": lambda: nn.SyncBatchNorm(4),
    "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True, affine=True),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("micro", [None, 1, 5])
def test_frozen_norms_in_eval_mode_train_as_one_example_at_a_time(mode, name, micro):
    model = normalized(NORMS[name]())
    before = copy.deepcopy(model[1].state_dict())
    expected = reference_sum(copy.deepcopy(model).requires_grad_(True), images(8), range(8), 0.5)
    frozen = reference_rows(model, images(8), 0.5)
    private = make(
        model,
        images(8),
        mode,
        scheme=everything_every_step(8, 1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=micro,
    )
    train(private)
    del expected
    torch.testing.assert_close(released(private, 8), frozen, rtol=1e-5, atol=2e-6)
    for key, value in model[1].state_dict().items():
        assert torch.equal(value, before[key]), key
    private.state_dict()


def reference_rows(model, data, max_grad_norm):
    """Σ clip(g_i, R) of the trained parameters by one autograd call per example."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        total = total + gradient * min(1.0, max_grad_norm / float(gradient.norm()))
    return total


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", NORMS)
def test_frozen_norms_refuse_to_run_after_train(mode, name):
    """Whatever the user calls in between: in training mode rows depend on one another."""
    model = normalized(NORMS[name]())
    private = make(model, images(), mode, scheme=everything_every_step(24, 2))
    train(private, steps=1)
    before = copy.deepcopy(model[1].state_dict())
    private.module.train()
    with pytest.raises(RuntimeError, match=r"layer '1', a .* is in training mode.*eval\(\)"):
        train(private)
    for key, value in model[1].state_dict().items():
        assert torch.equal(value, before[key]), key
    model[1].eval()
    train(private)
    assert private.steps_executed == 2
    private.detach().train()(images().tensors[0])  # and then it is the user's


@pytest.mark.parametrize("older", ["hooks", "functorch"])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4).eval(),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(),
    ],
)
def test_older_modes_refuse_to_train_the_weights_of_frozen_norms(older, norm):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), norm)
    with pytest.raises(
        ValueError, match=r"layer '1' .*with trainable weight and bias.*affine=True"
    ):
        make(net, images(), older, scheme=None, epochs=1)


def test_a_batch_norm_without_statistics_is_refused_in_eval_mode(mode):
    norm = nn.BatchNorm2d(4, track_running_stats=False, affine=False).eval()
    with pytest.raises(ValueError, match="mixes the examples"):
        make(nn.Sequential(nn.Conv2d(1, 4, 3), norm), images(), mode, scheme=None, epochs=1)


def test_lazy_layers_are_refused_before_anything_is_read():
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"layer '1' is a LazyLinear .*made-up data"):
        PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data=images(),
            scheme=everything_every_step(24, 1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


class Large(nn.Module):
    """More memory than is compared in a step."""

    def __init__(self, blocks=10):
        super().__init__()
        self.blocks = nn.ParameterList(
            nn.Parameter(torch.zeros(16), requires_grad=False) for _ in range(blocks)
        )
        self.net = nn.Linear(4, 3)
        self.leave = Switch()

    def forward(self, x):
        with torch.no_grad():
            self.leave()
        return self.net(x)


@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(state_watch, "WINDOW", 100)  # one block and a half, of 12


def large_run(steps):
    data = TensorDataset(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    return make(Large(), data, "bookkeeping", scheme=everything_every_step(6, steps))


@pytest.mark.sample(every=4)
@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("step", [0, 3])
def test_of_large_modules_all_values_are_compared_in_the_first_and_the_last_step(block, step):
    private = large_run(steps=4)
    model = private.module
    if step:
        train(private, steps=step)
    model.leave.what = lambda: model.blocks[block].data.add_(1)
    with pytest.raises(RuntimeError, match=rf"'{block}' of layer 'blocks'.*without noise"):
        train(private)
    assert private.steps_executed == step


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("block", range(10))
def test_of_large_modules_values_are_compared_in_turn(block):
    """Written to in every step but the first: refused when its turn comes, within a round."""
    private = large_run(steps=40)
    model = private.module
    train(private, steps=1)
    model.leave.what = lambda: model.blocks[block].data.add_(1)
    with pytest.raises(RuntimeError, match=rf"'{block}' of layer 'blocks'"):
        train(private)
    size = sum(4 * p.numel() for p in model.parameters())
    assert 1 <= private.steps_executed <= -(-size // 100)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("block", [0, 4, 5, 6, 7, 8, 9])
def test_what_was_missed_in_a_large_module_is_found_before_it_is_saved(block):
    private = large_run(steps=40)
    model = private.module
    train(private, steps=1)
    model.leave.what = lambda: model.blocks[block].data.add_(1)
    train(private, steps=2)  # bytes 100 to 200 are compared, of blocks 1 to 3
    model.leave.what = None
    assert model.blocks[block].all()
    with pytest.raises(RuntimeError, match=rf"'{block}' of layer 'blocks'.*later releases"):
        private.state_dict()


@pytest.mark.usefixtures("small_window")
def test_every_step_notices_versions_and_assignments_of_large_modules():
    for leave in (
        lambda m: m.blocks[7].add_(1),
        lambda m: setattr(m.blocks[7], "data", torch.ones(16)),
        lambda m: m.blocks.__setitem__(7, nn.Parameter(torch.ones(16), requires_grad=False)),
    ):
        private = large_run(steps=40)
        model = private.module
        train(private, steps=5)
        model.leave.what = lambda leave=leave, model=model: leave(model)
        with pytest.raises(RuntimeError, match="'7' of layer 'blocks'"):
            train(private)
        assert private.steps_executed == 5


@pytest.mark.usefixtures("small_window")
def test_the_users_own_changes_of_a_large_module_are_not_held_against_it():
    private = large_run(steps=8)
    model = private.module

    def after_step():
        with torch.no_grad():
            model.blocks[3].add_(1)

    train(private, after_step=after_step)
    private.state_dict()
    assert private.steps_executed == 8


class Recomputes(nn.Module):
    """Assigns what it had, as torch.nn.utils.weight_norm does in every forward pass."""

    def __init__(self, by=0.0):
        super().__init__()
        self.net, self.by = small_net(), by
        self.register_buffer("table", torch.arange(4.0))
        self.cached = torch.arange(4.0)

    def forward(self, x):
        self.cached, self.table = torch.arange(4.0) + self.by * x.mean(), self.table.clone()
        return self.net(x)


def test_equal_values_in_another_tensor_are_no_change(mode):
    private = make(Recomputes(), images(), mode, scheme=everything_every_step(24, 2))
    train(private)
    assert private.steps_executed == 2
    private = make(Recomputes(1e-6), images(), mode, scheme=everything_every_step(24, 2))
    with pytest.raises(RuntimeError, match="'cached' of"):
        train(private)


OF_WEIGHTS = {
    "parametrized spectral norm": (nn.utils.parametrizations.spectral_norm, "*._[uv]"),
    "spectral norm": (nn.utils.spectral_norm, "1.weight*"),
    "parametrized weight norm": (nn.utils.parametrizations.weight_norm, None),
    "weight norm": (nn.utils.weight_norm, None),
}


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_frozen_layers_whose_weights_are_computed(mode, name):
    """Spectral norms move their vectors in every forward pass, which depends on weights alone."""
    wrap, public = OF_WEIGHTS[name]

    def net():
        torch.manual_seed(0)
        layer = wrap(nn.Linear(16, 16)).requires_grad_(False)
        return nn.Sequential(nn.Flatten(), layer, nn.Linear(16, 3))

    scheme = everything_every_step(24, 2)
    if public is not None:
        with pytest.raises(RuntimeError, match="without noise"):
            train(make(net(), images(), mode, scheme=scheme))
    private = make(net(), images(), mode, scheme=scheme, buffers=public and [public])
    train(private)
    assert private.steps_executed == 2


class LightningModule(nn.Module):
    """As Lightning 2 has it: the hook that runs is noted in the module, by its name."""

    def __init__(self):
        super().__init__()
        self.net, self._current_fx_name, self._trainer = small_net(), None, Meter()
        self.loss = torch.zeros(())

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("logs", [False, True])
def test_what_lightning_notes_is_not_left_behind_but_a_loss_is(mode, logs):
    model = LightningModule()
    private = make(model, images(), mode, scheme=everything_every_step(24, 2))
    for x, y in private.loader:
        model._current_fx_name, model._trainer.total = "optimizer_step", 1.0
        private.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(private.module(x), y)
        loss.backward()
        if logs:
            model.loss = loss.detach()
            with pytest.raises(RuntimeError, match="'loss' of"):
                private.optimizer.step()
            return
        private.optimizer.step()
        model._current_fx_name = None
    assert private.steps_executed == 2


def test_a_hugging_face_model_may_note_which_loss_it_has(mode):
    """By the labels' dtype, in the first forward pass with labels; anything else is refused."""

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = BertForSequenceClassification(
                BertConfig(
                    vocab_size=20,
                    hidden_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=8,
                    num_labels=3,
                    attn_implementation="eager",
                )
            )
            self.model.bert.embeddings.requires_grad_(False)
            self.config, self.leaves = self.model.config, False

        def forward(self, x, y):
            if self.leaves:
                self.config.summary = float(y.sum())
            return self.model(input_ids=x, labels=y).loss

    ids = torch.randint(1, 20, (24, 5), generator=torch.Generator().manual_seed(0))
    data, model = TensorDataset(ids, ids[:, 0] % 3), Labelled()
    private = make(model, data, mode, scheme=everything_every_step(24, 2))
    for number, (x, y) in enumerate(private.loader):
        private.optimizer.zero_grad()
        model.leaves = bool(number)
        if number:
            private.optimizer.watch.restart()  # the switch is the user's own
            private.optimizer.watch.begin()
        private.module(x, y).backward()
        if number:
            with pytest.raises(RuntimeError, match="'config' of"):
                private.optimizer.step()
            return
        private.optimizer.step()
        assert model.config.problem_type == "single_label_classification"


class Auxiliary(nn.Module):
    """Leaves a term of the loss behind that mixes the examples, as load balancing does."""

    def __init__(self, detach):
        super().__init__()
        self.net, self.detach = small_net(), detach

    def forward(self, x):
        y = self.net(x)
        term = 20 * y.softmax(1).mean(0).square().sum()
        self.term = [term.detach() if self.detach else term]
        return y


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("public", ["public", ["term"]])
@pytest.mark.parametrize("detach", [False, True])
def test_what_is_declared_public_must_have_no_gradient(mode, public, detach):
    """No probe sees what the loss makes of it: one example moved a release by 3.6 R."""
    model = Auxiliary(detach)
    options = {"scheme": everything_every_step(24, 1), "buffers": public, "probe": "off"}
    private = make(model, images(), mode, **options)
    x, y = next(iter(private.loader))
    loss = nn.functional.cross_entropy(private.module(x), y) + model.term[0]
    loss.backward()
    if detach:
        private.optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"'term', declared public .*Remedy: return the tensor"):
        private.optimizer.step()
    assert private.steps_executed == 0


def test_a_compiled_module_is_watched():
    """Its buffers are written to by what the compiler made of the forward pass."""
    model = torch.compile(Leaves(LEAVES["buffer written"][1]), backend="aot_eager")
    private = make(model, images(), "bookkeeping", scheme=everything_every_step(24, 1))
    with pytest.raises(RuntimeError, match="'mean' of"):
        train(private)
