"""That what looks like examples is examples: layers are right at every batch size, or refused."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

from dptrain import Gradients
from dptrain.clipping.probe.inputs import Rows, structure
from dptrain.clipping.probe.restoring import replay, untouched
from tests.helpers.engine import MODES, everything_every_step, make, wire

R = 0.05  # below most norms here, so that mixing shows in the sum
SIZES = [2, 3, 4, 5, 6]  # lengths, channels, heads, widths and vocabularies of what follows


class Net(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def loss_of(output, y, reduction="mean"):
    losses = (output.flatten(1).sin() - y[:, None]).square().mean(1)
    return losses.mean() if reduction == "mean" else losses.sum()


def clipped_alone(module, inputs, y):
    """Σ clip(g_i, R) and the norms, every example alone in its batch."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(y)):
        loss = loss_of(module(*(x[i : i + 1] for x in inputs)), y[i : i + 1])
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        norms.append(norm)
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, R / (float(norm) + 1e-6))
    return total, torch.stack(norms)


def run_of(module, inputs, y, mode, **options):
    options.setdefault("scheme", everything_every_step(len(y), 1))
    return wire(
        module=module,
        optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0),
        data=TensorDataset(*inputs, y),
        max_grad_norm=R,
        noise_multiplier=0.0,
        seed=1,
        gradients=Gradients(mode=mode),
        **options,
    )


def step(private):
    """One logical step; the norms of its parts."""
    norms = []
    for *inputs, y in private.loader:
        loss_of(private.module(*inputs), y).backward()
        private.optimizer.step()
        norms.append(private.last_norms)
    return norms


def check(module, inputs, mode, **options):
    """Norms and clipped sum of one step against the loop over the examples."""
    y = torch.linspace(-1, 2, len(inputs[0]), dtype=torch.float64)
    wanted, norms = clipped_alone(copy.deepcopy(module), inputs, y)
    private = run_of(module, inputs, y, mode, **options)
    torch.testing.assert_close(torch.cat(step(private)), norms, rtol=1e-3, atol=1e-9)
    for p, total in zip(private.optimizer.params, wanted, strict=True):
        torch.testing.assert_close(p.grad * len(y), total, rtol=1e-3, atol=1e-9)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ids(*shape, most=5):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(1))


# A model that keeps the examples apart, and its inputs for so many of them.
APART = {
    "convolution": lambda b: (
        Net(lambda m, x: m.f(m.c(x).tanh().flatten(1)), c=nn.Conv2d(3, 4, 2), f=nn.Linear(16, 2)),
        [numbers(b, 3, 3, 3)],
    ),
    "square images": lambda b: (
        Net(
            lambda m, x: m.n(m.c(x[:, None])).tanh().flatten(1),
            c=nn.Conv2d(1, 2, 1),
            n=nn.GroupNorm(1, 2),
        ),
        [numbers(b, 5, 5)],
    ),
    "sequence": lambda b: (
        Net(lambda m, x: m.g(m.f(x).tanh()), f=nn.Linear(4, 5), g=nn.Linear(5, 3)),
        [numbers(b, 4, 4)],
    ),
    "embedding": lambda b: (
        Net(lambda m, i: m.f(m.e(i).tanh()), e=nn.Embedding(5, 4), f=nn.Linear(4, 3)),
        [ids(b, 4)],
    ),
    "one id per example": lambda b: (
        Net(lambda m, i: m.f(m.e(i).tanh()), e=nn.Embedding(7, 4), f=nn.Linear(4, 3)),
        [ids(b, most=7)],
    ),
    "attention": lambda b: (
        Net(
            lambda m, x: m.f(m.a(x)),
            a=_SelfAttention(),
            f=nn.Linear(4, 2),
        ),
        [numbers(b, 5, 4)],
    ),
    "class token": lambda b: (_ClassToken(), [numbers(b, 3, 4)]),
}
# The same, for bookkeeping only.
BOOKED = {
    "torch's attention": lambda b: (
        Net(
            lambda m, x: m.f(m.a(x, x, x)[0]),
            a=nn.MultiheadAttention(4, 2, batch_first=True),
            f=nn.Linear(4, 2),
        ),
        [numbers(b, 5, 4)],
    ),
    "flat positions": lambda b: (
        Net(
            lambda m, i: m.f((m.e(i) + m.p(torch.arange(4))).tanh()),
            e=nn.Embedding(5, 4),
            p=nn.Embedding(4, 4),
            f=nn.Linear(4, 3),
        ),
        [ids(b, 4)],
    ),
    "positions in another order": lambda b: (
        Net(
            lambda m, x: m.f((x + m.p(torch.tensor([1, 3, 0, 2]))).tanh()),
            p=nn.Embedding(4, 4),
            f=nn.Linear(4, 3),
        ),
        [numbers(b, 4, 4)],
    ),
}


class _SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        split = (h.unflatten(-1, (2, 2)).transpose(1, 2) for h in (self.q(x), self.k(x), self.v(x)))
        return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


class _ClassToken(nn.Module):
    """As a vision transformer has it; the token itself is frozen, as no layer owns it."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(numbers(1, 1, 4), requires_grad=False)
        self.body, self.head = _SelfAttention(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


def built(name, rows):
    torch.manual_seed(0)
    module, inputs = {**APART, **BOOKED}[name](rows)
    return module.double(), inputs


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((n, m) for n in APART for m in MODES), *((n, "bookkeeping") for n in BOOKED)],
)
def test_whatever_the_batch_is_as_many_as(name, mode, rows):
    check(*built(name, rows), mode)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", [*APART, *BOOKED])
def test_parts_of_a_batch(name, rows):
    module, inputs = built(name, 4)
    check(module, inputs, "bookkeeping", max_physical_batch_size=rows)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_recurrent_layers(mode, rows):
    torch.manual_seed(0)
    module = Net(
        lambda m, x: m.f(m.r(x)[0][:, -1]),
        r=DPLSTM(3, 4, batch_first=True),
        f=nn.Linear(4, 2),
    )
    check(module.double(), [numbers(rows, 4, 3)], mode)


# Models of which a layer sees something else than the examples first, and that layer.
ELSEWHERE = {
    "positions first": lambda: (
        Net(lambda m, x: m.g(m.f(x.transpose(0, 1)).tanh()).transpose(0, 1),
            f=nn.Linear(3, 4), g=nn.Linear(4, 2)),
        "[fg]",
    ),
    "features first": lambda: (
        Net(lambda m, x: m.f(x.permute(2, 1, 0)[:, :, :1]).permute(2, 1, 0) + m.g(x),
            f=nn.Linear(1, 1), g=nn.Linear(3, 1)),
        "f",
    ),
}  # fmt: skip


# What all examples share: bookkeeping follows it, and Opacus's rules cannot.
SHARED = {
    "query and key ids": lambda: (
        Net(lambda m, x: m.f(x) + m.p((torch.arange(4)[:, None] - torch.arange(4)).abs()).sum(0),
            f=nn.Linear(3, 2), p=nn.Embedding(4, 2)),
        "p",
    ),
    "shared rows of a linear": lambda: (
        Net(lambda m, x: m.f(x) + m.g(torch.eye(4, 3, dtype=x.dtype)),
            f=nn.Linear(3, 2), g=nn.Linear(3, 2)),
        "g",
    ),
    "one row": lambda: (
        Net(lambda m, x: m.f(x) + m.g(torch.ones(1, 3, dtype=x.dtype)),
            f=nn.Linear(3, 2), g=nn.Linear(3, 2)),
        "g",
    ),
}  # fmt: skip


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("name", "rows", "mode"),
    [
        *itertools.product(["features first"], SIZES, MODES),
        # Bookkeeping knows what to do with these.
        *itertools.product(
            ["positions first", *SHARED], SIZES, [mode for mode in MODES if mode != "bookkeeping"]
        ),
    ],
)
def test_a_layer_that_sees_something_else_first_is_refused_by_name(name, rows, mode):
    torch.manual_seed(0)
    module, layer = {**ELSEWHERE, **SHARED}[name]()
    y = torch.zeros(rows, dtype=torch.float64)
    private = run_of(module.double(), [numbers(rows, 4, 3)], y, mode)
    why = f"layer '{layer}' (was called with|for one example changed when another)"
    with pytest.raises(RuntimeError, match=why):
        step(private)


@pytest.mark.parametrize("rows", SIZES)
def test_positions_first_in_bookkeeping(rows):
    torch.manual_seed(0)
    module, _ = ELSEWHERE["positions first"]()
    check(module.double(), [numbers(rows, 4, 3)], "bookkeeping")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [3, 4])
def test_torchs_transformer_with_positions_first(rows, mode):
    """Bookkeeping brings the rows to the front; Opacus's rules take positions for examples."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False)
    for p in layer.self_attn.parameters():
        p.requires_grad_(mode == "bookkeeping")
    module = Net(lambda m, x: m.t(x.transpose(0, 1)).transpose(0, 1), t=layer).double()
    inputs, y = [numbers(rows, 4, 4)], torch.linspace(-1, 2, rows).double()
    alone = copy.deepcopy(module)
    private = run_of(module, inputs, y, mode)
    if mode != "bookkeeping":
        with pytest.raises(
            RuntimeError, match=r"layer 't\.\w+' was called with 4 rows in a batch of"
        ):
            step(private)
        return
    step(private)
    torch.testing.assert_close(private.last_norms, clipped_alone(alone, inputs, y)[1])


# What mixes the examples behind layers that see them first.
MIXING = {
    "batch mean": lambda h: h - h.mean(0),
    "batch statistics": lambda h: F.batch_norm(h.transpose(1, 2), None, None, training=True),
    "attention across rows": lambda h: (h @ h[0].T).softmax(-1) @ h,
    "attention over the batch": lambda h: F.scaled_dot_product_attention(
        *[h.transpose(0, 1)] * 3
    ).transpose(0, 1),
    "the row before": lambda h: h + h.roll(1, 0),
    "the first row": lambda h: h * h[:1],
    "the largest": lambda h: h / (1 + h.abs().amax()),
    "mixup": lambda h: 0.9 * h + 0.1 * h.flip(0),
    "a faint trace": lambda h: h + 1e-4 * h.mean(0),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("where", ["before", "behind", "at the end"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MIXING)
def test_a_module_that_mixes_examples_is_refused_by_layer(name, mode, where):
    torch.manual_seed(0)
    mix = MIXING[name]
    runs = {
        "before": lambda m, x: m.f(mix(x).reshape(x.shape)),
        "behind": lambda m, x: m.g(mix(m.f(x)).reshape(len(x), 4, 3)),
        "at the end": lambda m, x: mix(m.f(x)),
    }
    layers = {"f": nn.Linear(3, 3)} | ({"g": nn.Linear(3, 2)} if where == "behind" else {})
    module = Net(runs[where], **layers).double()
    private = run_of(module, [numbers(5, 4, 3)], torch.zeros(5).double(), mode)
    # Of the largest, the gradient at the layer before tells first.
    layer = "[fg]" if where == "behind" else "f"
    with pytest.raises(RuntimeError, match=f"layer '{layer}'.*changed when another example"):
        step(private)


class Keys(nn.Module):
    """Attention to one key, given a row for each example; each then attends to all these rows."""

    def __init__(self):
        super().__init__()
        self.key = nn.Parameter(torch.tensor([0.3, -0.8, 0.5]))

    def forward(self, x):
        keys = self.key.expand(len(x), 3)
        return F.scaled_dot_product_attention(x, keys, keys)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("example", range(2))
def test_an_example_that_is_no_number_does_not_hide_that_examples_are_mixed(example, number):
    """With its numbers no run is finite, so that nothing would show; it took the other with it."""
    inputs = numbers(2, 1, 3)
    inputs[example] = number
    private = run_of(Keys().double(), [inputs], torch.zeros(2).double(), "bookkeeping")
    with pytest.raises(RuntimeError, match="changed when another example"):
        step(private)


def test_rows_like_most_others_are_what_a_probe_is_made_of():
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, torch.nan], [-torch.inf, 0.0], [5e3, 0.0]])
    mask = torch.tensor([[0.0], [-torch.inf], [0.0], [0.0], [0.0]])  # of a median of 0
    assert Rows.of({"x": x}, {}, 5).ordinary().tolist() == [True, True, False, False, False]
    assert Rows.of({"x": x, "mask": mask}, {}, 5).ordinary().tolist() == [True] + [False] * 4
    broken = torch.full((2, 2), torch.nan)
    assert Rows.of({"x": broken}, {"ids": torch.ones(2, 3).long()}, 2).ordinary().sum() == 0


def small_t5():
    torch.manual_seed(0)
    sizes = T5Config(
        vocab_size=7, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    t5 = T5ForConditionalGeneration(sizes)
    return Net(lambda m, i: m.t5(input_ids=i, decoder_input_ids=i).logits, t5=t5)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bookkeeping"])
@pytest.mark.parametrize("rows", [2, 5, 7])  # heads, positions, vocabulary
def test_t5_with_as_many_rows_as_positions_is_refused(mode, rows):
    """It looks up one (query, key) id for all examples; row i would be query i's."""
    module = small_t5()
    private = run_of(module, [ids(rows, 5) + 1], torch.zeros(rows), mode)
    with pytest.raises(RuntimeError, match=r"relative_attention_bias' was called with 5 rows in a"):
        step(private)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("rows", [2, 5, 7])
def test_t5_whose_relative_positions_all_examples_share(rows):
    module = small_t5()
    inputs = [ids(rows, 5) + 1]
    y = torch.linspace(-1, 2, rows)
    _, norms = clipped_alone(copy.deepcopy(module), inputs, y)
    private = run_of(module, inputs, y, "bookkeeping")
    step(private)
    torch.testing.assert_close(private.last_norms, norms, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_t5_with_frozen_relative_positions_is_right(mode):
    module = small_t5()
    for name, p in module.named_parameters():
        p.requires_grad_("relative_attention_bias" not in name)
    inputs = [ids(5, 5) + 1]
    y = torch.linspace(-1, 2, 5)
    _, norms = clipped_alone(copy.deepcopy(module), inputs, y)
    private = run_of(module, inputs, y, mode)
    step(private)
    torch.testing.assert_close(private.last_norms, norms, rtol=1e-3, atol=1e-6)


class Draws(nn.Module):
    """Draws from every global generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = F.dropout(self.first(x), 0.5) * (1 + random.random() + np.random.rand())  # noqa: NPY002
        return self.last(h)


def trained(probe, mode, state=None, halt=None):
    """Final parameters and norms of a noisy run; its state after so many steps."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(8, 3, generator=generator), torch.randint(0, 2, (8,), generator=generator)
    )
    module = Draws()
    private = make(module, data, mode, scheme=everything_every_step(8, 4), probe=probe)
    if state is not None:
        private.load_state_dict(state)
    found, norms = None, []
    for x, y in private.loader:
        F.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        norms.append(private.last_norms)
        if private.steps_executed == halt:
            found = private.state_dict()
    return [p.detach() for p in module.parameters()], torch.cat(norms), found


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_bit_for_bit_the_one_without_a_probe(mode):
    """Masks, noise and every other draw: of the run, and of one that is resumed half-way."""
    plain, norms, _ = trained("off", mode)
    probed, own_norms, state = trained("shapes", mode, halt=2)
    resumed, later_norms, _ = trained("shapes", mode, state=state)
    assert torch.equal(own_norms, norms)
    assert torch.equal(later_norms, norms[16:])
    for p, q, r in zip(plain, probed, resumed, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


class Counts(nn.Module):
    """Notes how many rows each of its calls has."""

    calls: list = []  # of the class: not put back after a probe  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        self.calls.append(len(x))
        return self.layer(x)


@pytest.mark.parametrize(("probe", "times"), [("shapes", 2), ("first", 1), ("off", 0)])
def test_when_and_on_how_many_rows_the_module_is_probed(probe, times):
    """Once for every structure of the inputs, on a few rows, however many the batch has."""
    Counts.calls.clear()
    x = numbers(64, 5, 3)
    module = Counts().double()
    scheme = everything_every_step(64, 4)
    private = run_of(
        module, [x], torch.zeros(64).double(), "bookkeeping", probe=probe, scheme=scheme
    )
    fed, probes = [], 0
    for number, (rows, y) in enumerate(private.loader):
        Counts.calls.clear()
        loss_of(private.module(rows if number % 2 else rows[:, :4]), y).backward()
        private.optimizer.step()
        *few, whole = Counts.calls
        assert whole == 64
        probes += bool(few)
        fed += few
    assert probes == times
    assert sum(fed) <= times * 64
    assert not fed or max(fed) <= 7


@pytest.mark.parametrize("probe", ["first", "off"])
def test_the_guarantee_says_what_was_not_checked(probe):
    module, inputs = built("sequence", 4)
    options = {"target_delta": 1e-5, "accountant": None}
    private = run_of(module, inputs, torch.zeros(4).double(), "hooks", probe=probe, **options)
    assert any(f"probe={probe!r}" in note for note in private._notes)
    default = run_of(*built("sequence", 4), torch.zeros(4).double(), "hooks")
    assert not any("probe" in note for note in default._notes)


def test_another_probe_is_refused():
    module, inputs = built("sequence", 4)
    with pytest.raises(ValueError, match="probe='always' must be one of"):
        run_of(module, inputs, torch.zeros(4), "hooks", probe="always")


class Keeps(nn.Module):
    """Leaves in itself what its outputs do not show."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.body(x)
        self.kept = [h]
        return self.head(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_past_the_outputs_is_refused(mode):
    module = Keeps().double()
    private = run_of(module, [numbers(4, 3)], torch.zeros(4).double(), mode)
    x, _ = next(iter(private.loader))
    private.module(x)
    with pytest.raises(RuntimeError, match="a gradient reached layer 'body'"):
        module.kept[0].sin().mean().backward()


@pytest.mark.parametrize("mode", MODES)
def test_the_guarantee_says_that_parts_were_called_by_themselves(mode):
    module = Net(lambda m, x: m.g(m.f(x)), f=nn.Linear(3, 3), g=nn.Linear(3, 2)).double()
    options = {"scheme": everything_every_step(4, 2)}
    private = run_of(module, [numbers(4, 3)], torch.zeros(4).double(), mode, **options)
    for step, (x, y) in enumerate(private.loader):
        output = module.g(module.f(x)) if step else private.module(x)
        loss_of(output, y).backward()
        private.optimizer.step()
        notes = private.state_dict()["notes"]
        assert any("without the module's own forward" in note for note in notes) == bool(step)


class Records(nn.Module):
    """Hooks its layer when it first runs, as transformers does to read hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked, self.seen = nn.Linear(2, 2), False, None

    def forward(self, x):
        if not self.hooked:
            self.layer.register_forward_hook(lambda *call: self.seen.append(call[-1]))
            self.hooked = True
        self.seen = []
        self.layer(x)
        return torch.cat(self.seen, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_that_hooks_its_layers_when_it_runs_returns_what_it_did(mode):
    module, x = Records(), torch.randn(3, 2)
    wanted = copy.deepcopy(module)(x)
    private = run_of(module, [x], torch.zeros(3), mode)
    rows, _ = next(iter(private.loader))
    if mode != "bookkeeping":  # no gradient of what such a hook keeps passes Opacus's
        with pytest.raises(RuntimeError, match=r"of layer 'layer', a Linear: .*are missing"):
            private.module(rows)
        return
    torch.testing.assert_close(private.module(rows), wanted)


def test_nothing_shows_in_the_module_that_was_run_untouched():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("passes", torch.zeros(()))
            self.own, self.rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
            self.draws, self.history, self.cache = 0, [0], {"x": [torch.zeros(2)]}

        def forward(self, x):
            self.passes += 1
            self.draws += 1
            self.history.append(self.draws)
            self.cache["x"][0].add_(1)
            self.cache["y"] = x
            self.new = x
            self.layer.extra = x
            return self.layer(x) * torch.rand(2, generator=self.own) * self.rng.random()

    module = Leaves()
    module.layer.weight.grad = torch.ones(2, 3)
    version, buffer, gradient = module.passes._version, module.passes, module.layer.weight.grad
    outputs = []
    torch.manual_seed(1)
    again = replay()
    for _ in range(2):
        with untouched(module):
            outputs.append(module(torch.ones(4, 3)) + torch.rand(()) + random.random())
            outputs[-1].sum().backward()
        again()
    assert torch.equal(*outputs)
    assert module.passes is buffer
    assert (buffer.item(), buffer._version) == (0, version)
    assert module.history == [0]
    assert module.draws == 0
    assert list(module.cache) == ["x"]
    assert torch.equal(module.cache["x"][0], torch.zeros(2))
    assert not hasattr(module, "new")
    assert not hasattr(module.layer, "extra")
    assert module.layer.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 3))
    fresh = torch.Generator().manual_seed(3)
    assert torch.equal(module.own.get_state(), fresh.get_state())


def _mixed(m, x, share):
    h = torch.relu(m.a(x))
    return m.b(h - share * h.mean(0) if share else h)  # 0 · NaN would be a tie


SWITCHES = {
    "a number": (lambda m, x, on: _mixed(m, x, on), float),
    "in a dictionary": (lambda m, x, on: _mixed(m, x, on["mix"]), lambda on: {"mix": on}),
    "a number in one": (lambda m, x, on: _mixed(m, x, on["mix"]), lambda on: {"mix": 0.3 * on}),
    "in a list of them": (lambda m, x, on: _mixed(m, x, on[0]["mix"]), lambda on: [{"mix": on}]),
    "of a layer": (lambda m, x, _: _mixed(m, x, m.a.mixes), lambda on: None),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", SWITCHES)
def test_what_is_switched_on_later_is_probed_then(kind, mode):
    """A share of mixing that warms up from 0, say: nothing of its first step is released."""
    run, argument = SWITCHES[kind]
    torch.manual_seed(0)
    model = Net(run, a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    model.a.mixes = False
    data = TensorDataset(torch.randn(12, 4), torch.zeros(12))
    private = make(model, data, mode, scheme=everything_every_step(12, 3))

    def step(x, y, on):
        private.optimizer.zero_grad()
        loss_of(private.module(x, argument(on)), y).backward()
        private.optimizer.step()

    for number, (x, y) in enumerate(private.loader):
        if number == 2:
            model.a.mixes = True
            with pytest.raises(RuntimeError, match="'b' for one example changed when"):
                step(x, y, True)
            break
        step(x, y, False)
    assert private.steps_executed == 2


def test_numbers_of_every_batch_anew_are_not_probed_anew():
    x = torch.zeros(3, 2)

    def of(number):
        return structure({"x": x, "t": number, "d": {"n": int(2 * number), "all": [number]}}, 3)

    assert of(0.5) == of(2.0) == of(-1.5) != of(0.0)
