"""Every model of the zoo is clipped as one example at a time is, or refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.coverage.case import Case
from tests.coverage.harness import built, examine
from tests.coverage.record import assert_as_recorded, dtypes, recorded
from tests.coverage.zoo import HERE, WITH_TORCHVISION
from tests.helpers.refusals import refuses

pytestmark = pytest.mark.followed


def _runs(cases: list[Case]) -> list[object]:
    return [
        pytest.param(
            case, dtype, id=f"{case.name}-{str(dtype)[6:]}", marks=() if case.quick else _SLOW
        )
        for case in cases
        for dtype in dtypes(case)
    ]


_SLOW = (pytest.mark.slow,)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("case", "dtype"), _runs(HERE))
def test_clipped_sums_are_the_loop_s_or_a_layer_is_refused(case: Case, dtype: torch.dtype) -> None:
    assert_as_recorded(case, examine(case, dtype))


def test_the_matrix_has_every_model() -> None:
    zoo = [(case.group, case.name) for case in (*HERE, *WITH_TORCHVISION)]
    assert len(set(zoo)) == len(zoo)
    assert set(recorded()) == set(zoo)


def test_a_refusal_names_a_part_of_the_model_and_a_remedy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert refuses("layer '0' has no rule; freeze its parameters", model)
    assert refuses("parameter '0.bias' is used twice: call the layer", model)
    assert not refuses("layer '1' has no rule; freeze its parameters", model)
    assert not refuses("layer '0' has no rule", model)
    assert not refuses("The size of tensor a (2) must match the size of tensor b (3)", model)


def test_models_are_alike_wherever_they_are_built() -> None:
    case = HERE[0]
    first, second = (dict(built(case).named_parameters()) for _ in range(2))
    assert all(torch.equal(p, second[name]) for name, p in first.items())
