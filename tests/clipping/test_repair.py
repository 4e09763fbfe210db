"""dptrain.fix: what a private run refuses is replaced, weights and names stay, the model trains."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import dptrain
from tests.helpers.engine import everything_every_step, make

ROWS = 12


class Block(nn.Module):
    """Of a ResNet: batch norms, a shortcut with one, and activations in place."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x):
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += self.shortcut(x)
        return self.relu(h)


class MobileBlock(nn.Module):
    """Of an EfficientNet: depthwise convolution, squeeze and excitation, SiLU in place."""

    def __init__(self, channels):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide, eps=1e-3),
            nn.SiLU(inplace=True),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.SiLU(inplace=True),
            nn.Conv2d(4, wide, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.project = nn.Sequential(
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x):
        h = self.depthwise(self.expand(x))
        return x + self.project(h * self.squeeze(h))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        Block(8, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def efficientnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True),
        MobileBlock(8), MobileBlock(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def hugging_face_resnet():
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    )
    return Logits(transformers.ResNetForImageClassification(config))


MODELS = {"resnet": resnet, "efficientnet": efficientnet, "hugging face": hugging_face_resnet}


def pictures():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 3, 8, 8, generator=generator)
    y = torch.arange(ROWS) % 3
    return TensorDataset(x + 2 * nn.functional.one_hot(y, 3)[:, :, None, None], y)


def seeded(build):
    torch.manual_seed(0)
    return build().train()


def quietly(model):
    lines = []
    fixed = dptrain.fix(model, report=lines.append)
    return fixed, lines


def disturbed(model):
    """With norm weights that are neither 1 nor 0, so that it shows whether they are carried."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_fixed_model_trains_with_the_weights_names_and_optimizer_that_it_had(build):
    model = disturbed(seeded(build))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"dptrain\.fix\(model\) replaces it by nn\.GroupNorm"):
        make(model, pictures(), None, scheme=everything_every_step(ROWS, 1))
    fixed, lines = quietly(model)
    assert fixed is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    count = sum(isinstance(m, nn.GroupNorm) for m in model.modules())
    assert sum("BatchNorm2d" in line and "became GroupNorm" in line for line in lines) == count > 0
    private = dptrain.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data=pictures(),
        scheme=everything_every_step(ROWS, 12),
        noise_multiplier=1e-3,
        max_grad_norm=1.0,
        gradients=dptrain.Gradients(mode="bookkeeping"),
    )
    losses = []
    for x, y in private.loader:
        private.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(private.module(x), y)
        loss.backward()
        private.optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(32, eps=0.1), (4, 32, 5)),
        (nn.BatchNorm2d(24, affine=False), (4, 24, 3, 3)),
        (nn.BatchNorm2d(64, eps=1e-3).double(), (4, 64, 3, 3)),
        (nn.BatchNorm2d(6, bias=False), (4, 6, 3, 3)),
        (nn.BatchNorm3d(7), (4, 7, 2, 2, 2)),
        (nn.SyncBatchNorm(10), (4, 10, 3)),
        (nn.BatchNorm2d(4, track_running_stats=False).eval(), (4, 4, 3, 3)),
    ],
    ids=str,
)
def test_a_batch_norm_becomes_the_group_norm_of_its_weights(norm, shape):
    norm = disturbed(norm)
    weight, bias, eps, training = norm.weight, norm.bias, norm.eps, norm.training
    if weight is not None:
        weight.requires_grad_(False)
    called = []
    norm.register_forward_hook(lambda *_: called.append(1))
    norm.note = "mine"
    fixed, _ = quietly(norm)
    assert type(fixed) is nn.GroupNorm
    assert fixed.weight is weight
    assert fixed.bias is bias
    assert fixed.training == training
    assert fixed.note == "mine"
    assert not list(fixed.buffers())
    assert "GroupNorm" in repr(fixed)
    x = torch.randn(shape, dtype=torch.float64 if shape[1] == 64 else torch.float32)
    grouped = x.unflatten(1, (fixed.num_groups, -1)).flatten(2)
    centered = grouped - grouped.mean(2, keepdim=True)
    scaled = centered / (centered.square().mean(2, keepdim=True) + eps).sqrt()
    own = [1, -1] + [1] * (len(shape) - 2)
    wanted = scaled.reshape(shape)
    wanted = wanted if weight is None else wanted * weight.view(own)
    wanted = wanted if bias is None else wanted + bias.view(own)
    torch.testing.assert_close(fixed(x), wanted, rtol=1e-4, atol=1e-5)
    assert called == [1]
    copied = copy.deepcopy(fixed)
    copied.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(copied(x), fixed(x))


@pytest.mark.parametrize("channels", [1, 3, 8, 16, 24, 32, 64, 100, 512])
@pytest.mark.parametrize(("norm", "least"), [(nn.BatchNorm1d, 16), (nn.BatchNorm2d, 4)])
def test_groups_leave_something_of_what_they_are_given(norm, least, channels):
    """Of one channel without positions 0 would be left, of two their order."""
    fixed, _ = quietly(norm(channels))
    assert channels % fixed.num_groups == 0
    assert fixed.num_groups == 1 or channels // fixed.num_groups >= least


def test_a_fixed_perceptron_tells_its_rows_apart():
    fixed, _ = quietly(nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32)))
    assert float(fixed(torch.randn(5, 3)).detach().std(0).min()) > 0.01


def test_a_shared_layer_stays_shared():
    norm = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm, nn.Conv2d(4, 4, 1)), "keys_": norm})
    fixed, lines = quietly(model)
    assert fixed["a"] is fixed["b"][0] is fixed["keys_"]
    assert len([line for line in lines if "became" in line]) == 1


def test_a_frozen_batch_norm_stays_and_one_that_is_trained_in_eval_mode_goes():
    frozen = nn.BatchNorm2d(4).eval().requires_grad_(False)
    trained = nn.BatchNorm2d(4).eval()
    fixed, lines = quietly(nn.Sequential(frozen, trained))
    assert fixed[0] is frozen
    assert type(fixed[1]) is nn.GroupNorm
    assert len(lines) == 1


REFUSED = {
    "max_norm": lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Flatten()),
    "by frequency": lambda: nn.Sequential(
        nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Flatten()
    ),
    "bag": lambda: nn.Sequential(
        nn.EmbeddingBag(5, 4, max_norm=1.0).requires_grad_(False), nn.Linear(4, 2)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "data parallel": lambda: nn.DataParallel(nn.Linear(3, 2)),
    "data parallel within": lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 2)), nn.ReLU()),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_by_name_is_mended(build):
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"dptrain\.fix\(model\)"):
        make(build(), data, None, scheme=everything_every_step(4, 1))
    fixed, lines = quietly(build())
    assert not any("left as it is" in line for line in lines)
    make(fixed, data, None, scheme=everything_every_step(4, 1))


def test_an_instance_norm_computes_in_both_modes_what_it_did_in_training():
    norm = disturbed(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    x = torch.randn(2, 3, 4, 4)
    wanted = copy.deepcopy(norm)(x)
    fixed, _ = quietly(norm)
    assert fixed is norm
    torch.testing.assert_close(fixed(x), wanted)
    torch.testing.assert_close(fixed.eval()(x), wanted)
    assert set(fixed.state_dict()) == {"weight", "bias"}


NORMS = {"weight": torch.nn.utils.weight_norm, "spectral": torch.nn.utils.spectral_norm}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
deprecated = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@deprecated
@norms
def test_norms_of_weights_are_parametrizations_of_the_same_parameters(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(5, 4), torch.arange(5) % 2)
    buffers = dptrain.Gradients(buffers=["*._u", "*._v"])
    with pytest.raises(ValueError, match=r"dptrain\.fix\(model\)"):
        make(model, data, "bookkeeping", scheme=everything_every_step(5, 1))
    before = list(model.parameters())
    fixed, lines = quietly(model)
    assert sum("is now the one of torch.nn.utils.parametrizations" in line for line in lines) == 1
    assert {id(p) for p in fixed.parameters()} == {id(p) for p in before}
    private = dptrain.PrivacyEngine().make_private(
        module=fixed,
        optimizer=optimizer,
        data=data,
        scheme=everything_every_step(5, 2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        gradients=buffers,
    )
    values = [p.clone() for p in before]
    for x, y in private.loader:
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
    assert not any(torch.equal(p, value) for p, value in zip(before, values, strict=True))


@deprecated
@norms
@pytest.mark.parametrize("build", [lambda: nn.Conv2d(3, 4, 2), lambda: nn.ConvTranspose2d(3, 4, 2)])
def test_a_parametrization_leaves_what_the_layer_computes(norm, build):
    torch.manual_seed(0)
    layer = norm(build())
    x = torch.randn(2, 3, 5, 5)
    layer(x)  # a spectral norm has moved its vectors once
    wanted = layer.eval()(x).detach()
    state = torch.get_rng_state()
    fixed, _ = quietly(layer)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(fixed(x), wanted)
    assert fixed is layer
    assert not fixed.training


@deprecated
def test_a_frozen_weight_norm_stays():
    layer = torch.nn.utils.weight_norm(nn.Linear(4, 3)).requires_grad_(False)
    _, lines = quietly(nn.Sequential(layer, nn.Linear(3, 2)))
    assert lines == ["dptrain.fix: nothing to change"]
    assert "weight_g" in dict(layer.named_parameters())


def test_the_vectors_of_a_spectral_norm_are_said():
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    _, lines = quietly(layer)
    assert len(lines) == 1
    assert "buffers=['*._u', '*._v']" in lines[0]


class Signed(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).sign()


class Named(nn.BatchNorm1d):
    pass


def test_what_cannot_be_mended_is_said_and_left():
    pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    model = nn.Sequential(Signed(4), Named(4), pruned, nn.LazyLinear(3), nn.LazyBatchNorm1d())
    kinds = [type(layer) for layer in model]
    fixed, lines = quietly(model)
    kinds[1] = nn.GroupNorm
    assert [type(layer) for layer in fixed] == kinds
    for name, what in {
        "0": "forward of its own", "2": "prune.remove", "3": "made-up data", "4": "made-up data"
    }.items():  # fmt: skip
        assert any(f"{name!r}" in line and what in line for line in lines), (name, lines)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_scripted_layers_are_said_and_compiled_ones_traced_anew():
    _, lines = quietly(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
    assert len(lines) == 1
    assert "'1' is a scripted BatchNorm1d" in lines[0]
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(inner, backend="eager")
    x = torch.randn(5, 3)
    before = compiled(x)
    fixed, lines = quietly(compiled)
    assert fixed is compiled
    assert lines[0].startswith("dptrain.fix: '1': BatchNorm1d(4) became")
    assert torch.equal(fixed(x), inner(x))
    assert not torch.allclose(fixed(x), before)


def test_nothing_is_changed_where_nothing_is_refused(capsys):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(inplace=True))
    layers = list(model)
    assert dptrain.fix(model) is model
    assert list(model) == layers
    assert capsys.readouterr().out == "dptrain.fix: nothing to change\n"


def test_a_mixture_of_experts_computes_no_balancing_loss():
    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    model = transformers.MixtralForCausalLM(config)
    ids = torch.arange(6)[None]
    assert model(input_ids=ids).aux_loss is not None
    fixed, lines = quietly(model)
    assert len(lines) == 1
    assert getattr(fixed(input_ids=ids), "aux_loss", None) is None


def test_mistakes():
    with pytest.raises(TypeError, match=r"module=3.*torch\.nn\.Module"):
        dptrain.fix(3)
    with pytest.raises(TypeError, match="report=None"):
        dptrain.fix(nn.Linear(2, 2), report=None)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    make(net, data, "bookkeeping", scheme=everything_every_step(4, 1))
    with pytest.raises(ValueError, match="before make_private"):
        dptrain.fix(net)
