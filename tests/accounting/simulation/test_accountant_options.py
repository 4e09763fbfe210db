"""Options of accountants that simulate: refused where they are given, not hours later."""

import pytest

from dptrain.accounting.balls_in_bins import BallsInBinsImportance
from dptrain.accounting.min_sep import MinSepImportance
from dptrain.contrib.accountants import MinSepAnyMatrix

WRONG_TYPES = [
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", True),
    ("failure_probability", "small"),
    ("max_samples", 1e9),
    ("threads", 2.0),
    ("cache", 3),
    ("recheck", 1),
    ("progress", "yes"),
]
WRONG_VALUES = [
    ("seed", -1),
    ("failure_probability", 0.0),
    ("failure_probability", 1.0),
    ("failure_probability", float("nan")),
    ("max_samples", 0),
    ("threads", 0),
]


@pytest.mark.parametrize("made", [BallsInBinsImportance, MinSepImportance, MinSepAnyMatrix])
def test_wrong_types_and_wrong_values_are_told_apart(made, tmp_path):
    for name, value in WRONG_TYPES:
        with pytest.raises(TypeError, match=f"{name}="):
            made(**{name: value})
    for name, value in WRONG_VALUES:
        with pytest.raises(ValueError, match=f"{name}="):
            made(**{name: value})
    made(seed=2**128, threads=1, cache=tmp_path, failure_probability=0.5)


def test_those_of_some_accountants():
    with pytest.raises(ValueError, match="profile_samples=0"):
        MinSepAnyMatrix(profile_samples=0)
    with pytest.raises(TypeError, match=r"profile_samples=1000000\.0"):
        MinSepAnyMatrix(profile_samples=1e6)
    with pytest.raises(ValueError, match="engine='gpu'"):
        MinSepImportance(engine="gpu")
    with pytest.raises(TypeError, match="engine=1"):
        MinSepImportance(engine=1)
    with pytest.raises(ValueError, match="engine='numpy'"):
        MinSepImportance(engine="numpy")
