"""Owner maps of whole programs, random ones and ones made to deceive, claim no more than is so."""

from __future__ import annotations

import pytest
import torch

from tests.clipping.owners import mixing_programs as programs
from tests.clipping.owners import random_programs
from tests.clipping.owners.claims import Claim, check, faults
from tests.helpers.dependence import Owned, dependence

pytestmark = pytest.mark.filterwarnings("ignore")

PART = 12  # random programs a test


def given() -> list[Owned]:
    """Rows, labels and a mask that belong to rows, and a weight that all share."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(programs.ROWS, programs.WIDTH, generator=generator, dtype=torch.float64)
    y = torch.tensor([2, 1, 0, 1])
    mask = torch.rand(x.shape, generator=generator) < 0.5
    mask[0, 0], mask[1, 0] = True, False
    weight = torch.randn(programs.WIDTH, programs.WIDTH, generator=generator, dtype=torch.float64)
    return [Owned.rows(x), Owned.rows(y), Owned.rows(mask), Owned.shared(weight)]


@pytest.mark.sample(every=297)
@pytest.mark.parametrize("part", range(48))
def test_random_programs(part: int) -> None:
    for seed in range(PART * part, PART * (part + 1)):
        program = random_programs.program(seed)
        try:
            found = check(program, random_programs.arguments(seed), seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {program}: {error}") from error
        assert not any(each.escapes for each in found), f"seed {seed}, {program}"


@pytest.mark.sample(every=15)
@pytest.mark.parametrize("name", programs.MIXING)
def test_rows_that_meet_are_claimed_by_none(name: str) -> None:
    assert not _held(programs.MIXING[name]).escapes


@pytest.mark.parametrize("name", programs.ESCAPING)
def test_numbers_that_leave_are_noted(name: str) -> None:
    assert _held(programs.ESCAPING[name]).escapes


@pytest.mark.parametrize("name", [*programs.SIZES, *programs.HIDDEN])
def test_sizes_and_what_modes_do_not_see(name: str) -> None:
    """Noted as an escape, or claimed by none."""
    _held({**programs.SIZES, **programs.HIDDEN}[name])


def _held(program: programs.Rows) -> Claim:
    """The claim about a program in which examples meet."""
    truth = dependence(program, given())
    assert any(meets(moved) for moved in truth.moved), "nothing meets in it"
    found, said = faults(program, given())
    assert not said, "\n".join(said)
    return found


def meets(moved: torch.Tensor) -> bool:
    """True if several examples move an element, or another than the row's own."""
    rows = moved.flatten(2).any(2) if moved.dim() > 2 else moved
    apart = rows.dim() == 2 and not bool((rows & ~torch.eye(*rows.shape).bool()).any())
    return bool((moved.sum(0) > 1).any()) or not apart
