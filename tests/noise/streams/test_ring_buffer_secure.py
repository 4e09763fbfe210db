"""Streams that draw from the secure generator fulfil the contract of the streams."""

from __future__ import annotations

from dptrain.noise.generators import Normals
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

    def fill(self, out, *, seed, **place):
        Normals(seed, secure=True).fill(out, **place)
