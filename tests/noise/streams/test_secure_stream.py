"""Streams that draw from the secure generator fulfil the contract of the streams."""

from __future__ import annotations

import numpy as np
import torch

from dptrain.noise.generators.secure import SecureNormals
from dptrain.strategies import BSR
from dptrain.testing import NoiseStreamContract


class TestSecureNoise(NoiseStreamContract):
    steps = 12
    samples = 60_000

    def make_strategy(self):
        return BSR(bands=3)

    def foreign_strategy(self):
        return BSR(bands=4)

    def open(self, *arguments, **options):
        return super().open(*arguments, secure=True, **options)

    def draw_z(self, seed, size, *, group=0):
        row, rows = torch.empty(size), []
        for step in range(self.bound().rows(self.steps)):
            SecureNormals(seed).fill(row, group=group, step=step)
            rows.append(row.double().numpy().copy())
        return np.array(rows)
