"""Clipping styles by themselves: groups of parameters, factors, and what is left of an example."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import Automatic, ClippingStyle, Flat, PerGroup, PerLayer
from dptrain.clipping.base.weights import clip_factors, group_norms

STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by
NAMES = ["conv.weight", "conv.bias", "block.0.weight", "head.weight", "block.0.bias", "scale"]
SPLIT = {"head": ("head.*", "scale"), "body": ("conv.*", "block.*")}
BAD = [float("nan"), float("inf")]

norm = st.one_of(st.just(0.0), st.floats(1e-20, 1e20), st.floats(0.01, 10))


def rows_of(norms):
    return torch.tensor(norms, dtype=torch.float64)


def test_layers_are_groups_whatever_their_order():
    assert PerLayer().groups(NAMES) == [0, 0, 1, 2, 1, 3]
    assert Flat().groups(NAMES) == Automatic().groups(NAMES) == [0] * 6


def test_patterns_put_parameters_in_groups():
    assert PerGroup(SPLIT).groups(NAMES) == [1, 1, 1, 0, 1, 0]
    twice = {"all": ("*", "*.bias")}  # in one group by two patterns
    assert PerGroup(twice).groups(NAMES) == [0] * 6
    with pytest.raises(ValueError, match=r"'Head\.\*'"):
        PerGroup({"all": ("*",), "head": ("Head.*",)}).groups(NAMES)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"body": ("conv.*", "block.*"), "head": ("head.*",)}, "'scale' is in no group"),
        ({"all": ("*",), "head": ("head.*",)}, r"'head.weight' is in several groups"),
        ({"all": ("*",), "rest": ("nothing",)}, r"\['nothing'\] of group 'rest' match no"),
        ({"all": ("*", "conv.gain")}, r"\['conv.gain'\] of group 'all' match no"),
    ],
)
def test_groups_that_do_not_divide_the_parameters_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        PerGroup(groups).groups(NAMES)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerGroup(["*"]), TypeError, "groups="),
        (lambda: PerGroup({}), ValueError, "at least one"),
        (lambda: PerGroup({"all": "*"}), TypeError, r"groups\['all'\]"),
        (lambda: PerGroup({"all": ()}), ValueError, r"groups\['all'\]=\(\)"),
        (lambda: PerGroup({"all": ("",)}), ValueError, r"groups\['all'\]"),
        (lambda: PerGroup(SPLIT, {"head": 1.0}), ValueError, "one number for each"),
        (
            lambda: PerGroup(SPLIT, {"head": 1, "body": 1, "x": 1}),
            ValueError,
            "one number for each",
        ),
        (lambda: PerGroup(SPLIT, {"head": 1.0, "body": 0.0}), ValueError, r"shares\['body'\]"),
        (
            lambda: PerGroup(SPLIT, {"head": 1.0, "body": math.nan}),
            ValueError,
            "finite and above 0",
        ),
        (lambda: PerGroup(SPLIT, {"head": "1", "body": 1.0}), TypeError, r"shares\['head'\]"),
        (lambda: PerGroup(SPLIT, [1.0, 1.0]), TypeError, "shares="),
        (lambda: Automatic(0.0), ValueError, "gamma=0.0"),
        (lambda: Automatic(9e-7), ValueError, "1e-06"),
        (lambda: Automatic(math.inf), ValueError, "finite"),
        (lambda: Automatic(math.nan), ValueError, "finite"),
        (lambda: Automatic("0.01"), TypeError, "gamma="),
        (lambda: Automatic(True), TypeError, "gamma="),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_the_squares_of_the_groups_bounds_add_up_to_that_of_the_bound(shares, bound):
    groups = {f"g{i}": (f"p{i}",) for i in range(len(shares))}
    style = PerGroup(groups, {f"g{i}": s for i, s in enumerate(shares)})
    found = style.bounds(bound)
    assert math.hypot(*found) == pytest.approx(bound, rel=1e-14)
    largest = max(range(len(shares)), key=shares.__getitem__)
    for r, s in zip(found, shares, strict=True):
        assert r == pytest.approx(found[largest] * (s / shares[largest]), rel=1e-14, abs=1e-300)


@settings(derandomize=True, deadline=None)
@given(st.lists(norm, min_size=1, max_size=20), st.floats(1e-3, 1e3), st.floats(1e-200, 1e200))
def test_one_group_is_flat(norms, bound, share):
    for dtype in (torch.float32, torch.float64):
        column = torch.tensor(norms, dtype=dtype)[:, None]
        expected = Flat().clip(column, bound)
        for style in (PerLayer(), PerGroup({"a": ("*",)}, {"a": share})):
            for a, b in zip(style.clip(column, bound), expected, strict=True):
                assert torch.equal(a, b)


def by_formula(style, norms, bound):
    """Factors and norm of the contribution of one example, from the papers' formulas."""
    groups = len(norms)
    if isinstance(style, Automatic):
        factors = [bound / (norms[0] + style.gamma)]
    else:
        limits = [bound / math.sqrt(groups)] * groups
        if isinstance(style, PerGroup):
            limits = [bound * 3 / 5, bound * 4 / 5]
        factors = [min(1.0, r / (n + STABILITY)) for n, r in zip(norms, limits, strict=True)]
    return factors, math.sqrt(sum((f * n) ** 2 for f, n in zip(factors, norms, strict=True)))


@settings(derandomize=True, deadline=None)
@given(st.data(), st.floats(1e-2, 1e2))
def test_factors_are_those_of_the_formula(data, bound):
    style, groups = data.draw(
        st.sampled_from(
            [
                (Flat(), 1),
                (Automatic(), 1),
                (Automatic(gamma=1.5), 1),
                (PerLayer(), 5),
                (PerGroup(SPLIT, {"body": 4, "head": 3}), 2),
            ]
        )
    )
    row = st.lists(norm, min_size=groups, max_size=groups)
    norms = data.draw(st.lists(row, min_size=1, max_size=6))
    factors, contributed = style.clip(rows_of(norms), bound)
    for i, row in enumerate(norms):
        expected, left = by_formula(style, row, bound)
        assert factors[i].tolist() == pytest.approx(expected, rel=1e-12)
        assert left <= float(contributed[i]) * (1 + 1e-12)
        assert float(contributed[i]) <= bound * (1 + 1e-12)
        # No more is charged than the bound's stability term makes of it.
        assert float(contributed[i]) <= left + 10 * STABILITY


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("style", [PerLayer(), PerGroup({"a": ("a*",), "b": ("b*",)})])
def test_a_row_broken_in_one_group_is_left_out_of_all(style, bad):
    norms = rows_of([[0.1, 0.2], [0.3, bad], [bad, bad], [3.0, 0.5]])
    whole = rows_of([[0.1, 0.2], [3.0, 0.5]])
    asked = []

    def admit(contributed):
        asked.append(contributed)
        return torch.full_like(contributed, 0.5)

    weights = torch.ones(4, dtype=torch.float64)
    factors, finite = clip_factors(norms, 1.0, weights, admit, style)
    assert finite.tolist() == [True, False, False, True]
    assert factors[1:3].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    expected, contributed = style.clip(whole, 1.0)
    torch.testing.assert_close(factors[[0, 3]], 0.5 * expected)
    torch.testing.assert_close(asked[0][[0, 3]], contributed)
    assert asked[0][1:3].tolist() == [0.0, 0.0]


def test_weights_multiply_every_group():
    norms = rows_of([[3.0, 4.0], [3.0, 4.0], [0.1, 0.1]])
    weights = rows_of([1.0, 0.25, 0.0])
    factors, _ = clip_factors(norms, 1.0, weights, None, PerLayer())
    torch.testing.assert_close(factors[1], 0.25 * factors[0])
    assert factors[2].tolist() == [0.0, 0.0]


def test_norms_of_groups_are_those_of_their_parameters_together():
    torch.manual_seed(0)
    gradients = [torch.randn(4, n) for n in (3, 5, 2, 7)]
    groups = [2, 0, 2, 0]
    parts = [g.norm(dim=1) for g in gradients]
    found = group_norms([*parts, None], [*groups, 1])
    assert found.shape == (4, 3)
    torch.testing.assert_close(found[:, 0], torch.cat([gradients[1], gradients[3]], 1).norm(dim=1))
    torch.testing.assert_close(found[:, 2], torch.cat([gradients[0], gradients[2]], 1).norm(dim=1))
    assert found[:, 1].tolist() == [0.0] * 4  # a group that took no part
    mixed = group_norms([parts[0], parts[1].double()], [0, 0])
    assert mixed.dtype == torch.float64
    with pytest.raises(ValueError, match="no parameter took part"):
        group_norms([None, None], [0, 1])


@pytest.mark.parametrize("style", [Flat(), Automatic()])
def test_norms_of_several_groups_are_refused_by_styles_with_one(style):
    with pytest.raises(ValueError, match="has one"):
        style.clip(torch.ones(3, 2), 1.0)


@pytest.mark.parametrize(
    "style",
    [Flat(), PerLayer(), PerGroup(SPLIT), PerGroup(SPLIT, {"body": 4, "head": 3}), Automatic(0.5)],
)
def test_styles_are_read_back_from_json(style):
    value = json.loads(json.dumps(style.to_dict()))
    assert ClippingStyle.from_dict(value) == style
    assert value == style.to_dict()  # as a checkpoint compares it


def test_what_is_no_style_is_not_read():
    with pytest.raises(ValueError, match=r"known: .*'Automatic', 'Flat', 'PerGroup', 'PerLayer'"):
        ClippingStyle.from_dict({"type": "Adaptive"})
    with pytest.raises(ValueError, match=r"Automatic: .*'gama'"):
        ClippingStyle.from_dict({"type": "Automatic", "gama": 0.1})
    with pytest.raises(ValueError, match="gamma=0"):
        ClippingStyle.from_dict({"type": "Automatic", "gamma": 0})
