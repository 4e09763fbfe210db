"""``python -O`` takes ``assert`` statements away, and no check with them."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

WRONG_RULE = """
import torch
from torch import nn
import dptrain
from dptrain.testing import check_layer_rule

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
    def forward(self, x):
        return x * self.weight

def check(rule):
    dptrain.register_layer(Scale, rule)
    try:
        check_layer_rule(Scale(), torch.randn(4, 5, 3))
    except AssertionError as error:
        print("refused:", error)

{rule}
"""
# Members that break one law each.
WRONG_MEMBERS = """
import itertools
from dptrain import BandMF, Poisson
from dptrain.testing import SchemeContract, StrategyContract

class TestScheme(SchemeContract):
    def scheme(self):
        return Poisson(probability=0.1, dataset_size=100, steps=6)

    def large_scheme(self):
        return self.scheme()

class TestStrategy(StrategyContract):
    bands = itertools.count(2)

    def make_strategy(self):
        return BandMF(bands=next(self.bands))
"""
INVARIANTS = """
import numpy as np
from dptrain.accounting.losses.search import least_true
from dptrain.core import checks
from dptrain.engine.release_ledger import StepLedger
from dptrain.sampling.loading.microbatch import split

for call in (
    lambda: checks.invariant(False, "it does not hold"),
    lambda: split(0, np.arange(5), None, physical_units=3),
    lambda: least_true(bool, low=2.0, high=1.0, tolerance=0.1),
    lambda: StepLedger("mechanism").record(3, "digest"),
):
    try:
        call()
    except RuntimeError as error:
        print("a fault of dptrain's" in str(error))
"""


def optimized(*arguments, cwd):
    """What Python prints with ``-O``; the checks have to be no asserts of this file either."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-O", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ('check(lambda layer, x, g: {"weight": g.sum(1)})', "refused: 'weight': "),
        ('check(lambda layer, x, g: {"weight": (x[0] * g).sum(1)})', ""),
    ],
)
def test_a_layer_rule_is_checked(tmp_path, rule, says):
    found = optimized("-c", WRONG_RULE.format(rule=rule), cwd=tmp_path)
    assert found.startswith(says)
    assert bool(found) is bool(says)


@pytest.mark.slow
def test_members_that_break_a_contract_are_refused(tmp_path):
    (tmp_path / "test_members.py").write_text(WRONG_MEMBERS)
    names = "differs_from or equal_declarations"
    found = optimized("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names, cwd=tmp_path)
    assert "FAILED test_members.py::TestScheme" in found
    assert "FAILED test_members.py::TestStrategy" in found


def test_what_a_guarantee_stands_on_is_checked(tmp_path):
    assert optimized("-c", INVARIANTS, cwd=tmp_path).split() == ["True"] * 4
