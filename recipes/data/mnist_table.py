"""MNIST as a table: a row of pixels, and ten labels of which each image has one."""

from __future__ import annotations

import pathlib

import torch

from recipes.data.mnist import CLASSES, IMAGE_SIZE, read_mnist
from recipes.data.multilabel import ConditionGroups, LabelledRows, MultiLabel, grouped
from recipes.data.parts import Foreseen, Part, unheard

LARGEST_VALUE = 255.0  # of a byte: public, no maximum of the images
MNIST_GROUPS = ConditionGroups(conditions=("8", "1"))


def mnist_table(
    root: str | pathlib.Path,
    *,
    groups: ConditionGroups = MNIST_GROUPS,
    foreseen: Foreseen = unheard,
) -> MultiLabel:
    """60,000 training and 10,000 test rows: 784 features in [0, 1], one-hot labels ``0`` to ``9``.

    Args:
        root: folder of MNIST in any layout that ``recipes.data.mnist.mnist`` reads.
        groups: of which rows to report.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError, ValueError: as ``recipes.data.mnist.mnist``, or if a group stays empty.
    """
    train, test = (_rows(part) for part in read_mnist(root, foreseen=foreseen))
    names = [f"pixel {row},{column}" for row in range(IMAGE_SIZE) for column in range(IMAGE_SIZE)]
    return grouped(train, test, features=names, labels=CLASSES, groups=groups)


def _rows(part: Part) -> LabelledRows:
    pixels, labels = part
    one_hot = torch.nn.functional.one_hot(labels, len(CLASSES)).float()
    return LabelledRows(pixels.flatten(1).float() / LARGEST_VALUE, one_hot)
