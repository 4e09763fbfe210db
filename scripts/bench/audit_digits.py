"""Audits with canaries among real data, by all steps and by the final model alone.

The net, steps and learning rates are those of utility_digits.py at ε = 8. To the 1,437 images are
added 1,000 canaries, in or out by coins: gradient canaries, which are read at every step, or
mislabeled images, of which the final model's loss tells. Half of the held-out images are what the
latter are made of, accuracy is that on the other half. The scheme counts the canaries, with the
same sampling probability, so the learning rate is multiplied by (N + m)/N: a step is then that of
the run without canaries, which stands beside.

The lower bounds hold with 95 %, each by itself. Whether a run passes is judged with a confidence of
.9995, so that all runs together alarm falsely with a chance of 1 %. Finished runs are kept in the
results file, so an interrupted benchmark goes on where it stopped.

    PYTHONPATH=. python scripts/bench/audit_digits.py [--seeds 5] [--results FILE]
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from dptrain import (
    BandMF,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    PrivacyEngine,
    calibrate,
    profile,
)
from dptrain.auditing import (
    StatedCurve,
    audit_canaries,
    audit_final_model,
    audit_one_run,
    game_of,
    noises,
    participations,
    plant_canaries,
)
from scripts import results
from scripts.bench.utility_digits import (
    BANDS,
    BATCHES_PER_EPOCH,
    CONTEST,
    MIN_SEP,
    STEPS,
    network,
    split,
)

OUT = pathlib.Path(__file__).parent / "results" / "audit_digits.json"
EPSILON, DELTA = 8.0, 1e-5  # as mδ is spent on guesses that are given away, below 1/(2N)
RATES = {"identity": 0.03, "bandmf": 0.06}  # as utility_digits.py chose them at ε = 8
VARIANTS = ("none", "gradient", "input")
CANARIES, SPARE = 1000, 1000
TITLES = {"identity": "`Identity` + `Poisson`", "bandmf": "`BandMF(10)` + `MinSep(10)`"}
COLUMNS = (
    ("mechanism", "{shown.mechanism}"),
    ("canaries", "{shown.canaries}"),
    ("stated ε", "{epsilon:g}"),
    (
        "ε at least",
        "{shown.run.epsilon_lower:.2f} ({shown.run.least:.2f} to {shown.run.most:.2f})",
    ),
    ("by the game alone", "{shown.expected:.2f}"),
    ("guesses right", "{shown.run.correct} of {shown.run.guesses}"),
    ("contradicted", "{shown.run.contradicted} of {shown.run.seeds}"),
    ("accuracy", "{shown.accuracy:% .1f} ({shown.least:% .1f} to {shown.most:% .1f})"),
)
LEVEL, CONFIDENCE = 0.05, 0.9995
HELD_OUT = 180  # images that input canaries are made of
CLASSES = 10
Row = dict[str, Any]


def mechanism_of(method: str, examples: int) -> MatrixMechanism:
    """The method's, calibrated for so many examples."""
    rate = 1 / BATCHES_PER_EPOCH
    if method == "identity":
        scheme, strategy = (
            Poisson(probability=rate, dataset_size=examples, steps=STEPS),
            Identity(),
        )
    else:
        scheme = MinSep.for_batch_size(
            batch_size=examples * rate, dataset_size=examples, min_sep=MIN_SEP, steps=STEPS
        )
        strategy = BandMF(bands=BANDS)
    return calibrate(scheme=scheme, strategy=strategy, epsilon=EPSILON, delta=DELTA).mechanism


def stated_curve(mechanism: MatrixMechanism) -> StatedCurve:
    """The accountant's bounds at all ε."""
    stated = profile(mechanism, np.linspace(0.0, 1.5 * EPSILON, 13))
    return StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)


@functools.cache
def halves() -> tuple[TensorDataset, TensorDataset]:
    """The held-out images: what canaries are made of, and what accuracy is measured on."""
    x, y = split().test.tensors
    return TensorDataset(x[:HELD_OUT], y[:HELD_OUT]), TensorDataset(x[HELD_OUT:], y[HELD_OUT:])


def mislabeled(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Different pairs of a held-out image and a wrong label."""
    images = halves()[0]
    rng = np.random.default_rng([seed, 7])
    picked = rng.choice(HELD_OUT * (CLASSES - 1), size=CANARIES, replace=False)
    pairs = []
    for image, shift in zip(*np.divmod(picked, CLASSES - 1), strict=True):
        x, y = images[int(image)]
        pairs.append((x, (y + 1 + int(shift)) % CLASSES))
    return pairs


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Of a batch."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def accuracy(model: nn.Module) -> float:
    """On the second half of the held-out images."""
    model.eval()
    x, y = halves()[1].tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def trained(method: str, variant: str, mechanism: MatrixMechanism, seed: int, curve: Any) -> Row:
    """One run, and what is found of it."""
    model, data = network(seed), split().train
    real = len(data)
    planted = (
        plant_canaries(
            model,
            data,
            canaries=CANARIES if variant == "gradient" else 0,
            inputs=mislabeled(seed) if variant == "input" else [],
            spare=SPARE,
            seed=seed,
        )
        if variant != "none"
        else None
    )
    module = model if planted is None else planted.module
    examples = data if planted is None else planted.data
    rate = RATES[method] * len(examples) / real
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate, momentum=CONTEST.momentum),
        data=examples,
        mechanism=mechanism,
        max_grad_norm=CONTEST.max_grad_norm,
        seed=seed,
    )
    before = np.zeros(0)
    if planted is not None and variant == "gradient":
        planted.listen(private)
    elif planted is not None:
        before = planted.input_losses(loss)
    for batch in private.loader:
        private.optimizer.zero_grad()
        loss(private.module, batch).backward()
        private.optimizer.step()
    private.detach()
    row: Row = {"seed": seed, "accuracy": accuracy(model)}
    if planted is None:
        return row
    stated = {"epsilon": EPSILON, "delta": DELTA, "curve": curve, "confidence": CONFIDENCE}
    if variant == "gradient":
        found = planted.heard()
        audit = audit_canaries(mechanism, found, **stated)
        scores, included = found.scores(mechanism), found.included
        row["counted"] = audit.counted.delta_lower, audit.counted.delta
    else:
        scores, included = before - planted.input_losses(loss), planted.inputs_included
        audit = audit_final_model(scores, included, others=real, **stated)
    run = audit_one_run(scores, included, delta=DELTA, alpha=LEVEL)
    return row | {
        "epsilon_lower": run.epsilon_lower,
        "guesses": run.guesses,
        "correct": run.correct,
        "most": run.most,
        "violations": list(audit.violations),
    }


def expected(mechanism: MatrixMechanism, seeds: int) -> list[float]:
    """The bounds of as many games without a model, of scheme and noise alone."""
    game, found = game_of(mechanism), []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, 11])
        included = rng.random(CANARIES) < 0.5
        taken = participations(game.scheme, CANARIES, 2 * seed + 1000)
        noise = noises(mechanism, CANARIES, 2 * seed + 1001)
        scores = game.scores((taken * included[:, None] + noise) @ game.matrix.T)
        found.append(audit_one_run(scores, included, delta=DELTA, alpha=LEVEL).epsilon_lower)
    return found


def shown(row: Row) -> Row:
    """The summary of a row's runs: medians, and the smallest and largest value over the seeds."""
    runs = sorted(row["runs"], key=lambda run: run.get("epsilon_lower", 0))
    accuracies = [run["accuracy"] for run in runs]
    found: Row = {
        "mechanism": TITLES[row["method"]],
        "canaries": f"{row['canaries']} {row['variant']}" if row["canaries"] else "none",
        "accuracy": statistics.mean(accuracies),
        "least": min(accuracies),
        "most": max(accuracies),
    }
    if row["canaries"]:
        middle = runs[len(runs) // 2]
        found["run"] = {
            **middle,
            "least": runs[0]["epsilon_lower"],
            "most": runs[-1]["epsilon_lower"],
            "contradicted": sum(bool(run["violations"]) for run in runs),
            "seeds": len(runs),
        }
    if "expected" in row:
        found["expected"] = statistics.median(row["expected"])
    return found


def main() -> None:
    """Train, audit, print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {
        (row["method"], row["variant"]): row
        for row in results.rows_of(options.results, "audit_digits")
    }
    cases = [(method, variant) for method in RATES for variant in VARIANTS]
    for method, variant in tqdm(cases, unit="case"):
        row = rows.get((method, variant))
        if row is None:
            size = len(split().train) + (0 if variant == "none" else CANARIES)
            row = {"method": method, "variant": variant, "runs": []}
            row |= {"examples": len(split().train), "canaries": size - len(split().train)}
            row |= {"epsilon": EPSILON, "delta": DELTA}
            row["mechanism"] = mechanism_of(method, size).to_dict()
            rows[method, variant] = row
        mechanism = MatrixMechanism.from_dict(row["mechanism"])
        missing = [s for s in range(options.seeds) if s not in [r["seed"] for r in row["runs"]]]
        curve = stated_curve(mechanism) if missing and variant != "none" else None
        if missing and variant == "gradient":
            row["expected"] = expected(mechanism, 20)
        for seed in tqdm(missing, unit="run", leave=False):
            row["runs"].append(trained(method, variant, mechanism, seed, curve))
            tqdm.write(f"{method} {variant}: {row['runs'][-1]}")
            table = results.Table(COLUMNS, [row | {"shown": shown(row)} for row in rows.values()])
            results.publish(
                options.results,
                {"audit_digits": table},
                script=__file__,
                machine=results.machine("torch", "numpy"),
                quiet=True,
            )


if __name__ == "__main__":
    main()
