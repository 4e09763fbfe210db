"""Audits find an engine with noise in floating point, with a computed power, and no other."""

from __future__ import annotations

import contextlib

import pytest

from scripts.attack import release
from scripts.attack.harness import Finding
from tests.helpers.broken_release import RELEASE_FAULTS
from tests.helpers.released import in_floating_point


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", RELEASE_FAULTS)
def test_a_release_in_floating_point_is_found(name):
    fault = RELEASE_FAULTS[name]
    assert fault.power() > 1 - 1e-12
    assert fault.audited(seed=2) == ()
    with fault.broken():
        assert fault.audited(seed=2)
    assert fault.audited(seed=2) == ()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_attack_finds_nothing(seed):
    assert release.case(seed) == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_the_attack_finds_noise_in_floating_point(seed):
    with in_floating_point(), pytest.raises(Finding, match="release not on a grid"):
        release.case(seed)


def test_an_attack_without_power_says_so(monkeypatch):
    monkeypatch.setattr(release, "in_floating_point", contextlib.nullcontext)
    with pytest.raises(Finding, match="no power"):
        release.case(0)
