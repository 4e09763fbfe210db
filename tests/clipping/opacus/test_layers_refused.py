"""What modes hooks and functorch refuse, as Opacus's rules get it wrong."""

import pytest
import torch
from torch import nn

from tests.helpers.older_modes import ROWS, Call, batch, check, older, step, wired, with_features


class Scaled(nn.Module):
    """A layer without a rule, and one inside it."""

    def __init__(self, inner):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(3)), inner

    def forward(self, x):
        return self.inner(x * self.scale)


@older
def test_a_layer_inside_one_without_a_rule_and_elsewhere_is_refused(mode):
    """Opacus differentiates the outer one with all inside it, and the inner one once more."""
    inner = nn.Linear(3, 3)
    for layers in ([inner, Scaled(inner)], [Scaled(inner), nn.Tanh(), inner]):
        with pytest.raises(ValueError, match=r"is a part of '0\.\d'.*counted twice"):
            wired(with_features(nn.Sequential(*layers), shape=(3,)), mode)


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def padded(how, dimensions=2):
    torch.manual_seed(0)
    layer = CONVOLUTIONS[dimensions](2, 3, 3, padding=1, padding_mode=how)
    return with_features(layer, shape=(2, 4, 4, 4)[: dimensions + 1])


@pytest.mark.parametrize("dimensions", CONVOLUTIONS)
@pytest.mark.parametrize("how", ["circular", "reflect", "replicate"])
def test_padding_that_opacus_takes_for_zeros_is_refused(how, dimensions):
    with pytest.raises(
        ValueError, match=rf"layer '0': Conv.d with padding_mode='{how}'.*functorch"
    ):
        wired(padded(how, dimensions), "hooks")


@pytest.mark.parametrize("how", ["circular", "reflect", "replicate"])
def test_functorch_knows_every_padding(how):
    check(padded(how), "functorch")


@older
def test_padding_of_a_convolution_whose_bias_alone_is_trained_is_no_matter(mode):
    a = padded("circular")
    a.module[0].weight.requires_grad_(False)
    check(a, mode)


def added(x, f, g):
    h = f(x)
    h += x
    return g(h)


def assigned(x, f, g):
    h = f(x)
    h[:, 0] = 1.0
    return g(h)


@older
@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), r"\['0\.1'\]"),
        (lambda: Call(added, nn.Linear(3, 3), nn.Linear(3, 2)), r"h = h \+ x"),
        (lambda: Call(assigned, nn.Linear(3, 3), nn.Linear(3, 2)), "clone h before"),
    ],
)
def test_outputs_written_to_are_refused_with_the_remedy(build, match, mode):
    a = with_features(build(), shape=(3,))
    with pytest.raises(RuntimeError, match=rf"in place.*{match}.*bookkeeping"):
        step(wired(a, mode))


def with_ids(ids):
    torch.manual_seed(0)
    module = Call(lambda x, f, p: f(x) + p(ids(x)), nn.Linear(3, 3), nn.Embedding(20, 3))
    return with_features(module, shape=(3,))


@older
@pytest.mark.parametrize(
    ("probe", "match"),
    [
        ("off", r"4 consecutive ids in a batch of 4 rows.*expand\(rows, -1\)"),
        ("shapes", "another example was left out .*positions counted along"),
    ],
)
def test_positions_that_look_like_one_id_an_example_are_refused(mode, probe, match):
    """Row i would be the gradient of position i from all examples, which one example changes."""
    with pytest.raises(RuntimeError, match=match):
        step(wired(with_ids(lambda x: torch.arange(2, 2 + len(x))), mode, probe=probe))


@older
def test_one_row_of_positions_for_all_examples_is_refused(mode):
    a = batch(
        Call(lambda x, f, p: f(x) + p(torch.arange(5)[None]), nn.Linear(3, 3), nn.Embedding(5, 3)),
        torch.randn(ROWS, 5, 3, dtype=torch.float64),
    )
    with pytest.raises(RuntimeError, match="was called with 1 rows in a batch of"):
        step(wired(a, mode))


@older
def test_torch_attention_is_refused_by_name(mode):
    a = with_features(
        Call(lambda x, f: f(x, x, x)[0], nn.MultiheadAttention(4, 2, batch_first=True)),
        shape=(5, 4),
    )
    with pytest.raises(ValueError, match=r"layer '0\.layers\.0'.*MultiheadAttention"):
        wired(a, mode)
