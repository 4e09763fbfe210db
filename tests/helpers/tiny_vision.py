"""The vision recipe at a size that runs in a second."""

from __future__ import annotations

import pathlib

import pytest

from recipes.command import INTERRUPTED
from recipes.vision import main
from tests.helpers.stopping import ctrl_c, stop_at

SEED = 987654321
TINY = [
    "data.image_size=8",
    "model.channels=[4]",
    "model.groups=2",
    "model.hidden=4",
    "scheme.batch_size=40",
    "steps=6",
    "evaluate_every=2",
    "checkpoint_every=2",
    "optimizer.schedule=linear",
]
# No calibration and no plots: for the tests that look at something else.
PLAIN = [
    *TINY,
    "scheme.type=Poisson",
    "strategy.type=Identity",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "plots=false",
    f"seed={SEED}",
]


def run(config: pathlib.Path, output: pathlib.Path, *arguments: str) -> int:
    """The recipe's exit status."""
    return main(["--config", str(config), "--output", str(output), *arguments])


def stopped_and_resumed(config: pathlib.Path, output: pathlib.Path, *arguments: str) -> None:
    """The same run, interrupted after its third step and gone on with."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        assert run(config, output, *arguments) == INTERRUPTED
    assert run(config, output, "--resume", *arguments) == 0
