"""scikit-learn's digits as a table: pixels, and several conditions that a digit has or has not."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from recipes.data.digits import digits
from recipes.data.multilabel import ConditionGroups, LabelledRows, MultiLabel, grouped

SIDE = 8  # pixels; the size at which the images are handed out
CONDITIONS: dict[str, tuple[int, ...]] = {
    **{str(digit): (digit,) for digit in range(1, 10)},
    "odd": (1, 3, 5, 7, 9),
    "prime": (2, 3, 5, 7),
    "power of two": (1, 2, 4, 8),
    "above four": (5, 6, 7, 8, 9),
}  # name -> the digits that have it; a zero has none
DIGIT_GROUPS = ConditionGroups(conditions=("8", "prime"), size=100, test_size=30)


def digit_conditions(
    *,
    groups: ConditionGroups = DIGIT_GROUPS,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> MultiLabel:
    """1,797 real images: 64 features in [-1, 1], 13 labels; zeros are the rows with no condition.

    The shape of a phenotyping task on data that come with a package. Features are scaled by their
    public range.

    Args:
        groups: of which rows to report.
        test_fraction, seed: of the split, which keeps the shares of the digits, see
            ``recipes.data.digits.digits``.

    Raises:
        ValueError: if a value is out of range, or a group stays empty.
    """
    split = digits(image_size=SIDE, test_fraction=test_fraction, seed=seed)
    has = torch.tensor(
        [[float(digit in having) for having in CONDITIONS.values()] for digit in range(10)]
    )
    parts = []
    for part in (split.train, split.test):
        assert isinstance(part, TensorDataset)
        pixels, shown = part.tensors
        parts.append(LabelledRows(pixels.flatten(1), has[shown]))
    names = [f"pixel {row},{column}" for row in range(SIDE) for column in range(SIDE)]
    return grouped(*parts, features=names, labels=tuple(CONDITIONS), groups=groups)
