"""The user's own model: what a run attaches to it, and that nothing of it is left afterwards."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dptrain.clipping import HookedModule, modes
from dptrain.clipping.base.stand_in import StandIn
from dptrain.clipping.bookkeeping import part_of_a_run, taps_of
from dptrain.engine import privacy_engine
from tests.clipping.bookkeeping.test_copies import Embedded
from tests.helpers.bookkeeping_runs import (
    ROWS,
    backward,
    case,
    check,
    check_like_loop,
    dense,
    run_of,
)
from tests.helpers.clipping_oracle import reference
from tests.helpers.engine import flat, images, make, separated, small_net, train

HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]


class Normalized(nn.Module):
    """A frozen batch norm, which refuses training mode while a run is attached."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.norm.eval().requires_grad_(False)

    def forward(self, x, *, scale: float = 1.0):
        """Its own words."""
        return self.last(self.norm(self.first(x)).tanh()) * scale


class Weighted(nn.Module):
    """A frozen layer whose weight torch computes, and a trained one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fixed = parametrizations.orthogonal(nn.Linear(4, 4)).requires_grad_(False)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.fixed(x))


class Token(nn.Module):
    """Parameters of the module's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.rand(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.last((rows * self.scale).tanh().mean(1))


class TiedByHand(nn.Module):
    """Uses a layer's weight past the layer, which a run finds in its first probe."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, ids):
        h = self.body(self.embed(ids)).tanh()
        return nn.functional.linear(h, self.embed.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


def compiled():
    a = dense()
    a.module = torch.compile(a.module, backend="eager")
    return a


def compiled_in_place():
    a = dense()
    a.module.compile(backend="eager")
    return a


def with_a_forward_of_its_own():
    """As accelerate sets one, to move what a layer is given to its device."""
    a = dense()
    a.module.forward = functools.partial(forward_of, a.module)
    return a


def forward_of(module, x):
    return type(module).forward(module, x)


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return case(model, torch.randint(1, 11, (ROWS, 5)))


MODELS = {
    "layers": dense,
    "one layer": lambda: case(nn.Linear(4, 2), torch.randn(ROWS, 4)),
    "tied": lambda: case(Embedded(), torch.randint(0, 6, (ROWS, 3))),
    "batch norm": lambda: case(Normalized(), torch.randn(ROWS, 4)),
    "parametrised": lambda: case(Weighted(), torch.randn(ROWS, 4)),
    "attention": lambda: case(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        torch.randn(ROWS, 3, 8),
    ),
    "weight norm": lambda: case(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2)),
        torch.randn(ROWS, 4),
    ),
    "own parameters": lambda: case(Token(), torch.randn(ROWS, 3, 4)),
    "tied by hand": lambda: case(TiedByHand(), torch.randint(0, 6, (ROWS, 3))),
    "LSTM": lambda: case(Recurrent(), torch.randn(ROWS, 3, 4)),
    "own forward": with_a_forward_of_its_own,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "GPT-2": gpt2,
}


@pytest.fixture(params=MODELS)
def a(request):
    torch.compiler.reset()
    yield MODELS[request.param]()
    torch.compiler.reset()


def output_of(module, inputs):
    found = module(*inputs)
    return found if isinstance(found, torch.Tensor) else found.logits


def backward_through(private, inputs):
    next(iter(private.loader))
    output_of(private.module, inputs).square().mean().backward()


def everything(module):
    """What is in the attributes and hooks of all layers and parameters, by identity."""
    found = {}
    for name, m in module.named_modules():
        attributes = vars(m)
        found[name] = type(m), {key: id(value) for key, value in attributes.items()}
        found[name, "hooks"] = {key: dict(attributes[key]) for key in HOOKS}
    for name, p in module.named_parameters():
        carried = {key: value for key, value in vars(p).items() if not key.startswith("_dynamo")}
        found[name, "parameter"] = (
            id(p), p.requires_grad, carried, p._backward_hooks, p._post_accumulate_grad_hooks
        )  # fmt: skip
    return found


@pytest.mark.sample(every=5)
def test_nothing_is_left_in_the_module(a):
    module = a.module
    if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
        output_of(module, a.inputs)  # torch's own marks on what it has traced
    before, signature = everything(module), inspect.signature(module.forward)
    forward, keys = vars(module).get("forward"), list(module.state_dict())
    private = run_of(a, lr=0.1, noise_multiplier=1.0)
    assert private.module is module
    assert part_of_a_run(module) is not None
    assert inspect.signature(module.forward) == signature
    assert list(module.state_dict()) == keys
    backward_through(private, a.inputs)
    private.optimizer.step()
    assert everything(module) != before
    assert private.detach() is private.detach() is module
    assert everything(module) == before
    assert vars(module).get("forward") is forward
    assert list(module.state_dict()) == keys
    assert part_of_a_run(module) is taps_of(module) is None


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("how", ["copy", "pickle", "torch"])
def test_copies_have_nothing_of_the_run(a, how):
    duplicated = {"copy": copy.deepcopy, "pickle": pickled, "torch": saved}[how]
    try:
        duplicated(a.module)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        pytest.skip("nor has it a copy without a run")
    run_of(a)
    duplicate = duplicated(a.module)
    ours, theirs = dict(a.module.named_modules()), dict(duplicate.named_modules())
    assert ours.keys() == theirs.keys()
    for name, layer in theirs.items():
        assert not any(isinstance(value, StandIn) for value in vars(layer).values()), name
        assert {key: len(vars(layer)[key]) for key in HOOKS} == {
            key: len(vars(ours[name])[key]) for key in HOOKS
        }
        forward = layer.forward
        assert getattr(forward, "__self__", layer) is layer
    assert all(not p._post_accumulate_grad_hooks for p in duplicate.parameters())
    with torch.no_grad():
        expected = output_of(a.module, a.inputs)
        assert torch.equal(output_of(duplicate, a.inputs), expected)
    duplicate.train()
    output_of(duplicate, a.inputs).square().mean().backward()  # batch norms too
    assert all(p.grad is not None for p in duplicate.parameters() if p.requires_grad)
    duplicate.zero_grad()
    assert all(p.grad is None for p in duplicate.parameters())
    assert all(p.grad is None for p in a.module.parameters())
    assert part_of_a_run(duplicate) is None


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sample(every=9)
def test_afterwards_it_trains_like_any_module_and_in_a_new_run(a):
    plain = copy.deepcopy(a.module)
    with run_of(a) as private:
        backward_through(private, a.inputs)
    for module in (a.module, plain):
        module.zero_grad()
        output_of(module, a.inputs).square().mean().backward()
    for p, q in zip(a.module.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    a.module.zero_grad()
    again = run_of(a)
    backward_through(again, a.inputs)
    again.optimizer.step()
    assert again.steps_executed == 1


def test_leaving_a_with_statement_takes_the_taps_off_also_after_an_error():
    net = small_net()
    before = everything(net)
    runs = []

    def fail():
        with make(net, images(), "bookkeeping", **separated(24, 8)) as private:
            runs.append(private)
            train(private, steps=3)
            raise OSError("on the way")

    with pytest.raises(OSError, match="on the way"):
        fail()
    assert everything(net) == before
    assert runs[0].steps_executed == 3


@pytest.mark.sample(every=4)
def test_what_a_run_that_was_ended_still_says_and_refuses(mode):
    net = small_net()
    private = make(net, images(), mode, target_delta=1e-3, **separated(24, 8))
    optimizer = private.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own_step = scheduler.step
    private.register_scheduler(scheduler)
    train(private, steps=3)
    stated, state = private.guarantee(), private.state_dict()
    batches = iter(private.loader)
    next(batches)
    assert private.detach() is net is private.module
    assert scheduler.step == own_step
    assert private.guarantee() == stated
    assert_same(private.state_dict(), state)
    ended = r"private.detach\(\) has ended this run"
    with pytest.raises(RuntimeError, match=ended):
        optimizer.step()
    for take in (lambda: next(batches), lambda: iter(private.loader)):
        with pytest.raises(RuntimeError, match=ended):
            take()
    with pytest.raises(RuntimeError, match=ended):
        private.load_state_dict(state)
    # Where the checkpoint is loaded the run goes on.
    other = make(small_net(), images(), mode, target_delta=1e-3, **separated(24, 8))
    other.register_scheduler(torch.optim.lr_scheduler.StepLR(other.optimizer, 1))
    other.load_state_dict(private.state_dict())
    train(other)
    assert other.steps_executed == 8
    # And what is trained without privacy is no checkpoint of it.
    net(images().tensors[0]).sum().backward()
    optimizer.original_optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"after private.detach\(\).*no longer the result of this run"
    ):
        private.state_dict()
    assert private.guarantee() == stated


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def test_the_way_back_from_the_other_modes():
    for mode in ("hooks", "functorch"):
        net = small_net()
        before = everything(net)
        private = make(net, images(), mode, **separated(24, 8))
        assert private.module is not net
        assert private.state_dict()["module"].keys() == net.state_dict().keys()
        train(private, steps=2)
        assert private.detach() is net
        assert everything(net) == before


def test_the_other_modes_say_once_whose_module_it_is(caplog):
    modes._say_whose.cache_clear()
    for _ in range(2):
        private = make(small_net(), images(), "hooks", **separated(24, 8))
        assert isinstance(private.module, HookedModule)
    assert caplog.text.count("private.detach() returns it") == 1


def test_zero_grad_of_the_model_drops_what_was_reported():
    a = dense()
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    backward(private)
    private.module.zero_grad()
    x, y = (t.flatten(0, 1) for t in private_batch(private))
    (private.module(x) - y[:, None]).square().mean(1).mean().backward()
    check(private, wanted)  # once, and not twice


def private_batch(private):
    batch = private.loader.current
    assert batch is not None
    return [t[batch.indices] for t in private.loader.dataset.tensors]


class Classifier(nn.Module):
    """As Lightning has them: the loop calls ``training_step``."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def step_past_forward(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_model_that_holds_its_run_is_copied_and_not_pickled():
    model = Classifier()
    model.private = make(model, images(), "bookkeeping", **separated(24, 4))
    duplicate = copy.deepcopy(model)
    assert duplicate.private is model.private
    assert part_of_a_run(duplicate) is None
    with pytest.raises(TypeError, match="seeds of its noise"):
        pickled(model)
    del model.private
    assert torch.equal(flat(pickled(model)), flat(model))


def test_a_run_that_fails_to_begin_leaves_the_model_alone(monkeypatch):
    """As where ranks find that they have other data, after all else was made."""

    def refuse(*_):
        raise ValueError("other data")

    net = small_net()
    before = everything(net)
    monkeypatch.setattr(privacy_engine, "begin_together", refuse)
    with pytest.raises(ValueError, match="other data"):
        make(net, images(), "bookkeeping", **separated(24, 4))
    assert everything(net) == before


@pytest.mark.parametrize("step", ["training_step", "step_past_forward"])
def test_methods_that_call_the_model_are_probed_and_others_noted(step):
    private = make(Classifier(), images(), "bookkeeping", target_delta=1e-3, **separated(24, 4))
    for batch in private.loader:
        private.optimizer.zero_grad()
        getattr(private.module, step)(batch).backward()
        private.optimizer.step()
    noted = any("without the module's own forward" in note for note in private.guarantee().notes)
    assert noted is (step == "step_past_forward")
    plain = make(small_net(), images(), "bookkeeping", **separated(24, 4))
    train(plain)
    assert torch.equal(flat(private.module), flat(plain.module))


def test_the_module_within_distributed_data_parallel_is_the_users(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        net = small_net()
        around = nn.parallel.DistributedDataParallel(net)
        private = make(around, images(), "bookkeeping", **separated(24, 4))
        assert private.module is net
        train(private)
    finally:
        torch.distributed.destroy_process_group()
    assert private.detach() is net
    assert part_of_a_run(net) is None


def test_a_model_may_call_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, depth=2):
            if depth:
                return self(self.layer(x).tanh(), depth - 1)
            return self.last(x)

    private = check_like_loop(case(Recursive(), torch.randn(ROWS, 4)))
    assert not any(
        "without the module's own forward" in note for note in private.guarantee(1e-3).notes
    )


def test_an_error_in_a_forward_does_not_end_the_probing():
    """The probe of the next call sees what mixes the examples."""

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.fails, self.mixes = True, False

        def forward(self, x):
            h = self.layer(x)
            if self.fails and len(x) == ROWS:
                raise OSError("on the way")
            return h - h.mean(0) if self.mixes else h

    a = case(Fails(), torch.randn(ROWS, 4))
    private = run_of(a)
    with pytest.raises(OSError, match="on the way"):
        backward(private)
    a.module.fails, a.module.mixes = False, True
    with pytest.raises(RuntimeError, match="no example's contribution can be bounded"):
        a.module(*a.inputs)


def test_hooks_of_the_users_on_the_model_run_once_a_call():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            assert x.dim() == 3  # as the hook makes it, once
            return self.layer(x).mean(1)

    a, shapes = case(Deep(), torch.randn(ROWS, 4)), []

    def add_dimension(module, args):
        shapes.append(tuple(args[0].shape))
        return (args[0][:, None],)

    handle = a.module.register_forward_pre_hook(add_dimension)
    private = check_like_loop(a)
    assert shapes.count((ROWS, 4)) == 1
    assert all(len(shape) == 2 for shape in shapes)
    private.detach()
    handle.remove()
    assert not a.module._forward_pre_hooks


@pytest.fixture
def accelerate():
    """Its state is the process's."""
    package = pytest.importorskip("accelerate")
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_has_put_a_forward_over(accelerate):
    net = small_net()
    private = make(net, images(), "bookkeeping", **separated(24, 8))
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    module, *_ = accelerator.prepare(*private)
    assert module is net
    train(private, steps=2)
    assert accelerator.unwrap_model(module, keep_fp32_wrapper=False) is net
    train(private, steps=2)
    assert not torch.is_autocast_enabled("cpu")  # its context is not one to be entered twice
    assert not any(
        "without the module's own forward" in note for note in private.guarantee(1e-3).notes
    )
    assert taps_of(net) is not None
    over = net.forward
    private.detach()
    assert net.forward == over
    assert part_of_a_run(net) is None
    net(images().tensors[0]).float().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_decoder_generates_and_is_saved_while_it_is_trained(tmp_path):
    transformers = pytest.importorskip("transformers")
    a = gpt2()
    model = a.module.float()
    private = run_of(a, lr=0.1, noise_multiplier=1.0)
    backward_through(private, a.inputs)
    prompt = a.inputs[0][:2]
    tokens = model.eval().generate(prompt, max_new_tokens=3, do_sample=False)
    model.train()
    private.optimizer.step()
    assert private.steps_executed == 1
    assert tokens.shape == (2, 8)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    trained = model.eval().generate(prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(trained, again.eval().generate(prompt, max_new_tokens=3, do_sample=False))
