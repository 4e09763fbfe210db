"""The common part of CIFAR-10 and CINIC-10: ten classes of 32×32 color photographs."""

from __future__ import annotations

IMAGE_SIZE = 32
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
