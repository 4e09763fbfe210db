"""Leaks of floating-point releases: float32 noise as it was, Opacus, and dptrain's grid.

Nobody's Gaussian evidence is counted: the attacks look at which numbers can come out, and at their
last bits. Words that are in a batch are named from noisy sums and from published weights; of two
known sums one is named.

Run: PYTHONPATH=. python scripts/bench/float_leak.py [--json]
"""

from __future__ import annotations

import argparse
import functools
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from opacus.optimizers.optimizer import _generate_noise
from tqdm import tqdm

from dptrain import BandMF, Identity
from dptrain.noise import noise_stream
from scripts import results
from tests.helpers.released import (
    Seen,
    adapted,
    damped_adam,
    embedding_rows,
    in_floating_point,
    membership,
    opacus_rows,
    published_weights,
)
from tests.oracles.membership_game import Game
from tests.oracles.reachable import FLOAT32, FLOAT64, LastBits, sum_of_noise

OUT = pathlib.Path(__file__).parent / "results" / "float_leak.json"
SEED, SIGMA, BATCH = 11, 1.2161, 32
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "secure": {"secure": True},
    "BandMF(4)": {"bands": 4, "steps": 4},
    "BandMF(4), secure": {"bands": 4, "steps": 4, "secure": True},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "LoRA, SGD": {"make": adapted},
    "Adam, ε = 1": {"step": damped_adam, "steps": 1},
    "SGD, bfloat16": {"dtype": torch.bfloat16},
}
SLACK = 32  # numbers around the right one, where an optimizer's last bits are not in order
SUMS = ("float32", "float64")
SIGMAS = (1.0, 10.0, 1000.0)
ROUNDS = 100
SIDES = {"reference": "float32 noise, as it was", "opacus": "Opacus", "dptrain": "dptrain"}
SEEN = {
    "rows": {
        "default": "noisy sums",
        "secure": "noisy sums, secure",
        "BandMF(4)": "noisy sums, `BandMF(4)`",
        "BandMF(4), secure": "noisy sums, `BandMF(4)`, secure",
    },
    "weights": {
        "SGD": "weights, SGD",
        "LoRA, SGD": "weights of a LoRA adapter, SGD",
        "Adam, ε = 1": "weights, Adam with `eps=1`",
        "SGD, bfloat16": "weights in bfloat16, SGD",
    },
}


def home_made(draw: Callable[[torch.Tensor], torch.Tensor]) -> LastBits:
    """From releases that an observer makes at home, of nothing and of small sums."""
    size = 1 << 19
    total = np.random.default_rng(8).normal(0, 0.02, size).astype(np.float32)
    return LastBits.learn(draw(torch.zeros(size)), draw(torch.from_numpy(total)))


def of_dptrain(mode: dict[str, Any], total: torch.Tensor) -> torch.Tensor:
    """Mean gradients of a stream like the engine's."""
    strategy, steps = (BandMF(bands=4), 4) if "bands" in mode else (Identity(), 2)
    stream = noise_stream(
        strategy,
        steps=steps,
        like=[total],
        seed=SEED + (1 if total.any() else 2),
        secure=mode.get("secure", False),
    )
    return torch.cat([stream.release([total.clone()], SIGMA)[0] for _ in range(steps)]) / BATCH


def of_opacus(secure: bool, total: torch.Tensor) -> torch.Tensor:
    """Mean gradients as Opacus makes them."""
    torch.manual_seed(SEED + (1 if total.any() else 2))
    return (total + _generate_noise(SIGMA, total, secure_mode=secure)) / BATCH


def counted(steps: Sequence[Seen], bits: LastBits | None = None, slack: int = 0) -> dict[str, Any]:
    """The number of words, and of those that each attack names rightly and wrongly."""
    attacks: dict[str, Callable[[Seen], torch.Tensor]] = {
        "floats": lambda seen: seen.not_floats(slack)
    }
    if steps[0].bits:
        attacks["grid"] = lambda seen: seen.not_on_grid(slack)
    if bits is not None:
        attacks["last bits"] = lambda seen: bits.score(seen.numbers).sum(dim=1)
    tree: dict[str, Any] = {
        "in": sum(int(seen.touched.sum()) for seen in steps),
        "out": sum(int((~seen.touched).sum()) for seen in steps),
    }
    for name, attack in attacks.items():
        said = [(attack(seen), seen.touched) for seen in steps]
        tree[name] = {
            "right": sum(int((scores > 0)[touched].sum()) for scores, touched in said),
            "wrong": sum(int((scores > 0)[~touched].sum()) for scores, touched in said),
            "ranked": float(np.mean([_ranked(*each) for each in said])),
        }
    return tree


def _ranked(scores: torch.Tensor, touched: torch.Tensor) -> float:
    """The chance that a word of the batch has more evidence than another one: 0.5 by coins."""
    a, b = scores[touched][:, None], scores[~touched]
    return float((a > b).double().mean() + 0.5 * (a == b).double().mean())


def guessed(game: Game) -> dict[str, Any]:
    """Rates at which each kind of evidence names a sum, and the right one."""
    tree: dict[str, Any] = {"of": game.rounds}
    for name, each in {"floats": game.floats, "last bit": game.odd, "grid": game.grid}.items():
        guesses = game.guesses(each)
        tree[name] = {"right": int((guesses > 0).sum()), "wrong": int((guesses < 0).sum())}
    return tree


def engine(bar: tqdm[Any]) -> dict[str, Any]:
    """All attacks on dptrain's engine, as it is at the moment."""

    def done(what: dict[str, Any]) -> dict[str, Any]:
        bar.update()
        return what

    return {
        "rows": {
            name: done(
                counted(
                    embedding_rows(SIGMA, seed=SEED, **mode),
                    home_made(functools.partial(of_dptrain, mode)),
                )
            )
            for name, mode in MODES.items()
        },
        "weights": {
            name: done(
                counted(
                    published_weights(SIGMA, seed=SEED, **options),
                    slack=SLACK if "step" in options else 0,
                )
            )
            for name, options in WEIGHTS.items()
        },
        "sums": {
            f"{dtype}, σ = {sigma:g}": done(
                guessed(membership(sigma, dtype=getattr(torch, dtype), seed=SEED, releases=ROUNDS))
            )
            for dtype in SUMS
            for sigma in SIGMAS
        },
    }


def opacus(bar: tqdm[Any]) -> dict[str, Any]:
    """The attacks on Opacus's optimizer."""
    rows, sums = {}, {}
    for name, secure in (("default", False), ("secure", True)):
        found = opacus_rows(SIGMA, seed=SEED, secure=secure)
        rows[name] = counted(found, home_made(functools.partial(of_opacus, secure)))
        bar.update()
    for dtype in SUMS:
        for sigma in SIGMAS:
            pair = torch.randn(2, 500, dtype=getattr(torch, dtype)) / 500**0.5

            def release(total: torch.Tensor, deviation: float = 0.7 * sigma) -> torch.Tensor:
                return total + _generate_noise(deviation, total)

            game = Game.play(
                release,
                (pair[0], pair[1]),
                deviation=0.7 * sigma,
                rounds=ROUNDS,
                noisy=sum_of_noise,
                codes=FLOAT32 if dtype == "float32" else FLOAT64,
            )
            sums[f"{dtype}, σ = {sigma:g}"] = guessed(game)
            bar.update()
    return {"rows": rows, "sums": sums}


def tables(sides: dict[str, Any]) -> dict[str, results.Table]:
    """The evidence, of each thing seen, that ranks or names the farthest from coins."""

    def rows(titles: Mapping[str, str], part: str, best: Callable[[Any], Any]) -> list[Any]:
        return [
            {"seen": title}
            | {
                side: best(found[part][name])
                for side, found in sides.items()
                if name in found.get(part, {})
            }
            for name, title in titles.items()
        ]

    def words(found: dict[str, Any]) -> dict[str, Any]:
        kinds = [found[kind] for kind in ("floats", "last bits", "grid") if kind in found]
        best = max(kinds, key=lambda each: abs(each["ranked"] - 0.5))
        return {**best, "in": found["in"], "out": found["out"]}

    def sums(found: dict[str, Any]) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [found["floats"], found["last bit"]]
        return max(kinds, key=lambda each: abs(each["right"] - each["wrong"]))

    seen = [row for part, titles in SEEN.items() for row in rows(titles, part, words)]
    named = {name: name for name in sides["dptrain"]["sums"]}
    ranked = "{@.right} of {@.in}, {@.wrong} of {@.out}; {@.ranked:.2f}"
    return {
        "float_leak": results.Table(_columns("what is seen", ranked), seen),
        "float_leak_sums": results.Table(
            _columns("parameters", "{@.right} right, {@.wrong} wrong"), rows(named, "sums", sums)
        ),
    }


def _columns(first: str, template: str) -> results.Columns:
    sides = ((title, template.replace("@", side)) for side, title in SIDES.items())
    return [(first, "{seen}"), *sides]


def main() -> None:
    """Print what was counted; with ``--json`` write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of a fixed seed, and of σ that guarantees nothing
    logging.disable(logging.WARNING)
    torch.manual_seed(SEED)
    total = 2 * (len(MODES) + len(WEIGHTS)) + 3 * len(SUMS) * len(SIGMAS) + 2
    with tqdm(total=total, unit="run") as bar:
        with in_floating_point():
            reference = engine(bar)
        grid = engine(bar)
        sides = {"reference": reference, "opacus": opacus(bar), "dptrain": grid}
    results.publish(
        OUT if options.json else None,
        tables(sides),
        script=__file__,
        machine=results.machine("torch", "opacus"),
        sigma=SIGMA,
        sides=sides,
    )


if __name__ == "__main__":
    main()
